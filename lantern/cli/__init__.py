"""The commands `lantern` and `lantern-generate`, one file per command.

May import everything, heavy modules only after the arguments are parsed. Nothing in the package imports it.
"""
