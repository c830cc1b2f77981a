"""What a relaxation is: a distribution that replaces p, or a relaxed test of single tokens."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Relaxed:
    """A distribution r that replaces p, with TV(r, p), and moved mass times L2 distance (None without codebook
    vectors).
    """

    log_r: Float[Tensor, "n v"]
    total_variation: Float[Tensor, " n"]
    latent_distance: Float[Tensor, " n"] | None = None


class Relaxation(ABC):
    """A distribution closer to the draft, which replaces the target's before any child is tested; verified exactly."""

    @abstractmethod
    def relax(
        self, log_p: Float[Tensor, "n v"], log_q: Float[Tensor, "n v"], *, depths: Int[Tensor, " n"], levels: int
    ) -> Relaxed:
        """Return r for nodes at these depths of a tree `levels` deep; its bits do not depend on the other nodes."""


@dataclass(frozen=True)
class UnderTest:
    """Tokens under test, one per image: `p` is what rejections of earlier siblings left of the target's distribution.

    `q` is the distribution that the token was sampled from given its earlier siblings, one-hot for point drafts
    (`is_point`). `spent` is the total variation of the tests of those siblings; None for the first.
    """

    p: Float[Tensor, "b v"]
    q: Float[Tensor, "b v"]
    tokens: Int[Tensor, " b"]
    is_point: bool
    spent: Float[Tensor, " b"] | None = None

    @cached_property
    def own_p(self) -> Float[Tensor, " b"]:
        """p of the tokens."""
        return self.p.gather(1, self.tokens[:, None])[:, 0]

    @cached_property
    def own_q(self) -> Float[Tensor, " b"]:
        """q of the tokens."""
        return self.q.gather(1, self.tokens[:, None])[:, 0]


@dataclass(frozen=True)
class Ruling:
    """The result of a trial: the token x is accepted with probability min(1, mass / q(x)).

    `left` is the distribution, not normalised, that replaces p after a rejection. `reach` is the mean L2 distance from
    x to the tokens whose mass it claims, None without codebook vectors.
    """

    mass: Float[Tensor, " b"]
    left: Float[Tensor, "b v"]
    reach: Float[Tensor, " b"] | None = None


class Acceptance(ABC):
    """A relaxed acceptance rule, which the rejection verifier applies to each sibling that it tests.

    `modes` are the draft modes that it can test. `takes_best`: the token after the accepted ones is the likeliest, not
    a sample of what is left. `bound` is the probability that one test may claim, None without a bound.
    """

    modes: ClassVar[frozenset[str]] = frozenset({"point", "sampled", "iid", "jacobi"})

    takes_best: ClassVar[bool] = False

    @property
    def bound(self) -> float | None:
        """None: the rule sets no bound."""
        return None

    @abstractmethod
    def judge(self, trial: UnderTest) -> Ruling:
        """Return the mass by which x is accepted, and what a rejection leaves."""
