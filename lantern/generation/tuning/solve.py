"""The static tree of least time per token, from acceptance by depth and rank and the costs of a step.

The cost model is seconds per token = (T_verify(n) + T_draft + T_host) / tau. tau is 1 for the bonus token plus the
acceptance probability of every drafted node, which is the product of the rates on its path.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lantern.drafters.trees.static import Choice, StaticTree
from lantern.generation.tuning.costs import Costs

Rates = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Plan:
    """A tree with its tokens per step (tau) and seconds per token."""

    tree: StaticTree
    tau: float
    seconds: float


def tokens_per_step(tree: StaticTree, rates: Rates) -> float:
    """Return tokens per step; `rates[d][r]` is the probability that a node at depth d accepts its child of rank r."""
    reach: dict[Choice, float] = {(): 1.0}
    for choice in tree.choices:
        reach[choice] = reach[choice[:-1]] * _rate(rates, choice)
    return sum(reach.values())


def likeliest_nodes(rates: Rates, depth: int) -> Iterator[tuple[float, Choice]]:
    """Yield nodes down to `depth` with their acceptance probability, the likeliest first.

    The first n nodes are the best tree of n nodes, because rates do not rise with the rank and a node is never likelier
    than its parent. ValueError for rates that rise.
    """
    for row in rates[:depth]:
        if any(b > a for a, b in pairwise(row)) or not all(0 <= rate <= 1 for rate in row):
            raise ValueError(f"rates of siblings are {list(row)}, wanted probabilities that do not rise with the rank")
    pending: list[tuple[float, Choice, float]] = [(-_rate(rates, (0,)), (0,), 1.0)] if depth else []
    while pending and pending[0][0] < 0:
        negative, choice, above = heapq.heappop(pending)
        yield -negative, choice
        sibling, child = (*choice[:-1], choice[-1] + 1), (*choice, 0)
        heapq.heappush(pending, (-above * _rate(rates, sibling), sibling, above))
        if len(child) <= depth:
            heapq.heappush(pending, (negative * _rate(rates, child), child, -negative))


def solve(rates: Rates, costs: Costs, *, max_nodes: int, max_depth: int) -> list[Plan]:
    """Return the best plan for each depth limit up to `max_depth`, best first, of at most `max_nodes` with the root.

    For each depth limit and number of nodes the likeliest nodes give the greatest tau. The first plan is therefore the
    best of all trees if drafting costs the same for all trees of a depth; each plan also counts the cost of the nodes
    that the drafter extends.
    """
    plans: dict[StaticTree, Plan] = {}
    for limit in range(1, max_depth + 1):
        best: Plan | None = None
        choices: list[Choice] = []
        inner: set[Choice] = set()
        tau, deepest = 1.0, 0
        for reach, choice in likeliest_nodes(rates, limit):
            if len(choices) + 1 >= min(max_nodes, len(costs.verify)):
                break
            choices.append(choice)
            inner.add(choice[:-1])
            tau, deepest = tau + reach, max(deepest, len(choice))
            seconds = costs.step(nodes=len(choices) + 1, depth=deepest, inner=len(inner - {()})) / tau
            if best is None or seconds < best.seconds:
                best = Plan(StaticTree(tuple(choices)), tau, seconds)
        if best is not None:
            plans.setdefault(best.tree, best)
    return sorted(plans.values(), key=lambda plan: plan.seconds)


def _rate(rates: Rates, choice: Choice) -> float:
    depth, rank = len(choice) - 1, choice[-1]
    return rates[depth][rank] if depth < len(rates) and rank < len(rates[depth]) else 0.0
