"""LlamaGen: an autoregressive transformer over the codes of a VQ tokenizer (arXiv:2406.06525)."""
