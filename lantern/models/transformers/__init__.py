"""Targets of transformers' classes: `target` runs them, one file per family has its prompts, tokens and pixels."""
