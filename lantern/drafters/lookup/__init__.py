"""Drafters that look tokens up: SAM decoding with its trained tables and matchers, and repeats of neighbours.

Imported by `methods`, `training` and `engines`, by module path.
Imports `core`, `models` and `drafters.trees`.
"""
