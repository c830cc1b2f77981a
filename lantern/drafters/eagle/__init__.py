"""EAGLE drafters: versions 1 to 3, PosS, ViSpec, FR-Spec, and their static and dynamic trees.

Imported by `methods`, `training` and `engines`, by module path.
Imports `core`, `decoding`, `models`, `drafters.trees` and `drafters.policies`.
"""
