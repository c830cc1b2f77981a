"""Tree policies: they choose the nodes and the depth of a dynamic tree; `records.py` stores drafts to learn from.

Imported by `drafters.eagle.dynamic`, `training` and `generation`.
Imports `core` and `drafters.trees`.
"""
