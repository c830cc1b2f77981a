"""Speed: benchmarks, shapes, contenders and the comparison of tokens with plain decoding.

Imported by `cli` and by the other folders of `lantern.eval`.
Imports all of `lantern`.
"""
