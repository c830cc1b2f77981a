"""The cost-optimal policy: the tree with the most codes per second, by calibrated probabilities and step times."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.core.types import Step
from lantern.drafters.policies.costs import AssumedCosts
from lantern.drafters.policies.history import outcome
from lantern.drafters.policies.policy import (
    MAX_LOG,
    MIN_LOG,
    Layer,
    Limits,
    PolicyDefaults,
    Pool,
    State,
    StepCosts,
    TreeSize,
    adaptive_method,
    not_stopped,
)
from lantern.methods.spec import Setting

PRIOR_TESTS = 6.0  # tests at each depth that the drafter's own probabilities count as


@dataclass(frozen=True)
class Optimal(PolicyDefaults):
    """Takes nodes by their reach until the next one costs more time than its expected codes are worth.

    The expected codes of a step are 1 plus the sum of the reaches of its nodes. The best tree within a depth is the n
    nodes of highest reach, and with T(n, d) the time of a step with n nodes and d draft passes the best size is

        argmax over n, d of (1 + sum of the n largest reaches not deeper than d) / T(n, d).

    Probabilities are those of matching scores, times the ratio of accepted to expected codes so far at the depth in
    this image (`memory` is the decay of that count per step). The other policies estimate the same reach with a
    constant budget. ValueError for a memory outside (0, 1].
    """

    memory: float = 0.98
    costs: StepCosts = field(default_factory=AssumedCosts)

    def __post_init__(self) -> None:
        if not 0 < self.memory <= 1:
            raise ValueError(f"memory is {self.memory}, wanted above 0 and at most 1")

    def begin(self, size: Limits) -> State:
        """Return the codes taken and expected at each depth, and the time of a step by depth and nodes."""
        rows = [
            [self.costs.step(nodes=n + 1, depth=d, inner=_extended(n, d)) for n in range(1, size.nodes + 1)]
            for d in range(1, size.depth + 1)
        ]
        times = torch.tensor(rows, device=size.device)
        prior = torch.full((size.images, size.depth), PRIOR_TESTS, device=size.device)
        return prior, prior.clone(), times

    def chances(self, layer: Layer, state: State) -> tuple[Float[Tensor, "b f k"], State]:
        """Return log probabilities to match, calibrated by earlier steps."""
        assert layer.match is not None
        taken, expected, _ = state
        factor = (taken[:, layer.depth] / expected[:, layer.depth]).log()
        return (layer.match.clamp(min=MIN_LOG) + factor[:, None, None]).clamp(max=MAX_LOG), state

    def preferred_size(self, pool: Pool, state: State) -> TreeSize:
        """Return the size with the most expected codes per unit of time."""
        times = state[2]
        reach = torch.where(not_stopped(pool.values), pool.values.exp(), 0.0)
        most = min(times.shape[1], reach.shape[1])
        per_depth = torch.stack([torch.where(pool.depths <= d + 1, reach, 0.0) for d in range(len(times))], 1)
        codes = 1.0 + per_depth.topk(most, dim=-1).values.cumsum(-1)
        deeper = codes[:, pool.deepest - 1] + _below(pool, reach)[:, None]
        if pool.deepest < len(times):
            codes = torch.cat([codes[:, : pool.deepest], deeper[:, None], codes[:, pool.deepest + 1 :]], 1)
        best = (codes / times[:, :most]).flatten(1).argmax(1)
        return TreeSize(best % most + 1, best // most + 1)

    def observe(self, state: State, step: Step, chances: Float[Tensor, "b n"]) -> State:
        """Count at each depth the accepted codes, and those that were expected of the nodes' children."""
        assert step.tree is not None
        taken, expected, times = state
        made, shape = outcome(step), step.tree.shape
        parents = shape.parents.expand(chances.shape)[:, 1:]
        of_children = torch.zeros_like(chances).scatter_add(1, parents, chances.exp()[:, 1:])
        predicted = of_children.gather(1, made.nodes).clamp(max=1.0) * made.is_tested
        accepted = (made.is_taken & made.is_tested).to(predicted.dtype)
        depths = taken.shape[1]
        room = (0, max(depths - predicted.shape[1], 0))
        predicted, accepted = (torch.nn.functional.pad(x, room)[:, :depths] for x in (predicted, accepted))
        kept = torch.where(step.counts > 0, self.memory, 1.0)[:, None]
        return kept * taken + accepted, kept * expected + predicted, times


def _extended(nodes: int, depth: int) -> int:
    """Estimate how many nodes have children, without the root: each further draft pass extends a few."""
    return min(nodes - 1, 2 * (depth - 1)) if nodes > 1 else 0


def _below(pool: Pool, reach: Float[Tensor, "b p"]) -> Float[Tensor, " b"]:
    """Estimate what one more depth would add: the last depth times its ratio to the depth above."""
    last, above = (torch.where(pool.depths == d, reach, 0.0).sum(1) for d in (pool.deepest, pool.deepest - 1))
    above = above if pool.deepest > 1 else torch.ones_like(last)
    return last * (last / above.clamp(min=1e-6)).clamp(max=1.0)


METHODS = (
    adaptive_method(
        "optimal",
        "the most codes a second, by calibrated chances and measured costs; exact by Gumbel match",
        Optimal,
        Setting("memory", 0.98, "weight of an acceptance made one step earlier", low=0, high=1),
    ),
)
