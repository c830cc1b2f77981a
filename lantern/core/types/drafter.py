"""The drafter, and the prompt that it starts from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.types.step import Step
from lantern.core.types.target import Condition
from lantern.core.types.tree import DraftMode, DraftTree
from lantern.core.types.verifier import NoiseSource

WindowFill = Literal["random", "repeat-left"]


@dataclass(frozen=True)
class Prefill:
    """The results of the pass over the prompt: `features` of its t slots, the mask of slots in use, and the first code.

    `fused` holds the inputs of the layers that the drafter taps, side by side; None where it taps none. `condition` is
    the prompt itself, for drafters that are models of their own.
    """

    features: Float[Tensor, "b r t c"]
    mask: Bool[Tensor, "b t"]
    first: Int[Tensor, " b"]
    fused: Float[Tensor, "b r t k"] | None = None
    condition: Condition | None = None


@dataclass(frozen=True)
class Kept:
    """Codes 1 to m of each image, which are given, with the features that predict them; `fused` is as in `Prefill`."""

    codes: Int[Tensor, "b m"]
    features: Float[Tensor, "b r m c"]
    fused: Float[Tensor, "b r m k"] | None = None

    def blocks(self, size: int) -> "Iterator[Kept]":
        """Return consecutive parts of at most `size` codes, the last of them a single code."""
        count = self.codes.shape[1]
        ends = [*range(size, count - 1, size), *([count - 1] if count > 1 else []), count]
        for first, end in zip([0, *ends[:-1]], ends, strict=True):
            fused = None if self.fused is None else self.fused[:, :, first:end]
            yield Kept(self.codes[:, first:end], self.features[:, :, first:end], fused)


class DrafterDefaults:
    """Defaults of the optional attributes of `Drafter`, and of one that a recorder sets.

    With `records_traits`, drafters that have traits add them to their trees.
    """

    taps: tuple[int, ...] = ()
    members: tuple[object, ...] = ()
    needs_host: bool = False
    records_log_q: bool = True
    reads_leftovers: bool = False
    sample_window: WindowFill | None = None
    least_codes: float = 0.0
    module: Any = None
    policy: Any = None
    kv_length: int | None = None
    draft_passes: int | None = None
    records_traits: bool = False
    reads_kept: bool = False

    def read_kept(self, kept: Kept) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError(f"{type(self).__name__} reads kept codes as drafts only")


@runtime_checkable
class Drafter(Protocol):
    """Guesses the next codes of each image. One drafter serves one generation at a time.

    The defaults of what is optional are in `DrafterDefaults`.
    """

    @property
    def mode(self) -> DraftMode:
        """How children are chosen."""
        ...

    @property
    def needs_whole_prefix(self) -> bool:
        """Whether it reads all of the target's conditioning slots, padding included."""
        ...

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest tree, the root included: the size of the cache depends on it."""
        ...

    @property
    def depth(self) -> int:
        """Depth of the deepest tree."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it reads beside the features. Optional."""
        ...

    @property
    def members(self) -> tuple[object, ...]:
        """Objects that hold a part of its state, which a step may replace. Optional."""
        ...

    @property
    def needs_host(self) -> bool:
        """Whether the host chooses the size of a tree from the step before. Optional."""
        ...

    @property
    def records_log_q(self) -> bool:
        """Whether its trees carry log q, where its mode allows it. Optional."""
        ...

    @property
    def reads_leftovers(self) -> bool:
        """Whether it reads the leftovers of verdicts, so that every node of its trees must be verified. Optional."""
        ...

    @property
    def sample_window(self) -> WindowFill | None:
        """How new places are filled if each tree is a chain of the target's own previous samples, else None. Optional.

        Such a drafter has no further state but `least_codes`: an engine may run its steps without calling it.
        """
        ...

    @property
    def least_codes(self) -> float:
        """Codes a step below which it stops drafting after its first steps; 0 for never. Optional."""
        ...

    @property
    def module(self) -> Any:
        """Its network, None for a drafter without one. Optional."""
        ...

    @property
    def policy(self) -> Any:
        """The policy that shapes its trees, None for static trees and windows. Optional."""
        ...

    @property
    def kv_length(self) -> int | None:
        """Keys and values that a row of its pass reads. For measurements; optional."""
        ...

    @property
    def draft_passes(self) -> int | None:
        """Passes of its network in a step, None for one per level of its tree. For measurements; optional."""
        ...

    @property
    def reads_kept(self) -> bool:
        """Whether `read_kept` reads given codes at once; otherwise each is a draft that is accepted. Optional."""
        ...

    def begin(self, prefill: Prefill, noise: NoiseSource) -> None:
        """Drop the state of the last generation and read the prompt of the next."""
        ...

    def read_kept(self, kept: Kept) -> None:
        """Read codes that are given from code 1 on, right after `begin`; the next tree is below the last of them."""
        ...

    def propose(self) -> DraftTree:
        """Return a tree below the last committed code of each image."""
        ...

    def observe(self, step: Step) -> None:
        """Read which codes were committed, and the target's features at them."""
        ...
