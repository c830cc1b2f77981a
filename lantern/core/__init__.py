"""What everything shares: types, sampling, noise, the config loader, component files, signals.

Imports nothing else of lantern. Everything imports it.
"""
