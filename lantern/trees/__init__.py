"""Trees: what a drafter grows."""
