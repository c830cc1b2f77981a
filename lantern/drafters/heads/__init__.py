"""Drafters that guess several tokens in one pass: Medusa heads, vertical heads, ParallelSpec.

Imported by `methods`, `training` and `engines`, by module path.
Imports `core`, `decoding`, `models` and `drafters.eagle.eagle1`.
"""
