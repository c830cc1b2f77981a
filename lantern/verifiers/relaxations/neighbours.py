"""LANTERN and LANTERN++, and the proximity of tokens: the proximity table, its distances, and claims of mass.

LANTERN, arXiv:2410.03355: tokens that are close in the codebook decode to similar patches, so a draft may claim the
probability of its neighbours.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from lantern.core.config import MAX_NEIGHBOURS, check_number
from lantern.verifiers.relaxations.rule import Acceptance, Ruling, UnderTest

SPARE = 32  # distances that are sorted beyond the k nearest
BLOCK = 256  # rows of distances at a time: no V x V matrix
RESIDUALS = ("paper", "released", "cool")


def proximity_table(codebook: Float[Tensor, "v d"], k: int) -> Int32[Tensor, "v k"]:
    """Return the k nearest other tokens of each token by L2 distance, nearest first, the lowest index among equals.

    The codebook must be in the form that the decoder uses: LlamaGen normalises tokens at run time. ValueError unless k
    is from 1 to min(V - 1, 1024).
    """
    tokens = len(codebook)
    if not 1 <= k <= min(tokens - 1, MAX_NEIGHBOURS):
        raise ValueError(f"k is {k}, wanted from 1 to {min(tokens - 1, MAX_NEIGHBOURS)} for {tokens} tokens")
    table = torch.empty(tokens, k, dtype=torch.int32, device=codebook.device)
    wide = codebook.double()
    for first in range(0, tokens, BLOCK):
        rows = torch.arange(first, min(first + BLOCK, tokens), device=codebook.device)
        # Without the matrix product equal tokens have equal distances, bit for bit.
        distances = torch.cdist(wide[rows], wide, compute_mode="donot_use_mm_for_euclid_dist")
        distances[rows - first, rows] = torch.inf
        table[rows] = nearest(distances, k).int()
    return table


def nearest(distances: Float[Tensor, "n v"], k: int) -> Int[Tensor, "n k"]:
    """Return the indices of the k smallest distances of each row, the lowest index among equals.

    A stable sort gives the same, but large codebooks take minutes. Here only a few more than k are sorted, and whole
    rows where more than these are as near as the k-th.
    """
    most = min(k + SPARE, distances.shape[1])
    values, found = distances.topk(most, dim=1, largest=False)
    by_index = found.sort(dim=1).indices  # topk does not order equal distances by index
    order = values.gather(1, by_index).sort(dim=1, stable=True).indices[:, :k]
    chosen = found.gather(1, by_index.gather(1, order))
    is_tied = (distances <= values[:, k - 1 : k]).sum(1) > most
    if bool(is_tied.any()):
        chosen[is_tied] = distances[is_tied].sort(dim=1, stable=True).indices[:, :k]
    return chosen


def proximity_distances(codebook: Float[Tensor, "v d"], table: Int32[Tensor, "v k"]) -> Float[Tensor, "v k"]:
    """Return the fp32 L2 distances from each token to its neighbours; ValueError for a table of another codebook."""
    if len(codebook) != len(table):
        raise ValueError(
            f"the codebook has {len(codebook)} tokens, the proximity table {len(table)}: use both from one model"
        )
    wide = codebook.double()
    blocks = []
    for first in range(0, len(table), BLOCK):
        near = wide[table[first : first + BLOCK].long()]
        blocks.append((near - wide[first : first + BLOCK, None]).norm(dim=-1).float())
    return torch.cat(blocks)


def mean_distance(
    codebook: Float[Tensor, "v d"] | None, tokens: Int[Tensor, " b"], distribution: Float[Tensor, "b v"]
) -> Float[Tensor, " b"] | None:
    """Return the mean L2 distance from tokens to those of a distribution, 0 if it is empty; None without a codebook."""
    if codebook is None:
        return None
    vectors = codebook.to(distribution.dtype)
    distances = torch.cdist(vectors[tokens], vectors, compute_mode="donot_use_mm_for_euclid_dist")
    return (distances * distribution).sum(-1) / distribution.sum(-1).clamp(min=torch.finfo(distribution.dtype).tiny)


def longest_prefix(
    masses: Float[Tensor, "*n k"], budget: Float[Tensor, "*n"]
) -> tuple[Bool[Tensor, "*n k"], Float[Tensor, "*n"]]:
    """Return the longest run of nearest neighbours whose sum stays within the budget, and that sum."""
    sums = masses.double().cumsum(-1)
    is_taken = sums <= budget.double()[..., None]
    # Padding makes the sum of an empty run 0, also for k = 0.
    padded = torch.nn.functional.pad(torch.where(is_taken, sums, 0.0), (1, 0))
    return is_taken, padded.amax(-1).to(masses.dtype)


@dataclass(frozen=True)
class Claim:
    """Mass that tokens claim from the nearest neighbours `is_taken`, at a mean distance of `reach`."""

    is_taken: Bool[Tensor, "*n k"]
    mass: Float[Tensor, "*n"]
    reach: Float[Tensor, "*n"] | None = None


@dataclass(frozen=True, eq=False)
class Neighbourhood(ABC):
    """Claims from the k nearest tokens: a token may claim the longest run of them whose mass is within its budget.

    `distances` come from `proximity_distances`; without them no latent distance is reported.
    """

    table: Int32[Tensor, "v columns"]
    k: int = 10
    distances: Float[Tensor, "v columns"] | None = None

    @abstractmethod
    def budget(self, own: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Return the largest mass that tokens of these probabilities may claim."""

    def neighbours(self, tokens: Int[Tensor, "*n"]) -> Int[Tensor, "*n k"]:
        """Return the k nearest tokens of each token."""
        return self.table[tokens, : self.k].long()

    def claim(
        self,
        tokens: Int[Tensor, "*n"],
        own: Float[Tensor, "*n"],
        near: Float[Tensor, "*n k"],
        spent: Float[Tensor, "*n"] | float = 0.0,
    ) -> Claim:
        """Return the mass of the neighbours within the budget, of which `spent` is gone, and its mean distance."""
        is_taken, mass = longest_prefix(near, (self.budget(own) - spent).clamp(min=0.0))
        if self.distances is None:
            return Claim(is_taken, mass)
        travelled = (near * is_taken * self.distances[tokens, : self.k]).sum(-1)
        return Claim(is_taken, mass, travelled / mass.clamp(min=torch.finfo(mass.dtype).tiny))

    def check_neighbours(self, spare: int = 0) -> None:
        """Raise ValueError if k is more than the columns of the table without `spare` ones."""
        columns = self.table.shape[1] - spare
        if not isinstance(self.k, int) or isinstance(self.k, bool) or not 0 <= self.k <= columns:
            raise ValueError(
                f"k is {self.k}, wanted from 0 to {columns}: the proximity table has {self.table.shape[1]} columns"
            )


