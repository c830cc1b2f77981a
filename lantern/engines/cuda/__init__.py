"""Engines for CUDA: one captured graph per step.

Imported by: engines.
Imports: core, decoding, engines, and the targets of models.
"""
