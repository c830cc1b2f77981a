"""The LlamaGen family: an autoregressive transformer over the tokens of a VQ tokenizer (arXiv:2406.06525).

Imported by `drafters`, `engines`, `models`, `generation`, `training`, `cli` and `lantern.eval`.
Imports `core` only.
"""
