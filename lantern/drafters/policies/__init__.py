"""Tree policies: they choose the nodes and the depth of a dynamic tree; `records.py` stores drafts to learn from."""
