"""Relaxations: rules by which a draft may replace a token of the target, one file per published rule.

Imported by `verifiers`, `methods` and `models`.
Imports `core` only.
"""
