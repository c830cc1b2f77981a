"""Engines for CUDA: one captured graph per step."""
