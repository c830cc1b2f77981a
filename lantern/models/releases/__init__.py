"""Readers of released checkpoints, which `lantern convert` writes in the layouts that load: one file per kind of model.

Imported by `training` and `cli`. Imports `core`, `methods` and the model families.
"""
