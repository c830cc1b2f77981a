"""How a pass is run: eager, compiled, CUDA graphs, C++; and quantized weights. `engine.py` has the protocol.

Imported by: methods, models, generation, training, cli.
Imports: core and decoding; it knows no drafter.
"""
