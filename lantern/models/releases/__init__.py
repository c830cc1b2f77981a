"""Readers of released checkpoints, which `lantern convert` writes in our layouts: one file per kind of model."""
