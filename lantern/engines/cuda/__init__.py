"""Engines for CUDA: one captured graph per step.

Imported by: engines.
Imports: core, decoding, engines, verifiers, and the targets of models.
"""
