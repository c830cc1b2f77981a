"""Multi-round rejection: children are tested one after the other, each against what the last rejection left."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from lantern.core.sampling import Noise, Purpose, largest, logs, probabilities
from lantern.core.types import Cost, DraftTree, Rows, TreeShape, Verdict
from lantern.verifiers.relaxations.rule import Acceptance, Ruling, UnderTest


class Numbers:
    """One number per image: a tensor `(b)`, or with one image that the host may look at, a number of Python's.

    A walk is written once for both: operators mean the same, and methods are what differs.
    """

    def __init__(self, images: int, device: torch.device, may_stop: bool) -> None:
        self.is_one, self.may_stop = may_stop and images == 1, may_stop
        self._images = torch.arange(images, device=device)

    def full(self, value: bool | int) -> Any:
        """Return the same number for all images."""
        dtype = torch.bool if isinstance(value, bool) else torch.long
        return value if self.is_one else torch.full_like(self._images, value, dtype=dtype)

    def read(self, values: Shaped[Tensor, "b 1"]) -> Any:
        """Return the values of a tensor."""
        return values.item() if self.is_one else values[:, 0]

    def columns(self, values: Shaped[Tensor, "b w"]) -> Sequence[Any]:
        """Return the values of each column."""
        return values[0].tolist() if self.is_one else values.unbind(1)

    def at(self, table: Shaped[Tensor, "b n *rest"], index: Any) -> Tensor:
        """Return the entry `(b *rest)` of each image."""
        return table[:, index] if self.is_one else table[self._images, index]

    def nodes(self, index: Any) -> Int[Tensor, "b 1"]:
        """Return the numbers as nodes of a tree."""
        return torch.full((1, 1), index) if self.is_one else index[:, None]

    def where(self, is_first: Any, first: Any, second: Any) -> Any:
        """Return the first where `is_first`, else the second: numbers, or rows `(b v)`."""
        if self.is_one:
            return first if is_first else second
        return torch.where(is_first[:, None] if first.ndim == 2 else is_first, first, second)

    def are_none(self, values: Any) -> bool:
        """Return whether no image has True; False where the host may not look."""
        return not values if self.is_one else self.may_stop and not bool(values.any())

    def stacked(self, columns: list[Any]) -> Shaped[Tensor, "b d"]:
        """Return columns side by side."""
        return torch.tensor([columns]) if self.is_one else torch.stack(columns, 1)


@dataclass(frozen=True)
class Outcome:
    """The result of testing a node's children: the child `taken`, 0 for none, and the distribution `left`.

    `is_relaxed` is whether it was accepted only because of the relaxation, `spent` the sum of the tests' total
    variation (None without one) and `distance` of mass times L2 distance (None without codebook vectors).
    """

    taken: Any
    left: Float[Tensor, "b v"]
    is_relaxed: Any
    spent: Float[Tensor, " b"] | None
    distance: Float[Tensor, " b"] | None


@dataclass(frozen=True)
class RejectionVerifier:
    """Accept a child x with probability min(1, p(x) / q(x)); after a rejection p becomes norm(max(p - q, 0)).

    Leviathan et al., arXiv:2211.17192, for one child; in rounds over siblings arXiv:2305.09781; with samples without
    replacement as EAGLE tests them, arXiv:2401.15077, algorithm 1. Siblings are tested in sampling order, each only
    after the one before it was rejected. With q a point mass ("point") a rejection sets p(x) to 0; samples without
    replacement ("sampled") remove x from q; independent samples ("iid") leave q unchanged. If all children are
    rejected, the next token is sampled from what is left, with noise that drafting does not use.

    `relaxation` (LANTERN, LANTERN++, GSD, tolerance) defines its own acceptance probability and its own distribution
    after a rejection. The distribution of its output has a closed form for one draft at most, so the reported total
    variation is a bound: the sum over the tests of a token of what each costs (`cost_of`). Its expectation over drafts
    and tests is at least the total variation between the output distribution and p; single sums vary around it, and
    some are above 1. ValueError for a relaxation of distributions.
    """

    relaxation: Acceptance | None = None

    def __post_init__(self) -> None:
        if self.relaxation is not None and not isinstance(self.relaxation, Acceptance):
            name = type(self.relaxation).__name__
            raise ValueError(f"{name} relaxes distributions: use RelaxedVerifier({name}(...), RejectionVerifier())")

    @property
    def modes(self) -> frozenset[str]:
        """The draft modes that it can verify."""
        every = frozenset({"point", "sampled", "iid"})
        return every if self.relaxation is None else every & self.relaxation.modes

    @property
    def is_exact(self) -> bool:
        """Whether tokens follow the target's own distribution."""
        return self.relaxation is None

    def verify(self, tree: DraftTree, rows: Rows, noise: Noise) -> Verdict:
        """Descend while a child is accepted, then sample from what is left (below a leaf: from p)."""
        widths, images = tree.shape.widths, len(tree.tokens)
        numbers = Numbers(images, tree.tokens.device, rows.may_stop)
        children = children_by_rank(tree.shape, images)
        uniforms = noise.uniform(rows.places, children.shape[-1])
        node, is_alive, tests = numbers.full(0), numbers.full(True), list[Outcome]()
        at = torch.zeros_like(tree.tokens[:, :1])
        left = probabilities(rows.log_p(at)[:, 0])
        for width in widths:
            q = None
            if tree.log_q is not None and tree.mode != "point":
                q = probabilities(numbers.at(tree.log_q, node))
            here, lanes = numbers.at(children, node)[:, :width], numbers.at(uniforms, node)
            test = self.test_children(tree, numbers, here, left, q, lanes, is_alive)
            tests.append(test)
            left, is_alive = test.left, test.taken > 0
            if numbers.are_none(is_alive):
                break
            node = numbers.where(is_alive, test.taken, node)
            at = numbers.nodes(node)
            left = numbers.where(is_alive, probabilities(rows.log_p(at)[:, 0]), left)
        closing = torch.zeros_like(left[:, 0])
        if self.relaxation is not None and self.relaxation.takes_best:
            closing = 1.0 - left.amax(1)
            left = torch.zeros_like(left).scatter_(1, largest(left, rows.may_stop)[:, None], 1.0)
        next_token = self.draw(logs(left)[:, None], rows.places.gather(1, at), noise, rows.may_stop)[:, 0]
        if not tests:
            return Verdict(tree.tokens[:, :0], torch.zeros_like(next_token), next_token)
        missing = len(widths) - len(tests)  # depths past a break have no test
        path = pad(numbers.stacked([test.taken for test in tests]), (0, missing))
        length = (path > 0).sum(1)
        if self.relaxation is None:
            return Verdict(path, length, next_token)
        relaxed = pad(numbers.stacked([test.is_relaxed for test in tests]).to(left.dtype), (0, missing))
        spent = pad(torch.stack([test.spent for test in tests if test.spent is not None], 1), (0, missing + 1))
        spent = spent.scatter_add(1, length[:, None], closing[:, None])
        known = [test.distance for test in tests if test.distance is not None]
        distance = pad(torch.stack(known, 1), (0, missing + 1)) if len(known) == len(tests) else None
        cost = Cost(relaxed, spent, distance, self.relaxation.bound)
        return Verdict(path, length, next_token, cost=cost)

    @staticmethod
    def draw(
        log_p: Float[Tensor, "b n v"], places: Int[Tensor, "b n"], noise: Noise, may_stop: bool = False
    ) -> Int[Tensor, "b n"]:
        """Sample with the noise of residuals."""
        return largest(log_p + noise.gumbel(places, Purpose.RESIDUAL), may_stop)

    def test_children(
        self,
        tree: DraftTree,
        numbers: Numbers,
        children: Int[Tensor, "b w"],
        p: Float[Tensor, "b v"],
        q: Float[Tensor, "b v"] | None,
        uniforms: Float[Tensor, "b w"],
        is_open: Any,
    ) -> Outcome:
        """Test `children` in sampling order, in the images that are still descending (`is_open`).

        Tests that no image makes are left out where the host may look at values.
        """
        left, taken, is_relaxed, before = p, numbers.full(0), numbers.full(False), None
        spent = distance = None if self.relaxation is None else torch.zeros_like(p[:, 0])
        tokens, lanes = tree.tokens.gather(1, children), numbers.columns(uniforms)
        for rank, child in enumerate(numbers.columns(children)):
            # Ranks may have gaps: a dynamic tree keeps the best children of all nodes.
            is_tested = is_open & (child > 0)
            if numbers.are_none(is_tested):
                continue
            token = tokens[:, rank : rank + 1]
            if q is not None and before is not None and tree.mode == "sampled":
                q = normalised(q.scatter(1, before, 0.0), q, numbers.is_one)
            before = token
            proposal = torch.zeros_like(p).scatter_(1, token, 1.0) if q is None else q
            own, own_q = numbers.read(left.gather(1, token)), numbers.read(proposal.gather(1, token))
            is_tested = is_tested & (own_q > 0)  # a token with q = 0 marks "no child"
            threshold, mass, after = lanes[rank] * own_q, own, None
            if self.relaxation is not None:
                trial = UnderTest(left, proposal, token[:, 0], tree.mode == "point", spent)
                ruling = self.relaxation.judge(trial)
                mass, after = numbers.read(ruling.mass[:, None]), normalised(ruling.left, left, numbers.is_one)
                cost, moved = cost_of(trial, ruling, after, numbers.is_one)
                assert spent is not None
                spent = numbers.where(is_tested, spent + cost, spent)
                if distance is not None:
                    distance = None if moved is None else numbers.where(is_tested, distance + moved, distance)
            is_accepted = is_tested & (threshold < mass)
            is_relaxed = is_relaxed | (is_accepted ^ (is_accepted & (threshold < own)))  # not by the exact test
            taken, is_open = numbers.where(is_accepted, child, taken), is_open ^ is_accepted
            is_refused = is_tested ^ is_accepted
            if numbers.are_none(is_refused):
                continue
            if after is None:
                after = normalised((left - proposal).clamp_(min=0.0), left, numbers.is_one)
            left = numbers.where(is_refused, after, left)
        return Outcome(taken, left, is_relaxed, spent, distance)


