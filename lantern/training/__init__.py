"""Training: the loop, one file per stage (tokenizer, target, drafter, policy), data sources, and add-on tables."""
