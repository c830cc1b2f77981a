"""NaN and infinity in what the target says: named by layer in debug mode, and never drawn from unnoticed."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.types import Callback, Step, Target


class NotFiniteError(FloatingPointError):
    """A law was NaN or infinite. `sound` are the pictures of the same batch whose laws were not."""

    def __init__(self, message: str, sound: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.sound = list(sound)


class LastPass:
    """A callback that keeps what the target said last, and calls another.

    One look at it tells of a whole generation: keys and values keep a NaN of any earlier pass, and every later feature
    attends to them. What it cannot see is an overflow behind the last layer's keys that does not come again.
    """

    def __init__(self, callback: Callback | None = None) -> None:
        self._callback, self._features = callback, None

    def __call__(self, step: Step) -> None:
        """Takes notice of one pass."""
        if step.scores is not None:
            self._features = step.scores.features
        if self._callback is not None:
            self._callback(step)

    @torch.no_grad()
    def is_finite(self, target: Target, images: int) -> Bool[Tensor, " b"] | None:
        """Whether each image's last logits are finite; None if no pass told its features."""
        if self._features is None:
            return None
        # of node 0, the last committed code: others may never be used
        logits = target.head(self._features[:, :1])
        return logits.isfinite().flatten(1).all(1).view(images, -1).all(1)


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
    for name in ("features", "read_prompt"):
        setattr(target, name, watch.noting_positions(getattr(target, name), is_prompt=name == "read_prompt"))
    try:
        with torch.compiler.set_stance("force_eager"):  # a target that was compiled before has no layers to look at
            yield
    finally:
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
