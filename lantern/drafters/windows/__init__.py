"""Jacobi windows: drafters without a network, which reuse the samples of the target's last pass."""
