"""Methods by name: which drafter, tree, verifier and relaxation stand behind each, and what can be set.

`spec` defines what a method is, `registry` finds it and builds its decoder. Importing this folder needs no torch.
Drafters, policies and relaxations import `spec`; nothing here imports them except by the name of their module.
"""

from lantern.methods.registry import METHODS, find, register, specs
from lantern.methods.spec import AddOn, DrafterContext, Method, MethodSpec, Setting

__all__ = ["METHODS", "AddOn", "DrafterContext", "Method", "MethodSpec", "Setting", "find", "register", "specs"]
