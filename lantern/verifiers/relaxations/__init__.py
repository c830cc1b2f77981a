"""Relaxations: rules by which a draft may replace a token of the target."""
