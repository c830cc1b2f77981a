"""Relaxations: which codes may stand in for one another."""
