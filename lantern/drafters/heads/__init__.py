"""Drafters that guess several codes in one pass: Medusa heads, vertical heads, ParallelSpec.

Imported by `methods`, `training` and `engines`, by module path.
Imports `core`, `decoding`, `models` and `drafters.eagle.eagle1`.
"""
