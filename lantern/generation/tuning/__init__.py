"""Tuning: measures this machine and finds the fastest method for a model.

May import generation and everything below it. Only `lantern.cli.tune`, method "auto" and policies import it.
"""
