"""NaN and infinity in what the target says: refused, and in debug mode named by layer.

That they are noticed at all is `decoding.finite`'s doing.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class NotFiniteError(FloatingPointError):
    """A law was NaN or infinite. `sound` are the pictures of the same batch whose laws were not."""

    def __init__(self, message: str, sound: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.sound = list(sound)


@contextmanager
def watched_layers(target: Any, drafter: nn.Module | None = None) -> Iterator[None]:
    """Looks at what every layer gives, as long as the context lasts: NotFiniteError names the first that gives NaN.

    It waits for the device at every layer, so it is for debugging alone.
    """
    watch = LayerWatch(target.config.cls_token_num)
    handles = watch.attach(target, "", tells_place=True)
    if drafter is not None:
        handles += watch.attach(drafter, "the drafter's ", tells_place=False)
    own = dict(vars(target))
    vars(target).pop("forward", None)  # of a target that was fused or compiled before, which has no layers to look at
    for name in ("features", "read_prompt"):
        setattr(target, name, watch.noting_positions(getattr(target, name), is_prompt=name == "read_prompt"))
    try:
        with torch.compiler.set_stance("force_eager"):  # layers compiled one by one, on a GPU
            yield
    finally:
        if "forward" in own:
            target.forward = own["forward"]
        for name in ("features", "read_prompt"):
            if name in own:
                setattr(target, name, own[name])
            else:
                delattr(target, name)
        for handle in handles:
            handle.remove()


class LayerWatch:
    """Forward hooks that refuse NaN and infinity; `prefix` is the number of the target's conditioning slots."""

    def __init__(self, prefix: int) -> None:
        self._prefix = prefix
        self._positions: Int[Tensor, "rows n"] | None = None

    def attach(self, module: nn.Module, owner: str, *, tells_place: bool) -> list[Any]:
        """Hooks onto embeddings, the parts of every layer, the layers, the last norm and the head."""
        return [
            part.register_forward_hook(self._hook(owner + layer_name(name), tells_place and name not in EMBEDDINGS))
            for name, part in module.named_modules()
            if layer_name(name)
        ]

    def noting_positions(self, method: Callable[..., Any], *, is_prompt: bool) -> Callable[..., Any]:
        """A method of the target, leaving word of the rotary rows of its inputs; of the prompt's there are none."""

        def noted(inputs: Tensor, second: Tensor, *others: Any, **named: Any) -> Any:
            self._positions = None if is_prompt else second
            return method(inputs, second, *others, **named)

        return noted

    def _hook(self, name: str, tells_place: bool) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):  # sync
                what = "NaN" if bool(output.isnan().any()) else "infinity"
                raise NotFiniteError(f"{name} gave {what}{self._place(output) if tells_place else ''}")

        return look

    def _place(self, output: Float[Tensor, "rows n c"]) -> str:
        """The first code with a NaN, where inputs and outputs go together."""
        if self._positions is None:
            return " at the prompt"
        if output.ndim != 3 or output.shape[:2] != self._positions.shape:
            return ""
        code = int(self._positions[~torch.isfinite(output).all(-1)].min()) - self._prefix
        return f" at code {code}" if code >= 0 else " at the prompt"


EMBEDDINGS = {
    "cls_embedding": "the prompt's embedding",
    "tok_embeddings": "the codes' embedding",
    "embed_tokens": "embedding",
}
ENDS = {"fc": "first projection", "norm": "the last norm", "output": "the head"}
# The prompt is read past `attention` itself, so that its projections speak for it. Attention spreads a NaN to codes
# that should not see it; before that, in the first projection, it stands where it arose.
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
    """What a module of a transformer or drafter is called in words; "" for those inside of what has a name."""
    if (found := re.fullmatch(r"layers\.(\d+)\.?([\w.]*)", module)) and found[2] in PARTS:
        return f"layer {found[1]}{PARTS[found[2]]}"
    return (EMBEDDINGS | ENDS).get(module, "")