@dataclass(frozen=True, eq=False)
class ClaimingRule(Neighbourhood, Acceptance):
    """Acceptance by p(x) plus the claimed mass: LANTERN and LANTERN++ differ in the budget alone.

    A token may claim up to `constant` + `factor` p(x).

    `residual` selects the distribution after a rejection: "paper", "released" for the authors' code, or "cool",
    which has the least total variation given the acceptance rule (COOL-SD, arXiv:2601.09212, theorem 2): since a claim
    only raises p(x), it is max(p - q, 0), as in exact rejection. As published, each test has a budget of its own. With
    `shared`, the siblings of a node share one: the total variation of the tests before is subtracted.
    """

    residual: str = "paper"
    shared: bool = False

    @property
    def constant(self) -> float:
        """The part of the budget that every token has."""
        return 0.0

    @property
    def factor(self) -> float:
        """The part of the budget that a token has in proportion to its probability."""
        return 0.0

    def budget(self, own: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Return the budget of tokens of these probabilities."""
        return self.factor * own + self.constant

    def judge(self, trial: UnderTest) -> Ruling:
        """Test x with its raised probability."""
        near = self.neighbours(trial.tokens)
        spent = trial.spent if self.shared and trial.spent is not None else 0.0
        claim = self.claim(trial.tokens, trial.own_p, trial.p.gather(1, near), spent)
        if self.residual == "paper":
            left = residual_as_published(trial, near, claim)
        elif self.residual == "cool":
            left = (trial.p - trial.q).clamp_(min=0.0)
        else:
            left = residual_as_released(trial, self.table[trial.tokens, : self.k + 1].long(), claim)
        return Ruling(trial.own_p + claim.mass, left, claim.reach)

    def check_residual(self) -> None:
        """Raise ValueError for an unknown residual and for more neighbours than the table holds."""
        self.check_neighbours(spare=int(self.residual == "released"))
        if self.residual not in RESIDUALS:
            raise ValueError(f'residual is "{self.residual}", wanted one of {", ".join(RESIDUALS)}')


def residual_as_published(trial: UnderTest, near: Int[Tensor, "b k"], claim: Claim) -> Float[Tensor, "b v"]:
    """Return max(p~ - q, 0), where p~ is p with the neighbourhood's mass moved onto the token."""
    kept = trial.p.gather(1, near).masked_fill_(claim.is_taken, 0.0)
    relaxed = trial.p.scatter(1, near, kept)
    relaxed.scatter_add_(1, trial.tokens[:, None], claim.mass[:, None])
    return relaxed.sub_(trial.q).clamp_(min=0.0)


def residual_as_released(trial: UnderTest, around: Int[Tensor, "b k1"], claim: Claim) -> Float[Tensor, "b v"]:
    """Return the residual of the released code for LlamaGen, which differs if a neighbour was within the budget.

    All k + 1 nearest tokens are affected, not only those within the budget: sampled drafts set q to zero there (and so
    keep all of p), point drafts set p to zero there. An empty residual becomes uniform.
    """
    affected = claim.is_taken.any(1, keepdim=True) & torch.ones_like(around, dtype=torch.bool)
    if trial.is_point:
        emptied = trial.p.scatter(1, around, trial.p.gather(1, around).masked_fill(affected, 0.0))
        left = emptied.scatter(1, trial.tokens[:, None], 0.0)
    else:
        zeroed = trial.q.scatter(1, around, trial.q.gather(1, around).masked_fill(affected, 0.0))
        left = (trial.p - zeroed).clamp(min=0.0)
    return torch.where(left.sum(1, keepdim=True) > 0, left, torch.ones_like(left))


def distance_moved(
    codebook: Float[Tensor, "v d"] | None, takers: Float[Tensor, "n v"], givers: Float[Tensor, "n v"]
) -> Float[Tensor, " n"] | None:
    """Return the mass that `takers` gain times the root mean square distance of tokens sampled by both weights.

    None without a codebook. A row's bits do not depend on the other rows: each has a product of its own.
    """
    if codebook is None:
        return None
    vectors = codebook.to(takers.dtype)
    columns = torch.cat([vectors, vectors.square().sum(-1, keepdim=True)], 1).expand(len(takers), -1, -1)
    tiny = torch.finfo(takers.dtype).tiny
    both = [weights / weights.sum(-1, keepdim=True).clamp(min=tiny) for weights in (takers, givers)]
    means = [torch.bmm(probs[:, None], columns)[:, 0] for probs in both]
    spread = [mean[:, -1] - mean[:, :-1].square().sum(-1) for mean in means]
    middle = (means[0] - means[1])[:, :-1]
    return takers.sum(-1) * (middle.square().sum(-1) + spread[0] + spread[1]).clamp(min=0.0).sqrt()


@dataclass(frozen=True, eq=False)
class Lantern(ClaimingRule):
    """Accept x with p(x) + the sum of p over the longest run of its k nearest tokens that is <= delta.

    Jang et al., "LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding",
    arXiv:2410.03355. k = 0 or delta = 0 is exact decoding with residual "paper". delta bounds the mass that one
    test moves, not the total variation of the resulting token.
    ValueError for a value out of range.
    """

    k: int = 100
    delta: float | int = 0.1

    @property
    def bound(self) -> float:
        """delta."""
        return self.delta

    def __post_init__(self) -> None:
        self.check_residual()
        check_number("delta", self.delta, 0, 1)

    @property
    def constant(self) -> float:
        """delta."""
        return float(self.delta)


@dataclass(frozen=True, eq=False)
class LanternPP(ClaimingRule):
    """Accept x with p(x) + the sum of p over the longest run of its k nearest tokens that is <= (lambda_ - 1) p(x).

    Park et al., "LANTERN++: Enhancing Relaxed Speculative Decoding with Static Tree Drafting for Visual
    Auto-regressive Models", arXiv:2502.06352: a relaxed probability is at most lambda_ p(x), so that an
    improbable token gains little. lambda_ = 1 is exact decoding with residual "paper".
    ValueError for a value out of range.
    """

    lambda_: float | int = 2.0

    def __post_init__(self) -> None:
        self.check_residual()
        check_number("lambda_", self.lambda_, 1, 1e6)

    @property
    def factor(self) -> float:
        """lambda_ - 1."""
        return float(self.lambda_ - 1)