def children_by_rank(shape: TreeShape, images: int) -> Int[Tensor, "b n w"]:
    """Return for each node its children by rank, 0 where there is none."""
    width = max(shape.widths, default=1)
    nodes = torch.arange(1, shape.num_nodes, device=shape.parents.device).expand(images, -1)
    cells = (shape.parents * width + shape.ranks)[..., 1:].expand(images, -1)
    found = nodes.new_zeros(images, shape.num_nodes * width).scatter_(1, cells, nodes)
    return found.view(images, shape.num_nodes, width)


def cost_of(
    trial: UnderTest, ruling: Ruling, left: Float[Tensor, "b v"], is_one: bool = False
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"] | None]:
    """Return the cost of one test: how far the token is from p if all later tests are exact.

    `left` is what the test leaves after a rejection, normalised. A point draft x gives the token x with probability a',
    else one of `left`: the cost is the total variation between that and p. Of a sampled x it is the probability that
    this test and an exact one differ: by |a - a'| in accepting and, where both reject, by the total variation between
    what they leave. The second number is mass times distance, for accepted mass only: the mass gained by x times the
    rule's reach (None without codebook vectors).
    """
    own_q = trial.own_q.clamp(min=torch.finfo(trial.q.dtype).tiny)
    chance, exact_chance = (ruling.mass / own_q).clamp(max=1.0), (trial.own_p / own_q).clamp(max=1.0)
    gain = chance - exact_chance
    if trial.is_point:
        law = (left * (1.0 - chance)[:, None]).scatter_add_(1, trial.tokens[:, None], chance[:, None])
        spent = (law - trial.p).abs_().sum(1) / 2
    else:
        exact_left = normalised((trial.p - trial.q).clamp_(min=0.0), trial.p, is_one)
        apart = (left - exact_left).abs_().sum(1) / 2
        spent = gain.abs() + (1.0 - torch.maximum(chance, exact_chance)) * apart
    return spent, None if ruling.reach is None else gain.clamp(min=0.0) * ruling.reach


def normalised(
    distribution: Float[Tensor, "b v"], otherwise: Float[Tensor, "b v"], is_one: bool = False
) -> Float[Tensor, "b v"]:
    """Return the distribution scaled to sum 1, or `otherwise` where rounding leaves no mass.

    With `is_one` it is that of one image, and the host reads its sum.
    """
    total = distribution.sum(1, keepdim=True)
    if is_one:
        return distribution / total if float(total) > 0 else otherwise
    return torch.where(total > 0, distribution / total, otherwise)
