"""Debug mode: finds the module of the target or drafter that first gives NaN or infinity."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from lantern.generation.images import NotFiniteError

ROTARY, PROMPT, TOKENS = "rotary", "cls_embedding", "tok_embeddings"  # children of a target


@contextmanager
def watched_layers(target: Any, drafter: nn.Module | None = None) -> Iterator[None]:
    """Check the output of every module within the context; NotFiniteError names the first that gives NaN, by its path.

    Every check waits for the device, so this is for debugging only.
    """
    positions: Int[Tensor, "rows n"] | None = None  # of a pass over tokens, None for the prompt

    def begin_prompt(module: nn.Module, inputs: Any) -> None:
        nonlocal positions
        positions = None

    def begin_pass(module: nn.Module, inputs: tuple[Tensor]) -> None:
        nonlocal positions
        positions = inputs[0]

    def place(output: Tensor) -> str:
        """Return where the first NaN is, if the output has one row per input position."""
        if positions is not None and (output.ndim < 3 or output.shape[:2] != positions.shape):
            return ""
        first = -1 if positions is None else int(positions[~output.isfinite().flatten(2).all(-1)].min())
        token = first - target.config.cls_token_num
        return f" at token {token}" if token >= 0 else " at the prompt"

    def check(name: str, has_place: bool) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not bool(output.isfinite().all()):  # sync
                what = "NaN" if bool(output.isnan().any()) else "infinity"
                raise NotFiniteError(f"{name} gave {what}{place(output) if has_place else ''}")

        return hook

    handles = [
        part.register_forward_hook(check(f"{owner}.{name}", owner == "transformer" and name != TOKENS))
        for owner, module in (("transformer", target), ("drafter", drafter))
        for name, part in (() if module is None else module.named_modules())
        if name
    ]
    # reading the prompt begins with its embedding, a pass over tokens with the look-up of rotary factors
    for name, begin in ((PROMPT, begin_prompt), (ROTARY, begin_pass)):
        handles += [part.register_forward_pre_hook(begin) for child, part in target.named_children() if child == name]
    try:
        with torch.compiler.set_stance("force_eager"):  # on a GPU layers are compiled one by one
            yield
    finally:
        for handle in handles:
            handle.remove()
