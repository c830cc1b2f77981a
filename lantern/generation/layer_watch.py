"""Debug mode: finds the module of the target or drafter that first gives NaN or infinity."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lantern.generation.images import NotFiniteError

# modules of a target
ROTARY, PROMPT, TOKENS = "transformer.rotary", "transformer.cls_embedding", "transformer.tok_embeddings"


@contextmanager
def watched_layers(target: Any, drafter: nn.Module | None = None) -> Iterator[None]:
    """Check the output of every module within the context; NotFiniteError names the first that gives NaN, by its path.

    Every check waits for the device, so this is for debugging only.
    """
    positions: Int[Tensor, "rows n"] | None = None  # of a pass over tokens, None for the prompt
    owners: dict[str, Any] = {"drafter": drafter, "transformer": target}
    modules = [
        (owner, part) for owner, module in owners.items() if module is not None for part in module.named_modules()
    ]
    names = {part: f"{owner}.{name}" for owner, (name, part) in modules if name}

    def begin(module: nn.Module, inputs: tuple[Tensor]) -> None:
        """Reading the prompt begins with its embedding, a pass over tokens with the look-up of rotary factors."""
        nonlocal positions
        if names.get(module) in (PROMPT, ROTARY):
            positions = inputs[0] if names[module] == ROTARY else None

    def place(output: Tensor) -> str:
        """Return where the first NaN is, if the output has one row per input position."""
        if positions is not None and (output.ndim < 3 or output.shape[:2] != positions.shape):
            return ""
        first = -1 if positions is None else int(positions[~output.isfinite().flatten(2).all(-1)].min())
        token = first - target.config.cls_token_num
        return f" at token {token}" if token >= 0 else " at the prompt"

    def check(module: nn.Module, inputs: Any, output: Any) -> None:
        name = names.get(module, "")
        if name and isinstance(output, Tensor) and not bool(output.isfinite().all()):  # sync
            what = "NaN" if bool(output.isnan().any()) else "infinity"
            has_place = name.startswith("transformer.") and name != TOKENS
            raise NotFiniteError(f"{name} gave {what}{place(output) if has_place else ''}")

    eager = torch.compiler.set_stance("force_eager")  # on a GPU layers are compiled one by one
    with register_module_forward_pre_hook(begin), register_module_forward_hook(check), eager:
        yield
