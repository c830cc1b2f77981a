"""Relaxations of the target's distribution, and relaxed acceptance rules for single codes."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Relaxed:
    """A distribution r that replaces p, with TV(r, p), and moved mass times L2 distance (None without code vectors)."""

    log_r: Float[Tensor, "n v"]
    total_variation: Float[Tensor, " n"]
    latent_distance: Float[Tensor, " n"] | None = None


class RelaxationDefaults:
    """Defaults of the optional attributes of `Relaxation`, `Acceptance` and `Claimant`."""

    judges_codes: ClassVar[bool] = False
    has_greedy_form: ClassVar[bool] = False
    is_row_wise: bool = True

    @property
    def bound(self) -> float | None:
        """None: the rule sets no bound."""
        return None


@runtime_checkable
class Relaxation(Protocol):
    """A distribution closer to the draft, which replaces the target's before any child is tested; verified exactly."""

    judges_codes: ClassVar[bool]
    """Whether it tests single codes (`Acceptance`) instead. Optional."""

    has_greedy_form: ClassVar[bool]
    """Whether it has a form for temperature 0 (`Claimant`). Optional."""

    @property
    def is_row_wise(self) -> bool:
        """Whether the bits of a row do not depend on the rows that are relaxed with it. Optional."""
        ...

    def relax(
        self, log_p: Float[Tensor, "n v"], log_q: Float[Tensor, "n v"], *, depths: Int[Tensor, " n"], levels: int
    ) -> Relaxed:
        """Return r for nodes at these depths of a tree `levels` deep."""
        ...


@dataclass(frozen=True)
class Trial:
    """Codes under test, one per image: `p` is what rejections of earlier siblings left of the target's distribution.

    `q` is the distribution that the code was sampled from given its earlier siblings, one-hot for point drafts
    (`is_point`). `spent` is the total variation of the tests of those siblings; None for the first.
    """

    p: Float[Tensor, "b v"]
    q: Float[Tensor, "b v"]
    codes: Int[Tensor, " b"]
    is_point: bool
    spent: Float[Tensor, " b"] | None = None

    @cached_property
    def own_p(self) -> Float[Tensor, " b"]:
        """Return p of the codes."""
        return self.p.gather(1, self.codes[:, None])[:, 0]

    @cached_property
    def own_q(self) -> Float[Tensor, " b"]:
        """Return q of the codes."""
        return self.q.gather(1, self.codes[:, None])[:, 0]


@dataclass(frozen=True)
class Ruling:
    """The result of a trial: the code x is accepted with probability min(1, mass / q(x)).

    `left` is the distribution, not normalised, that replaces p after a rejection. `reach` is the mean L2 distance from
    x to the codes whose mass it claims, None without code vectors.
    """

    mass: Float[Tensor, " b"]
    left: Float[Tensor, "b v"]
    reach: Float[Tensor, " b"] | None = None


@runtime_checkable
class Acceptance(Protocol):
    """A relaxed acceptance rule, which the rejection verifier applies to each sibling that it tests."""

    judges_codes: ClassVar[bool]
    """True: it tests single codes."""

    @property
    def bound(self) -> float | None:
        """The probability that one test may claim; None for rules without such a bound. Optional."""
        ...

    @property
    def modes(self) -> frozenset[str]:
        """The draft modes that it can test."""
        ...

    def judge(self, trial: Trial) -> Ruling:
        """Return the probability of acceptance, and what a rejection leaves."""
        ...


@dataclass(frozen=True)
class Claim:
    """Mass that codes claim from the nearest neighbours `is_taken`, at a mean distance of `reach`."""

    is_taken: Bool[Tensor, "*n k"]
    mass: Float[Tensor, "*n"]
    reach: Float[Tensor, "*n"] | None = None


@runtime_checkable
class Claimant(Protocol):
    """A relaxation with a greedy form: at temperature 0 a code may be accepted with its neighbours' mass."""

    has_greedy_form: ClassVar[bool]
    """True: it has a form for temperature 0."""

    def neighbours(self, codes: Int[Tensor, "*n"]) -> Int[Tensor, "*n k"]:
        """Return the codes from which mass may be claimed, nearest first."""
        ...

    def claim(self, codes: Int[Tensor, "*n"], own: Float[Tensor, "*n"], near: Float[Tensor, "*n k"]) -> Claim:
        """Return what codes of probability `own` may claim from neighbours of probabilities `near`."""
        ...
