"""Drafters: they guess the next tokens of the target, one folder per family; `trees` and `policies` shape the drafts.

Imported by `methods`, `engines`, `training` and `generation`.
Imports `core`, `decoding`, `models`, `methods` and, within a family, its shared files.
"""
