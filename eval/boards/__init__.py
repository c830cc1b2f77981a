"""The leaderboard: its measurement as JSON lines, its table and its plot.

Imported by `cli`.
Imports all of `lantern` and the other folders of `lantern.eval`.
"""
