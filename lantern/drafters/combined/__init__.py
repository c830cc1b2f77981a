"""Drafters made of two models or of two drafters: SAM with EAGLE-1, cascades.

Imported by `methods`, `training` and `engines`, by module path.
Imports `core`, `decoding`, `models` and the other families of `drafters`.
"""
