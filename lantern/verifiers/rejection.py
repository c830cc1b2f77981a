"""Multi-round rejection: children are tested one after the other, each against what the last rejection left."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lantern.core.noise import Purpose
from lantern.core.sampling import logs
from lantern.core.types import (
    Acceptance,
    DraftTree,
    GivenRows,
    NoiseSource,
    Rows,
    Ruling,
    Trial,
    Verdict,
    VerifierDefaults,
)


@dataclass(frozen=True)
class Outcome:
    """The result of testing a node's children: the child `taken` where `is_accepted`, and the distribution `left`.

    `cost` is the sum over the tests made. With `may_look` tests may look at values, which costs little on a CPU.
    """

    is_accepted: Bool[Tensor, " b"]
    taken: Int[Tensor, " b"]
    left: Float[Tensor, "b v"]
    is_relaxed: Bool[Tensor, " b"]
    cost: "Cost"
    may_look: bool = False


@dataclass(frozen=True)
class Cost:
    """Cost of relaxed tests: total variation, and moved mass times L2 distance (None without code vectors)."""

    total_variation: Float[Tensor, " b"]
    latent_distance: Float[Tensor, " b"] | None


@dataclass(frozen=True)
class RejectionVerifier(VerifierDefaults):
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
    """

    relaxation: Acceptance | None = None
    modes: frozenset[str] = frozenset({"point", "sampled", "iid"})
    reads_untruncated: bool = False
    reads_rows: bool = True

    def __post_init__(self) -> None:
        if self.relaxation is None:
            return
        if not self.relaxation.judges_codes:
            name = type(self.relaxation).__name__
            raise ValueError(f"{name} relaxes distributions: use RelaxedVerifier({name}(...), RejectionVerifier())")
        object.__setattr__(self, "modes", self.modes & self.relaxation.modes)

    @property
    def is_exact(self) -> bool:
        """Whether codes follow the target's own distribution."""
        return self.relaxation is None

    @property
    def bound(self) -> float | None:
        """The bound of the relaxation."""
        return None if self.relaxation is None else self.relaxation.bound

    def draw(
        self, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Int[Tensor, "b n"]:
        """Sample with the noise of residuals."""
        return (log_p + noise.gumbel(positions, Purpose.RESIDUAL)).argmax(-1)

    def walk(
        self, tree: DraftTree, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Verdict:
        """Descend while a child is accepted, then sample from what is left (below a leaf: from p)."""
        return self.descend(tree, GivenRows(log_p, positions), positions, noise)

    def descend(self, tree: DraftTree, rows: Rows, positions: Int[Tensor, "b n"], noise: NoiseSource) -> Verdict:
        """Run `walk` with the rows of accepted nodes; lazy rows end it with the last possible test."""
        images = torch.arange(len(tree.tokens), device=tree.tokens.device)
        node, last = torch.zeros_like(images), torch.zeros_like(images)
        is_alive = torch.ones_like(node, dtype=torch.bool)
        final = p = rows.at(node[:, None])[:, 0].exp()
        outcomes: list[Outcome] = []
        uniforms = noise.uniform(positions, max(tree.shape.widths))
        for width in tree.shape.widths:
            q = None if tree.log_q is None or tree.mode == "point" else tree.log_q[images, node].exp()
            ranks = uniforms[images, node, :width]
            outcome = self.test_children(tree, node, p, q, ranks, is_alive, may_stop=rows.is_lazy)
            final = select(is_alive, outcome.left, final, may_look=rows.is_lazy)
            is_alive = outcome.is_accepted
            node = torch.where(is_alive, outcome.taken, 0)
            last = torch.where(is_alive, outcome.taken, last)
            outcomes.append(outcome)
            if rows.is_lazy and not bool(is_alive.any()):
                break
            p = rows.at(node[:, None])[:, 0].exp()
        final = select(is_alive, p, final, may_look=rows.is_lazy)
        next_token = self.draw(logs(final)[:, None], positions.gather(1, last[:, None]), noise)[:, 0]
        # Depths past a break have no test.
        left = len(tree.shape.widths) - len(outcomes)
        accepted = torch.stack([outcome.is_accepted for outcome in outcomes], 1)
        path = pad(torch.stack([outcome.taken for outcome in outcomes], 1), (0, left))
        if self.relaxation is None:
            return Verdict(path, accepted.sum(1), next_token)
        relaxed = torch.stack([outcome.is_relaxed for outcome in outcomes], 1).float()
        spent = torch.stack([outcome.cost.total_variation for outcome in outcomes], 1).clamp(max=1.0)
        distances = [outcome.cost.latent_distance for outcome in outcomes]
        known = [distance for distance in distances if distance is not None]
        distance = pad(torch.stack(known, 1), (0, left + 1)) if len(known) == len(distances) else None
        return Verdict(path, accepted.sum(1), next_token, pad(relaxed, (0, left)), pad(spent, (0, left + 1)), distance)

    def test_children(
        self,
        tree: DraftTree,
        node: Int[Tensor, " b"],
        p: Float[Tensor, "b v"],
        q: Float[Tensor, "b v"] | None,
        uniforms: Float[Tensor, "b w"],
        is_alive: Bool[Tensor, " b"],
        may_stop: bool = False,
    ) -> Outcome:
        """Test the children of `node` in sampling order, in the images that are still descending.

        With `may_stop` the ranks that no image tests are left out, at the price of looking at values.
        """
        zeros = torch.zeros_like(node)
        free = torch.zeros_like(p[:, 0])
        outcome = Outcome(zeros.bool(), zeros, p, zeros.bool(), Cost(free, free), may_stop)
        of_node = tree.shape.parents == node[:, None]
        of_node[:, 0] = False
        for rank in range(uniforms.shape[1]):
            is_child = of_node & (tree.shape.ranks == rank)
            child = is_child.long().argmax(1)
            code = tree.tokens.gather(1, child[:, None])
            proposal = torch.zeros_like(p).scatter_(1, code, 1.0) if q is None else q
            own_q = proposal.gather(1, code)[:, 0]
            # A code with q = 0 marks "no child" and is skipped.
            is_tested = is_alive & ~outcome.is_accepted & is_child.any(1) & (own_q > 0)
            outcome = self._test(outcome, child, code[:, 0], proposal, uniforms[:, rank] * own_q, is_tested, tree.mode)
            # Ranks may have gaps: a dynamic tree keeps the best children of all nodes.
            has_more = (of_node & (tree.shape.ranks > rank)).any(1)
            if may_stop and not bool((is_alive & ~outcome.is_accepted & has_more).any()):
                break
            if tree.mode == "sampled":
                q = normalised(proposal.scatter(1, code, 0.0), proposal, may_stop)
        return outcome

    def _test(
        self,
        before: Outcome,
        child: Int[Tensor, " b"],
        code: Int[Tensor, " b"],
        q: Float[Tensor, "b v"],
        threshold: Float[Tensor, " b"],
        is_tested: Bool[Tensor, " b"],
        mode: str,
    ) -> Outcome:
        """Accept where the threshold u q(x) is below the mass of x; elsewhere compute what is left."""
        trial = Trial(before.left, q, code, mode == "point", before.cost.total_variation)
        own, cost = trial.own_p, before.cost
        if self.relaxation is None:
            mass, left = own, (trial.p - q).clamp(min=0.0)
        else:
            ruling = self.relaxation.judge(trial)
            mass, left = ruling.mass, ruling.left
            cost = add(before.cost, cost_of(trial, ruling, before.may_look), is_tested)
        is_accepted = is_tested & (threshold < mass)
        is_rejected = is_tested & ~is_accepted
        return Outcome(
            is_accepted=before.is_accepted | is_accepted,
            taken=torch.where(is_accepted, child, before.taken),
            left=select(is_rejected, normalised(left, trial.p, before.may_look), trial.p, before.may_look),
            is_relaxed=before.is_relaxed | (is_accepted & ~(threshold < own)),
            cost=cost,
            may_look=before.may_look,
        )


def cost_of(trial: Trial, ruling: Ruling, may_look: bool = False) -> Cost:
    """Return the cost of one test: the probability that it differs from an exact test of x from the same state.

    The tests differ by |a - a'| in accepting and, where both reject, by the total variation between what they leave.
    Distance is counted for accepted mass only: the mass gained by x times the rule's reach.
    """
    exact_left = (trial.p - trial.q).clamp(min=0.0)
    own_q = trial.own_q.clamp(min=torch.finfo(trial.q.dtype).tiny)
    chance, exact_chance = (ruling.mass / own_q).clamp(max=1.0), (trial.own_p / own_q).clamp(max=1.0)
    apart = normalised(ruling.left, trial.p, may_look) - normalised(exact_left, trial.p, may_look)
    apart = apart.abs().sum(1) / 2
    gain = chance - exact_chance
    spent = gain.abs() + (1.0 - torch.maximum(chance, exact_chance)) * apart
    return Cost(spent, None if ruling.reach is None else gain.clamp(min=0.0) * ruling.reach)


def add(before: Cost, test: Cost, is_tested: Bool[Tensor, " b"]) -> Cost:
    """Return the sum of the costs where a test was made, `before` elsewhere."""
    distance = None
    if before.latent_distance is not None and test.latent_distance is not None:
        distance = before.latent_distance + torch.where(is_tested, test.latent_distance, 0.0)
    return Cost(before.total_variation + torch.where(is_tested, test.total_variation, 0.0), distance)


def normalised(
    distribution: Float[Tensor, "b v"], otherwise: Float[Tensor, "b v"], may_look: bool = False
) -> Float[Tensor, "b v"]:
    """Return the distribution scaled to sum 1, or `otherwise` where rounding leaves no mass."""
    total = distribution.sum(1, keepdim=True)
    return select(total[:, 0] > 0, distribution / total, otherwise, may_look)


def select(
    is_first: Bool[Tensor, " b"], first: Float[Tensor, "b v"], second: Float[Tensor, "b v"], may_look: bool
) -> Float[Tensor, "b v"]:
    """Return the rows of `first` where `is_first`, else of `second`; of one image without a copy if it may look."""
    if may_look and len(is_first) == 1:
        return first if bool(is_first) else second
    return torch.where(is_first[:, None], first, second)
