"""Training: the loop, one file per stage (tokenizer, target, drafter, policy), data sources, and add-on tables.

Imported by `lantern.cli` and by recipes. Imports core, decoding, drafters, verifiers, methods, models, and of
`lantern.generation` the image files and the profiles.
"""
