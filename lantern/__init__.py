"""Relaxed speculative decoding for visual autoregressive models.

    from lantern import LanternPipeline

    pipe = LanternPipeline.from_pretrained("lantern-emoji")
    pipe("a red apple").images[0].save("apple.png")

Public names resolve on first use, so `import lantern` loads neither torch nor diffusers.
"""

from importlib import import_module

from lantern import _torchvision

__version__ = "0.1.0"

_HOME_OF = {
    "DraftTree": "lantern.types",
    "Drafter": "lantern.types",
    "LanternPipeline": "lantern.pipeline",
    "Relaxation": "lantern.types",
    "Scores": "lantern.types",
    "Step": "lantern.types",
    "Target": "lantern.types",
    "TreePolicy": "lantern.types",
    "Verdict": "lantern.types",
    "Verifier": "lantern.types",
}
__all__ = sorted(_HOME_OF)

_torchvision.watch_import()


def __getattr__(name: str) -> object:
    """Import a public name from its module the first time it is asked for."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'lantern' has no attribute {name!r}; it has {__all__}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
