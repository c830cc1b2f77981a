"""Relaxed speculative decoding for visual autoregressive models.

    from lantern import LanternPipeline

    pipe = LanternPipeline.from_pretrained("lantern-emoji")
    pipe("a red apple").images[0].save("apple.png")

Public names resolve on first use, so `import lantern` loads neither torch nor diffusers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lantern import _torchvision

if TYPE_CHECKING:
    from lantern.pipeline import LanternPipeline
    from lantern.types import Drafter, DraftTree, Relaxation, Scores, Step, Target, TreePolicy, Verdict, Verifier

__version__ = "0.1.0"
__all__ = [
    "DraftTree",
    "Drafter",
    "LanternPipeline",
    "Relaxation",
    "Scores",
    "Step",
    "Target",
    "TreePolicy",
    "Verdict",
    "Verifier",
]

_torchvision.watch_import()


def __getattr__(name: str) -> object:
    """Import a public name from its module the first time it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'lantern' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module("lantern.pipeline" if name == "LanternPipeline" else "lantern.types"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
