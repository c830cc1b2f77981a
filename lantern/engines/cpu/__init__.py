"""The C++ engine for CPUs. Its library is built on the user's machine.

Imported by: engines, cli.
Imports: core, decoding, engines, and the modules of drafters that it packs.
"""
