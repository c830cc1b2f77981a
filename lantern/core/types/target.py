"""The target of decoding: its raster of codes, the condition that it reads, and the scores that it returns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from lantern.core.sampling import Sampling


# (logits (b r n v), code numbers (b n), width=, purpose=) -> the best codes (b n width)
Sampler = Callable[..., Tensor]


@dataclass(frozen=True)
class Raster:
    """A grid of codes in reading order, as decoding sees it, and what surrounds it in the target's token sequence.

    `newline` is the token that follows each row of codes but the last, or None. The decoding loop counts codes only;
    the target passes newlines itself, and the cache has slots for them. What follows the grid is not generated.
    """

    rows: int
    columns: int
    newline: int | None = None

    @property
    def codes(self) -> int:
        """Number of codes of an image."""
        return self.rows * self.columns

    @property
    def newlines(self) -> int:
        """Number of newlines that the target reads."""
        return 0 if self.newline is None else self.rows - 1


@dataclass(frozen=True)
class Condition:
    """Condition of a batch of images: caption features, class labels, or the tokens of each guidance row.

    Features come left-padded with their mask (b t). Tokens come left-padded with their mask (b 2 t), the conditional
    row first; the rows of an image may differ in length. `negative` holds caption features that take the place of the
    unconditional caption in the other guidance row. ValueError unless exactly one kind is given, for a batch of no
    images, for a mask whose shape is not that of the features or tokens, and for a negative of another kind or batch.
    """

    embeddings: Float[Tensor, "b t e"] | None = None
    mask: Bool[Tensor, "b t"] | Bool[Tensor, "b r t"] | None = None
    labels: Int[Tensor, " b"] | None = None
    tokens: Int[Tensor, "b r t"] | None = None
    negative: "Condition | None" = None

    def __post_init__(self) -> None:
        if sum(part is not None for part in (self.embeddings, self.labels, self.tokens)) != 1:
            raise ValueError("a condition is caption embeddings with their mask, or class labels: give one of them")
        for name, given, size in (("caption", self.embeddings, 2), ("token", self.tokens, 3)):
            if given is not None and (self.mask is None or self.mask.shape != given.shape[:size]):
                got = None if self.mask is None else list(self.mask.shape)
                raise ValueError(f"the {name} mask is {got}, wanted {list(given.shape[:size])} like the {name}s")
        if self.batch < 1:
            raise ValueError("the condition is of 0 images, wanted at least 1")
        if self.negative is not None and (
            self.embeddings is None or self.negative.embeddings is None or self.negative.batch != self.batch
        ):
            raise ValueError("a negative condition is caption embeddings, one for each image of caption embeddings")

    @property
    def batch(self) -> int:
        """Number of images."""
        return len(self._parts()[0])

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self._parts()[0].device

    def to(self, device: torch.device | str) -> "Condition":
        """Return the condition on another device."""
        return self._map(lambda part: part.to(device))

    def select(self, images: Sequence[int]) -> "Condition":
        """Return the condition of some of the images, in this order."""
        return self._map(lambda part: part[list(images)])

    @classmethod
    def joined(cls, parts: "Sequence[Condition]") -> "Condition":
        """Return the condition of several batches of caption features with as many slots; all or none have a negative.

        ValueError for other kinds of conditions.
        """
        if any(part.embeddings is None or (part.negative is None) != (parts[0].negative is None) for part in parts):
            raise ValueError("only caption embeddings are joined, with negative ones for all or none")
        return cls(
            embeddings=torch.cat([part.embeddings for part in parts if part.embeddings is not None]),
            mask=torch.cat([part.mask for part in parts if part.mask is not None]),
            negative=cls.joined([part.negative for part in parts if part.negative is not None])
            if parts[0].negative is not None
            else None,
        )

    def _parts(self) -> list[Tensor]:
        return [part for part in (self.embeddings, self.labels, self.tokens, self.mask) if part is not None]

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Condition":
        fields = ("embeddings", "mask", "labels", "tokens")
        given = {name: getattr(self, name) for name in fields}
        changed = {name: change(part) for name, part in given.items() if part is not None}
        return Condition(**changed, negative=None if self.negative is None else self.negative._map(change))


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
    reads_masked: bool = True
    follows_masks: bool = True
    warm_passes: int = 0
    prompt_rows: int = 0
    make_uniforms: Callable[..., Tensor] | None = None
    is_llamagen: bool = True
    processes: int = 1
    has_token_prompts: bool = False

    def read_prompt(
        self,
        inputs: Float[Tensor, "rows t c"],
        mask: Bool[Tensor, "rows t"],
        *,
        entered: dict[int, Tensor] | None = None,
    ) -> tuple[Float[Tensor, "rows t c"], Float[Tensor, "l rows h d"]]:
        """Raise TypeError: targets with `has_token_prompts` read no embedded prompts."""
        raise TypeError(f"{type(self).__name__} reads tokens, not embedded captions or classes")

    def read_tokens(
        self,
        tokens: Int[Tensor, "rows t"],
        mask: Bool[Tensor, "rows t"],
        *,
        entered: dict[int, Tensor] | None = None,
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
    def reads_masked(self) -> bool:
        """Whether passes read keys and values that a mask hides, which must then be finite. Optional."""
        ...

    @property
    def follows_masks(self) -> bool:
        """Whether passes take any mask; if False, all nodes see the codes committed before node 0. Optional."""
        ...

    @property
    def warm_passes(self) -> int:
        """Passes over each number of codes that are not as fast as later ones. Optional."""
        ...

    @property
    def prompt_rows(self) -> int:
        """Rows of every pass over prompts, which are padded to full length; 0: as many as there are. Optional."""
        ...

    @property
    def make_uniforms(self) -> Callable[..., Tensor] | None:
        """A faster `noise.random_uniforms` with the same numbers, or None. Optional."""
        ...

    @property
    def is_llamagen(self) -> bool:
        """Whether its layers are LlamaGen's, which engines may run by themselves. Optional."""
        ...

    @property
    def processes(self) -> int:
        """Number of processes that share its layers, and round sums in another order than one. Optional."""
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
        self,
        tokens: Int[Tensor, "rows t"],
        mask: Bool[Tensor, "rows t"],
        *,
        entered: dict[int, Tensor] | None = None,
    ) -> tuple[Float[Tensor, "rows 1 c"], Float[Tensor, "l 2 rows h t d"]]:
        """Return the features of the last token of left-padded prompts, and all keys and values. Optional.

        `entered` is filled with the inputs of the layers that are its keys, at the last token.
        """
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
