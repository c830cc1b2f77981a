"""Verifiers: how much of a draft tree is kept."""
