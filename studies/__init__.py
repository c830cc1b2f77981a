"""One-off measurements behind single sentences or tables of the documents, run from a checkout: `python -m studies.X`.

They may import everything of lantern; nothing imports them. They are not in the wheel.
"""
