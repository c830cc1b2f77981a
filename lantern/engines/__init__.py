"""How passes are run: by torch, as CUDA graphs, in C++. `engine.py` has the base class."""
