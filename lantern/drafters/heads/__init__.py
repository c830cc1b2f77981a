"""Drafters that guess several tokens in one pass: Medusa heads, vertical heads, ParallelSpec."""
