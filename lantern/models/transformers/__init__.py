"""Targets of transformers' classes: `target` runs them, `loading` lists the families."""
