"""Drafters: who guesses what the target would say."""
