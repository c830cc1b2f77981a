"""Tuning: the fastest way of decoding on this machine, from measurements."""
