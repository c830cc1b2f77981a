"""The commands `lantern` and `lantern-generate`; `main.py` lists where each is.

May import everything, heavy modules only after the arguments are parsed. Nothing in the package imports it.
"""
