"""Methods by name: which drafter and verifier stand behind each, and what can be set.

`method` says what a method is, `catalogue` declares them all. Importing this folder needs no torch; nothing here
imports a drafter or a verifier before a method is built.
"""

from lantern.methods import catalogue  # noqa: F401
from lantern.methods.method import METHODS, PROMISES, Made, Method, Option, check_parts, find

__all__ = ["METHODS", "PROMISES", "Made", "Method", "Option", "check_parts", "find"]
