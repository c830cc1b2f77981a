"""Decoding: the loop, its baseline, and the cache they share."""
