"""Relaxed speculative decoding for visual autoregressive models.

    from lantern import LanternPipeline

    pipe = LanternPipeline.from_pretrained("lantern-emoji")
    pipe("a red apple").images[0].save("apple.png")

Public names are imported on first use, so `import lantern` loads neither torch nor diffusers.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

from lantern.core.process import watch_import as _watch_import

if TYPE_CHECKING:
    from lantern.core.types import Drafter, DraftTree, Scores, Step, Target, Verdict, Verifier
    from lantern.generation.generator import generate
    from lantern.generation.pipeline import LanternPipeline
    from lantern.methods import Method
    from lantern.models.folder import load_model
    from lantern.verifiers.relaxations.rule import Relaxation

__version__ = "2.0.0"
__all__ = [
    "DraftTree",
    "Drafter",
    "LanternPipeline",
    "Relaxation",
    "Scores",
    "Step",
    "Target",
    "Verdict",
    "Verifier",
    "generate",
    "list_methods",
    "load_model",
]
_MODULES = {
    "LanternPipeline": "lantern.generation.pipeline",
    "generate": "lantern.generation.generator",
    "load_model": "lantern.models.folder",
    "Relaxation": "lantern.verifiers.relaxations.rule",
}

# transformers and diffusers import torchao if it is installed, which warns of features that are not used here
_CHATTY = ("torchao", "diffusers.quantizers.torchao", "torch.utils._pytree")

_watch_import()
for _name in _CHATTY:
    logging.getLogger(_name).setLevel(logging.ERROR)


def list_methods() -> "list[Method]":
    """Return all methods; `name`, `summary` and `options` describe each."""
    from lantern.methods import METHODS

    return list(METHODS.values())


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'lantern' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_MODULES.get(name, "lantern.core.types")), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
