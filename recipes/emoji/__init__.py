"""The embedded model lantern-emoji: emoji packages, captions, composites, the text encoder, and its configs.

Used through `lantern train STAGE --recipe emoji`; `recipe.py` lists the stages. May import everything of lantern.
"""
