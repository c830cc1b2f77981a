"""The decoding loop with its run state, plain decoding, the key-value cache and statistics."""
