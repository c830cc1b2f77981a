"""Debug mode: finds the layer of the target or drafter that first gives NaN or infinity."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.generation.images import NotFiniteError


@contextmanager
def watched_layers(target: Any, drafter: nn.Module | None = None) -> Iterator[None]:
    """Check the output of every layer within the context; NotFiniteError names the first layer that gives NaN.

    Every check waits for the device, so this is for debugging only.
    """
    watch = LayerWatch(target.config.cls_token_num)
    handles = watch.attach(target, "", reports_place=True)
    handles += watch.record_positions(target)
    if drafter is not None:
        handles += watch.attach(drafter, "the drafter's ", reports_place=False)
    try:
        with torch.compiler.set_stance("force_eager"):  # on a GPU layers are compiled one by one
            yield
    finally:
        for handle in handles:
            handle.remove()


class LayerWatch:
    """Forward hooks that raise on NaN and infinity; `prefix` is the number of the target's conditioning slots."""

    def __init__(self, prefix: int) -> None:
        self._prefix = prefix
        self._positions: Int[Tensor, "rows n"] | None = None

    def attach(self, module: nn.Module, owner: str, *, reports_place: bool) -> list[Any]:
        """Add hooks to the embeddings, every layer and its parts, the last norm and the head; return their handles."""
        return [
            part.register_forward_hook(self._hook(owner + layer_name(name), reports_place and name not in EMBEDDINGS))
            for name, part in module.named_modules()
            if layer_name(name)
        ]

    def record_positions(self, target: nn.Module) -> list[Any]:
        """Add hooks that record the rotary positions of a pass, None for the prompt; return their handles.

        A prompt begins at its embedding, a pass over tokens where the target looks up its rotary factors.
        """
        return [
            part.register_forward_pre_hook(self._record if name == ROTARY else self._forget)
            for name, part in target.named_children()
            if name in (ROTARY, PROMPT)
        ]

    def _record(self, module: nn.Module, inputs: tuple[Int[Tensor, "rows n"]]) -> None:
        self._positions = inputs[0]

    def _forget(self, module: nn.Module, inputs: Any) -> None:
        self._positions = None

    def _hook(self, name: str, reports_place: bool) -> Callable[..., None]:
        def check(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):  # sync
                what = "NaN" if bool(output.isnan().any()) else "infinity"
                raise NotFiniteError(f"{name} gave {what}{self._place(output) if reports_place else ''}")

        return check

    def _place(self, output: Float[Tensor, "rows n c"]) -> str:
        """Return where the first NaN is, if the output has one row per input position."""
        if self._positions is None:
            return " at the prompt"
        if output.ndim != 3 or output.shape[:2] != self._positions.shape:
            return ""
        token = int(self._positions[~torch.isfinite(output).all(-1)].min()) - self._prefix
        return f" at token {token}" if token >= 0 else " at the prompt"


ROTARY, PROMPT = "rotary", "cls_embedding"  # children of a target
EMBEDDINGS = {
    PROMPT: "the prompt's embedding",
    "tok_embeddings": "the tokens' embedding",
    "embed_tokens": "embedding",
}
ENDS = {"fc": "first projection", "norm": "the last norm", "output": "the head"}
# Reading the prompt bypasses `attention` itself, so its projections are watched. Attention spreads a NaN to other
# positions; the first projection still has it at the position where it arose.
PARTS = {
    "attention_norm": " attention norm",
    "attention.wqkv": " attention",
    "attention.wo": " attention",
    "attention": " attention",
    "ffn_norm": " feed-forward norm",
    "feed_forward": " feed-forward",
    "": "",
}


def layer_name(module: str) -> str:
    """Return the name of a module of a transformer or drafter in words; "" for modules that are not watched."""
    if (found := re.fullmatch(r"layers\.(\d+)\.?([\w.]*)", module)) and found[2] in PARTS:
        return f"layer {found[1]}{PARTS[found[2]]}"
    return (EMBEDDINGS | ENDS).get(module, "")
