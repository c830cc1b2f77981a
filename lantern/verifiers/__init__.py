"""Verifiers: they decide how much of a draft tree is kept. `relaxations/` holds the rules that relax them."""
