"""Tables and plots of results: leaderboard, frontier, card, studies at equal budget.

Imported by `cli` and by the other folders of `lantern.eval`.
Imports all of `lantern`.
"""
