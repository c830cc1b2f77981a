"""Training: one loop, one file a stage."""
