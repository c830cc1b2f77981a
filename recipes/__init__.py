"""Recipes: what serves to make one particular model, each in a folder with a `recipe.py`. Not part of the wheel.

Found by `lantern train STAGE --recipe NAME` in a clone of the repository. May import everything of lantern; lantern
imports nothing of it.
"""
