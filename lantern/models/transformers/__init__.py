"""Targets of transformers' classes: `target` runs them, one file per family has its prompts, tokens and pixels.

Imported by `lantern.models.folder`, `target` also by `lantern.engines`. Imports `lantern.core`; transformers itself is
imported where it is used.
"""
