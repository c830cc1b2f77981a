"""Jacobi windows: drafters without a network, which reuse the samples of the target's last pass.

Imported by `methods`, `training` and `engines`, by module path.
Imports `core` and `drafters.trees`.
"""
