"""Drafters guess the next tokens of the target, a file or folder per family; `trees` and `policies` shape drafts."""
