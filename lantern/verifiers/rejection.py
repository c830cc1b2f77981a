"""Multi-round rejection: children are tested one after the other, each against what the last rejection left."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.noise import Purpose
from lantern.core.sampling import logs, probabilities
from lantern.core.types import Cost, DraftTree, NoiseSource, Rows, TreeShape, Verdict
from lantern.core.types.verifier import rows_at
from lantern.verifiers.relaxations.rule import Acceptance, Ruling, Trial


@dataclass(frozen=True)
class Outcome:
    """The result of testing a node's children: the child `taken`, 0 for none, and the distribution `left`.

    `cost` is the sum over the tests made, None without a relaxation.
    """

    taken: Int[Tensor, " b"]
    left: Float[Tensor, "b v"]
    cost: Cost | None


@dataclass(frozen=True)
class RejectionVerifier:
    """Accept a child x with probability min(1, p(x) / q(x)); after a rejection p becomes norm(max(p - q, 0)).

    Leviathan et al., arXiv:2211.17192, for one child; in rounds over siblings arXiv:2305.09781; with samples without
    replacement as EAGLE tests them, arXiv:2401.15077. Siblings are tested in sampling order, each only after the one
    before it was rejected. With q a point mass ("point") a rejection sets p(x) to 0; samples without replacement
    ("sampled") remove x from q; independent samples ("iid") leave q unchanged. If all children are rejected, the next
    code is sampled from what is left, with noise that drafting does not use.

    `relaxation` (LANTERN, LANTERN++, GSD, tolerance) defines its own acceptance probability and its own distribution
    after a rejection. The distribution of its output has a closed form for one draft at most, so the reported total
    variation is a bound: per test, the probability that this test and an exact test from the same state differ, in
    accepting x or in what they leave (`cost_of`). The expectation over drafts of the sum over the tests of a code is at
    least the total variation between the output distribution and p. Single sums vary around it; each is capped at 1.
    ValueError for a relaxation of distributions.
    """

    relaxation: Acceptance | None = None
    modes: frozenset[str] = frozenset({"point", "sampled", "iid"})

    def __post_init__(self) -> None:
        if self.relaxation is None:
            return
        if not isinstance(self.relaxation, Acceptance):
            name = type(self.relaxation).__name__
            raise ValueError(f"{name} relaxes distributions: use RelaxedVerifier({name}(...), RejectionVerifier())")
        object.__setattr__(self, "modes", self.modes & self.relaxation.modes)

    @property
    def is_exact(self) -> bool:
        """Whether codes follow the target's own distribution."""
        return self.relaxation is None

    def verify(self, tree: DraftTree, rows: Rows, noise: NoiseSource) -> Verdict:
        """Descend while a child is accepted, then sample from what is left (below a leaf: from p)."""
        may_stop, widths = rows.may_stop, tree.shape.widths
        images = torch.arange(len(tree.tokens), device=tree.tokens.device)
        node, is_alive = torch.zeros_like(images), torch.ones_like(images, dtype=torch.bool)
        left = probabilities(rows.log_p(node[:, None])[:, 0])
        path = tree.tokens.new_zeros(len(images), len(widths))
        relaxed, spent = left.new_zeros(path.shape), left.new_zeros(len(images), len(widths) + 1)
        distance = torch.zeros_like(spent)
        children = children_by_rank(tree.shape, len(images), max(widths, default=1))
        uniforms = noise.uniform(rows.places, children.shape[-1])
        for depth, width in enumerate(widths):
            q = None
            if tree.log_q is not None and tree.mode != "point":
                q = probabilities(rows_at(tree.log_q, node[:, None], may_stop)[:, 0])
            tests = self.test_children(
                tree, children[images, node, :width], left, q, uniforms[images, node], is_alive, may_stop
            )
            path[:, depth], is_alive = tests.taken, tests.taken > 0
            if tests.cost is not None:
                relaxed[:, depth], spent[:, depth] = tests.cost.relaxed, tests.cost.total_variation.clamp(max=1.0)
                if tests.cost.latent_distance is None:
                    distance = None
                elif distance is not None:
                    distance[:, depth] = tests.cost.latent_distance
            left = tests.left
            if may_stop and not bool(is_alive.any()):
                break
            node = torch.where(is_alive, tests.taken, node)
            left = choose(is_alive, probabilities(rows.log_p(node[:, None])[:, 0]), left, may_stop)
        next_token = self.draw(logs(left)[:, None], rows.places.gather(1, node[:, None]), noise)[:, 0]
        rule = self.relaxation
        cost = None if rule is None else Cost(relaxed, spent, distance, rule.bound)
        return Verdict(path, (path > 0).sum(1), next_token, cost=cost)

    def draw(self, log_p: Float[Tensor, "b n v"], places: Int[Tensor, "b n"], noise: NoiseSource) -> Int[Tensor, "b n"]:
        """Sample with the noise of residuals."""
        return (log_p + noise.gumbel(places, Purpose.RESIDUAL)).argmax(-1)

    def test_children(
        self,
        tree: DraftTree,
        children: Int[Tensor, "b w"],
        p: Float[Tensor, "b v"],
        q: Float[Tensor, "b v"] | None,
        uniforms: Float[Tensor, "b w"],
        is_open: Bool[Tensor, " b"],
        may_stop: bool,
    ) -> Outcome:
        """Test `children` in sampling order, in the images that are still descending (`is_open`).

        With `may_stop` the tests that no image makes are left out, at the price of looking at values.
        """
        codes, is_child = tree.tokens.gather(1, children), children > 0
        # Ranks may have gaps: a dynamic tree keeps the best children of all nodes.
        found = is_child.any(0).tolist() if may_stop else [True] * children.shape[1]
        ranks = [rank for rank, is_found in enumerate(found) if is_found]
        left, taken = p, torch.zeros_like(children[:, 0])
        cost = None if self.relaxation is None else Cost(p.new_zeros(len(p)), p.new_zeros(len(p)), p.new_zeros(len(p)))
        for rank in ranks:
            code = codes[:, rank : rank + 1]
            proposal = torch.zeros_like(p).scatter_(1, code, 1.0) if q is None else q
            spent = None if cost is None else cost.total_variation
            trial = Trial(left, proposal, code[:, 0], tree.mode == "point", spent)
            # A code with q = 0 marks "no child" and is skipped.
            is_tested = is_open & is_child[:, rank] & (trial.own_q > 0)
            threshold, mass, after = uniforms[:, rank] * trial.own_q, trial.own_p, None
            if self.relaxation is not None and cost is not None:
                ruling = self.relaxation.judge(trial)
                mass, after = ruling.mass, normalised(ruling.left, left, may_stop)
                is_relaxed = (threshold < mass) & ~(threshold < trial.own_p)
                cost = plus(cost, cost_of(trial, ruling, after, is_relaxed.to(p.dtype), may_stop), is_tested)
            is_accepted = is_tested & (threshold < mass)
            taken, is_open = torch.where(is_accepted, children[:, rank], taken), is_open & ~is_accepted
            if may_stop and not bool(is_open.any()):
                break
            if after is None:
                after = normalised((left - proposal).clamp_(min=0.0), left, may_stop)
            left = choose(is_tested & is_open, after, left, may_stop)
            if tree.mode == "sampled" and rank != ranks[-1]:
                q = normalised(proposal.scatter(1, code, 0.0), proposal, may_stop)
        return Outcome(taken, left, cost)


