"""The LlamaGen family: an autoregressive transformer over the tokens of a VQ tokenizer (arXiv:2406.06525)."""
