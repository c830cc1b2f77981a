"""Multi-round rejection: children are tested one after the other, each against what the last rejection left."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lantern.core.noise import Purpose
from lantern.core.sampling import logs, probabilities
from lantern.core.types import (
    Acceptance,
    DraftTree,
    GivenRows,
    NoiseSource,
    Rows,
    Ruling,
    TreeShape,
    Trial,
    Verdict,
    VerifierDefaults,
)


@dataclass(frozen=True)
class Outcome:
    """The result of testing a node's children: the child `taken` where `is_accepted`, and the distribution `left`.

    `cost` is the sum over the tests made.
    """

    is_accepted: Bool[Tensor, " b"]
    taken: Int[Tensor, " b"]
    left: Float[Tensor, "b v"]
    is_relaxed: Bool[Tensor, " b"]
    cost: "Cost"


@dataclass(frozen=True)
class Cost:
    """Cost of relaxed tests: total variation, and moved mass times L2 distance (None without code vectors)."""

    total_variation: Float[Tensor, " b"]
    latent_distance: Float[Tensor, " b"] | None


@dataclass(frozen=True)
class Result:
    """The result of testing the children of a node of one image: the child `taken`, 0 if none was accepted.

    `left` is the distribution that remains, `cost` the sum over the tests made.
    """

    left: Float[Tensor, "1 v"]
    cost: Cost
    taken: int = 0
    is_relaxed: bool = False


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
    ValueError for a relaxation of distributions.
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
        if rows.is_lazy and len(tree.tokens) == 1:
            return self._descend_one(tree, rows, positions, noise)
        images = torch.arange(len(tree.tokens), device=tree.tokens.device)
        node, last = torch.zeros_like(images), torch.zeros_like(images)
        is_alive = torch.ones_like(node, dtype=torch.bool)
        final = p = probabilities(rows.at(node[:, None])[:, 0])
        outcomes: list[Outcome] = []
        uniforms = noise.uniform(positions, max(tree.shape.widths))
        for width in tree.shape.widths:
            q = None if tree.log_q is None or tree.mode == "point" else probabilities(tree.log_q[images, node])
            ranks = uniforms[images, node, :width]
            outcome = self.test_children(tree, node, p, q, ranks, is_alive, may_stop=rows.is_lazy)
            final = torch.where(is_alive[:, None], outcome.left, final)
            is_alive = outcome.is_accepted
            node = torch.where(is_alive, outcome.taken, 0)
            last = torch.where(is_alive, outcome.taken, last)
            outcomes.append(outcome)
            if rows.is_lazy and not bool(is_alive.any()):
                break
            p = probabilities(rows.at(node[:, None])[:, 0])
        final = torch.where(is_alive[:, None], p, final)
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

    def _descend_one(self, tree: DraftTree, rows: Rows, positions: Int[Tensor, "1 n"], noise: NoiseSource) -> Verdict:
        """Run `descend` for one image with its codes and uniforms on the host, so that only tests compute."""
        children, codes = children_by_rank(tree.shape), tree.tokens[0].tolist()
        uniforms = noise.uniform(positions, max(tree.shape.widths))[0].tolist()
        free, node = torch.zeros(1, device=tree.tokens.device), 0
        path, results = list[int](), list[Result]()
        for width in tree.shape.widths:
            p = probabilities(rows.at(torch.tensor([[node]]))[:, 0])
            q = None if tree.log_q is None or tree.mode == "point" else probabilities(tree.log_q[:, node])
            siblings = {rank: child for rank, child in children[node].items() if rank < width}
            result = self._test_siblings(tree, siblings, codes, Result(p, Cost(free, free)), q, uniforms[node])
            results.append(result)
            if not result.taken:
                break
            node = result.taken
            path.append(node)
        final = probabilities(rows.at(torch.tensor([[node]]))[:, 0]) if results[-1].taken else results[-1].left
        next_token = self.draw(logs(final)[:, None], positions[:, node : node + 1], noise)[:, 0]
        depth, accepted = len(tree.shape.widths), len(path)
        nodes = torch.tensor([path + [0] * (depth - accepted)])
        if self.relaxation is None:
            return Verdict(nodes, torch.tensor([accepted]), next_token)
        relaxed = torch.tensor([[float(result.is_relaxed) for result in results]])
        left = depth - len(results)
        spent = torch.stack([result.cost.total_variation for result in results], 1).clamp(max=1.0)
        known = [result.cost.latent_distance for result in results if result.cost.latent_distance is not None]
        distance = pad(torch.stack(known, 1), (0, left + 1)) if len(known) == len(results) else None
        return Verdict(
            nodes, torch.tensor([accepted]), next_token, pad(relaxed, (0, left)), pad(spent, (0, left + 1)), distance
        )

    def _test_siblings(
        self,
        tree: DraftTree,
        children: dict[int, int],
        codes: list[int],
        before: "Result",
        q: Float[Tensor, "1 v"] | None,
        uniforms: list[float],
    ) -> "Result":
        """Test the children of a node of one image, by rank, until one is accepted."""
        p, cost, last = before.left, before.cost, max(children, default=-1)
        for rank in range(last + 1):
            # As in `test_children`, the root stands for a rank without a child.
            child = children.get(rank, 0)
            code = tree.tokens[:, child : child + 1]
            proposal = torch.zeros_like(p).scatter_(1, code, 1.0) if q is None else q
            own_q = float(proposal[0, codes[child]])
            if child and own_q > 0:
                trial = Trial(p, proposal, code[:, 0], tree.mode == "point", cost.total_variation)
                threshold, own = uniforms[rank] * own_q, float(p[0, codes[child]])
                if self.relaxation is None:
                    if threshold < own:
                        return Result(p, cost, child)
                    p = normalised((p - proposal).clamp_(min=0.0), p, is_one=True)
                else:
                    ruling = self.relaxation.judge(trial)
                    left = normalised(ruling.left, p, is_one=True)
                    cost = sum_of(cost, cost_of(trial, ruling, left, is_one=True))
                    if threshold < float(ruling.mass):
                        return Result(p, cost, child, is_relaxed=not threshold < own)
                    p = left
            if tree.mode == "sampled" and rank < last:
                q = normalised(proposal.scatter(1, code, 0.0), proposal, is_one=True)
        return Result(p, cost)

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
        outcome = Outcome(zeros.bool(), zeros, p, zeros.bool(), Cost(free, free))
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
                q = normalised(proposal.scatter(1, code, 0.0), proposal)
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
            mass, left = own, normalised((trial.p - q).clamp(min=0.0), trial.p)
        else:
            ruling = self.relaxation.judge(trial)
            mass, left = ruling.mass, normalised(ruling.left, trial.p)
            cost = add(before.cost, cost_of(trial, ruling, left), is_tested)
        is_accepted = is_tested & (threshold < mass)
        is_rejected = is_tested & ~is_accepted
        return Outcome(
            is_accepted=before.is_accepted | is_accepted,
            taken=torch.where(is_accepted, child, before.taken),
            left=torch.where(is_rejected[:, None], left, trial.p),
            is_relaxed=before.is_relaxed | (is_accepted & ~(threshold < own)),
            cost=cost,
        )


def cost_of(trial: Trial, ruling: Ruling, left: Float[Tensor, "b v"], is_one: bool = False) -> Cost:
    """Return the cost of one test: the probability that it differs from an exact test of x from the same state.

    `left` is what the test leaves after a rejection, normalised.

    The tests differ by |a - a'| in accepting and, where both reject, by the total variation between what they leave.
    Distance is counted for accepted mass only: the mass gained by x times the rule's reach.
    """
    exact_left = normalised((trial.p - trial.q).clamp_(min=0.0), trial.p, is_one)
    own_q = trial.own_q.clamp(min=torch.finfo(trial.q.dtype).tiny)
    chance, exact_chance = (ruling.mass / own_q).clamp(max=1.0), (trial.own_p / own_q).clamp(max=1.0)
    apart = (left - exact_left).abs_().sum(1) / 2
    gain = chance - exact_chance
    spent = gain.abs() + (1.0 - torch.maximum(chance, exact_chance)) * apart
    return Cost(spent, None if ruling.reach is None else gain.clamp(min=0.0) * ruling.reach)


def add(before: Cost, test: Cost, is_tested: Bool[Tensor, " b"]) -> Cost:
    """Return the sum of the costs where a test was made, `before` elsewhere."""
    distance = None
    if before.latent_distance is not None and test.latent_distance is not None:
        distance = before.latent_distance + torch.where(is_tested, test.latent_distance, 0.0)
    return Cost(before.total_variation + torch.where(is_tested, test.total_variation, 0.0), distance)


def sum_of(before: Cost, test: Cost) -> Cost:
    """Return the sum of two costs."""
    distance = None
    if before.latent_distance is not None and test.latent_distance is not None:
        distance = before.latent_distance + test.latent_distance
    return Cost(before.total_variation + test.total_variation, distance)


def children_by_rank(shape: TreeShape) -> list[dict[int, int]]:
    """Return for each node its children by rank, of a shape that is the same in all images or of one image."""
    parents, ranks = (tensor.flatten().tolist() for tensor in (shape.parents, shape.ranks))
    found: list[dict[int, int]] = [{} for _ in parents]
    for node in range(1, len(parents)):
        found[parents[node]].setdefault(ranks[node], node)
    return found


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