def children_by_rank(shape: TreeShape, images: int, width: int) -> Int[Tensor, "b n w"]:
    """Return for each node its children by rank, 0 where there is none."""
    nodes = torch.arange(1, shape.num_nodes, device=shape.parents.device).expand(images, -1)
    cells = (shape.parents * width + shape.ranks)[..., 1:].expand(images, -1)
    found = nodes.new_zeros(images, shape.num_nodes * width).scatter_(1, cells, nodes)
    return found.view(images, shape.num_nodes, width)


def cost_of(
    trial: Trial, ruling: Ruling, left: Float[Tensor, "b v"], relaxed: Float[Tensor, " b"], may_stop: bool = False
) -> Cost:
    """Return the cost of one test: the probability that it differs from an exact test of x from the same state.

    `left` is what the test leaves after a rejection, normalised.

    The tests differ by |a - a'| in accepting and, where both reject, by the total variation between what they leave.
    Distance is counted for accepted mass only: the mass gained by x times the rule's reach.
    """
    exact_left = normalised((trial.p - trial.q).clamp_(min=0.0), trial.p, may_stop)
    own_q = trial.own_q.clamp(min=torch.finfo(trial.q.dtype).tiny)
    chance, exact_chance = (ruling.mass / own_q).clamp(max=1.0), (trial.own_p / own_q).clamp(max=1.0)
    apart = (left - exact_left).abs_().sum(1) / 2
    gain = chance - exact_chance
    spent = gain.abs() + (1.0 - torch.maximum(chance, exact_chance)) * apart
    return Cost(relaxed, spent, None if ruling.reach is None else gain.clamp(min=0.0) * ruling.reach)


def plus(before: Cost, test: Cost, is_tested: Bool[Tensor, " b"]) -> Cost:
    """Return the sum of the costs where a test was made, `before` elsewhere."""
    distance = None
    if before.latent_distance is not None and test.latent_distance is not None:
        distance = before.latent_distance + torch.where(is_tested, test.latent_distance, 0.0)
    relaxed = before.relaxed + torch.where(is_tested, test.relaxed, 0.0)
    return Cost(relaxed, before.total_variation + torch.where(is_tested, test.total_variation, 0.0), distance)


def normalised(
    distribution: Float[Tensor, "b v"], otherwise: Float[Tensor, "b v"], may_stop: bool = False
) -> Float[Tensor, "b v"]:
    """Return the distribution scaled to sum 1, or `otherwise` where rounding leaves no mass."""
    total = distribution.sum(1, keepdim=True)
    if may_stop and bool((total > 0).all()):
        return distribution / total
    return torch.where(total > 0, distribution / total, otherwise)


def choose(
    is_new: Bool[Tensor, " b"], new: Float[Tensor, "b v"], old: Float[Tensor, "b v"], may_stop: bool
) -> Float[Tensor, "b v"]:
    """Return the new distribution where `is_new`, else the old one; with `may_stop` without copies where it can."""
    if may_stop and bool(is_new.all()):
        return new
    return torch.where(is_new[:, None], new, old)
