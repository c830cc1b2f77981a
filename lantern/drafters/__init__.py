"""Drafters guess the next tokens of the target: one folder per family; `trees` and `policies` shape the drafts."""
