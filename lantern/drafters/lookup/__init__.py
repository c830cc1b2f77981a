"""Drafters that look tokens up: SAM decoding with its trained tables and matchers, and repeats of neighbours."""
