"""Speed: benchmarks, shapes, contenders and the comparison of tokens with plain decoding."""
