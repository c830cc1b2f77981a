"""The leaderboard: its measurement as JSON lines, its table and its plot."""
