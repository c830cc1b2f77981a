"""The decoding loop with its run state, plain decoding, prefill, the key-value cache and statistics.

Imported by `drafters`, `engines`, `methods`, `models`, `generation` and `training`.
Imports `core`, and `engines` for the engine that runs a pass.
"""
