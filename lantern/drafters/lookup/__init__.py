"""Drafters that look tokens up: SAM decoding, its trained tables and its matchers.

Imported by `methods`, `training` and `engines`, by module path.
Imports `core`, `models` and `drafters.trees`.
"""
