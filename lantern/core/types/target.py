"""The target model and the scores of its passes."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from lantern.core.sampling import Sampling

# (logits (b r n v), code numbers (b n), width=, purpose=) -> the best codes (b n width)
Sampler = Callable[..., Tensor]


@runtime_checkable
class Scores(Protocol):
    """What the target gives for n inputs: fp32 logits `(rows n v)`, and features `(rows n c)` after its final norm.

    `fused` holds the inputs of the layers that a drafter's `taps` names, side by side; None for drafters without taps.
    """

    @property
    def logits(self) -> Float[Tensor, "rows n v"]:
        """Row i holds the logits of the code that follows input i, before guidance and filters."""
        ...

    @property
    def features(self) -> Float[Tensor, "rows n c"]:
        """The inputs of the head."""
        ...

    @property
    def fused(self) -> Float[Tensor, "rows n k"] | None:
        """The inputs of the tapped layers, side by side."""
        ...


class TargetDefaults:
    """Defaults of the optional attributes of `Target`: no faster way of anything."""

    is_batch_invariant: bool = False
    make_uniforms: Callable[..., Tensor] | None = None
    engines: frozenset[str] | None = None
    has_token_prompts: bool = False

    def read_tokens(
        self, tokens: Int[Tensor, "rows t"], mask: Bool[Tensor, "rows t"]
    ) -> tuple[Float[Tensor, "rows 1 c"], Float[Tensor, "l 2 rows h t d"]]:
        """Raise TypeError: only targets with `has_token_prompts` have it."""
        raise TypeError(f"{type(self).__name__} reads captions or classes, not tokens")

    def draft_head(self, features: Float[Tensor, "rows n c"]) -> Float[Tensor, "rows n v"]:
        """Apply the head."""
        head: Callable[[Tensor], Tensor] = self.head  # type: ignore[attr-defined]
        return head(features)

    def sampler(self, sampling: "Sampling", noise: Any) -> Sampler | None:
        """Return None: codes are sampled by `Sampling.scores`."""
        return None

    def refresh(self) -> None:
        """Do nothing: nothing was made from the weights."""


@runtime_checkable
class Target(Protocol):
    """The model whose distribution is sampled. It has no notion of trees, temperature or prompts.

    A call scores embedded inputs `(rows n c)` at `positions` (rows of its rotary table: cls_token_num conditioning
    slots, then the codes in raster order) under a mask over cache slots. `Transformer` is a target, and so is what
    `Engine.prepare` makes of one. The defaults of what is optional are in `TargetDefaults`.
    """

    config: Any
    tok_embeddings: Any
    cls_embedding: Any
    output: Any

    @property
    def training(self) -> bool:
        """Whether dropout is on."""
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the bits of a row's logits do not depend on the other rows and nodes of the pass. Optional."""
        ...

    @property
    def make_uniforms(self) -> Callable[..., Tensor] | None:
        """A faster `noise.random_uniforms` with the same numbers, or None. Optional."""
        ...

    @property
    def engines(self) -> frozenset[str] | None:
        """Names of the engines that can run its passes; None if none is excluded. Optional."""
        ...

    @property
    def has_token_prompts(self) -> bool:
        """Whether prompts are token sequences with keys and values of their own (`read_tokens`). Optional.

        The attention of such a target needs a cache of its own dtype, and positions count codes from 0: it adds the
        length of each row's prompt, which the cache keeps, and the newlines before the code.
        """
        ...

    def __call__(
        self,
        inputs: Float[Tensor, "rows n c"],
        positions: Int[Tensor, "rows n"],
        mask: Float[Tensor, "rows n s"] | Bool[Tensor, "rows n s"] | None = None,
        *,
        cache: Any = None,
        slots: Int[Tensor, "rows n"] | None = None,
        taps: tuple[int, ...] = (),
    ) -> Scores:
        """Score n inputs; `taps` are layers whose inputs are returned too."""
        ...

    def features(
        self,
        inputs: Float[Tensor, "rows n c"],
        positions: Int[Tensor, "rows n"],
        mask: Float[Tensor, "rows n s"] | Bool[Tensor, "rows n s"] | None = None,
        *,
        cache: Any = None,
        slots: Int[Tensor, "rows n"] | None = None,
    ) -> Float[Tensor, "rows n c"]:
        """Return the features of n inputs, without the head."""
        ...

    def read_prompt(
        self,
        inputs: Float[Tensor, "rows t c"],
        mask: Bool[Tensor, "rows t"],
        *,
        entered: dict[int, Tensor] | None = None,
    ) -> tuple[Float[Tensor, "rows t c"], Float[Tensor, "l rows h d"]]:
        """Return the features of conditioning slots, and each layer's mean value over those that are not padding.

        `entered` is filled with the inputs of the layers that are its keys.
        """
        ...

    def read_tokens(
        self, tokens: Int[Tensor, "rows t"], mask: Bool[Tensor, "rows t"]
    ) -> tuple[Float[Tensor, "rows 1 c"], Float[Tensor, "l 2 rows h t d"]]:
        """Return the features of the last token of left-padded prompts, and all keys and values. Optional."""
        ...

    def parameters(self) -> Iterator[Tensor]:
        """Return the weights."""
        ...

    def head(self, features: Float[Tensor, "rows n c"]) -> Float[Tensor, "rows n v"]:
        """Map features to fp32 logits."""
        ...

    def draft_head(self, features: Float[Tensor, "rows n c"]) -> Float[Tensor, "rows n v"]:
        """Map features to fp32 logits for drafters, whose logits need not have the bits of `head`. Optional."""
        ...

    def sampler(self, sampling: "Sampling", noise: Any) -> Sampler | None:
        """Return a function that samples the best codes by log p + g directly from logits, or None. Optional.

        It takes logits `(b r n v)`, code numbers `(b n)`, `width` and the noise's `purpose`, and returns `(b n width)`,
        best first. With one row of logits the logits count as guided. The best code is bit for bit
        `(sampling.scores(logits, places) + noise.gumbel(places)).argmax(-1)`.
        """
        ...

    def refresh(self) -> None:
        """Rebuild what was made from the weights if they have changed. Optional."""
        ...
