"""The decoding loop with its run state, plain decoding, prefill, the key-value cache and statistics."""
