"""Dynamic trees are closed and within their budget, and with constant probabilities equal the static tree."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, ClassVar

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from lantern.core.sampling import Noise, Purpose, Sampling
from lantern.core.types import DraftMode, Generation
from lantern.drafters.eagle.drafter import GrowingDrafter, Growth
from lantern.drafters.policies import STOPPED_BELOW, Eagle2, Layer, Policy
from lantern.drafters.trees import grown
from lantern.methods import METHODS
from lantern.methods.method import Deferred
from tests.drafters.sampled_trees import stepped
from tests.refusals import refused
from tests.tiny import tiny_eagle
from tests.tiny_decoder import CONDITION, KEYS, SAMPLING, TARGET, made_of, tiny_decoder

RATES = (0.43, 0.17, 0.08, 0.05, 0.03, 0.02, 0.013, 0.007)


@cache
def made(name: str, *, temperature: float = 1.0, **options: Any) -> tuple[Generation, list[Any]]:
    return stepped(tiny_decoder(name, sampling=Sampling(guidance=3, temperature=temperature), **options))


# Settings with which each policy stops early for any weights.
EAGER_TO_STOP = {
    "ddd": {"alive": 0.999},
    "svip": {"threshold": 0.001},
    "c2t": {"threshold": 0.999},
    "radar": {"threshold": 1e-6},
    "adt-tree": {"end": 0.96},
}


@pytest.mark.parametrize("name", EAGER_TO_STOP)
def test_adaptive_sizes_change_no_token(name: str) -> None:
    runs = [made(name, adaptive=adaptive, depth=3, **EAGER_TO_STOP[name]) for adaptive in (False, True)]
    assert torch.equal(runs[0][0].tokens, runs[1][0].tokens)
    sizes = [[(s.tree.shape.num_nodes, s.tree.shape.depth) for s in steps] for _, steps in runs]
    assert set(sizes[0]) == {(16, 3)}
    # The first tree has the largest size, because no step was observed.
    assert sizes[1][0] == (16, 3) and min(sizes[1]) < (16, 3)
    assert all(1 < nodes <= 16 and 1 <= depth <= 3 for nodes, depth in sizes[1])


@dataclass(frozen=True)
class Constant(Policy):
    rates: tuple[float, ...]
    is_predictable: ClassVar[bool] = True

    def chances(self, layer: Layer) -> Float[Tensor, "b f k"]:
        assert layer.tokens is None and layer.make_match is None
        return torch.tensor(self.rates).log().expand(*layer.reach.shape, -1)


def growing(policy: Any, growth: Growth, mode: DraftMode = "gumbel") -> GrowingDrafter:
    return GrowingDrafter(tiny_eagle(TARGET), TARGET, policy=policy, growth=growth, mode=mode, sampling=SAMPLING)


@pytest.mark.parametrize(("nodes", "depth"), [(8, 2), (15, 4), (5, 5), (3, 6)])
def test_constant_probabilities_grow_the_best_static_tree(nodes: int, depth: int) -> None:
    drafter = growing(Constant(RATES), Growth(nodes=nodes, width=8, depth=depth))
    first = stepped(replace(tiny_decoder("eagle1"), drafter=drafter))[1][0].tree
    expected = worth(grown(nodes, depth, RATES).choices)
    for image in range(3):
        choices: list[tuple[int, ...]] = [()]
        for node in range(1, nodes + 1):
            parent = choices[int(first.shape.parents[image, node])]
            choices.append((*parent, int(first.shape.ranks[image, node])))
        assert len(set(choices)) == nodes + 1
        assert worth(choices[1:]) == pytest.approx(expected)


def worth(choices: Sequence[tuple[int, ...]]) -> list[float]:
    """Return the probabilities of reaching the nodes, greatest first: (0, 2) and (2, 0) have the same value."""
    return sorted((prod(RATES[rank] for rank in choice) for choice in choices), reverse=True)


def test_nodes_past_the_end_of_the_picture_are_stopped() -> None:
    drafter = growing(Eagle2("match"), Growth(nodes=15, width=4, depth=4))
    seen: list[tuple[Tensor, Tensor]] = []
    expected = drafter._candidates

    def spied(front, layer, chances):
        found = expected(front, layer, chances)
        seen.append((drafter.known + layer.depth, found[0].values))
        return found

    drafter._candidates = spied  # type: ignore[method-assign]
    replace(tiny_decoder("eagle1"), drafter=drafter).generate(CONDITION, keys=KEYS)
    outside = [reach[places >= 16] for places, reach in seen]
    assert sum(map(len, outside)) > 0 and all((reach < STOPPED_BELOW).all() for reach in outside)
    assert all((reach[places < 16][:, 0] > STOPPED_BELOW).all() for places, reach in seen)


def test_policies_that_read_samples_raise_with_rejection() -> None:
    refused(growing, Eagle2(), Growth(), mode="sampled", match="Eagle2 chooses the tested tokens after")


def recording() -> Deferred:
    drafter: Any = METHODS["eagle2"].made.drafter
    return replace(drafter, named={**drafter.named, "records_log_q": True})


@pytest.mark.parametrize("purpose", [Purpose.DRAFT, Purpose.TARGET])
def test_log_q_of_nodes_gives_their_children(purpose: Purpose) -> None:
    """The children of a node are among the best tokens of its recorded log q plus noise, by rank."""
    noise = Noise(KEYS, positions=16, vocab_size=24)
    exact = made_of("eagle2", recording(), METHODS["eagle2"].made.verifier)
    run = tiny_decoder(METHODS["eagle2-rejection"] if purpose == Purpose.DRAFT else exact)
    step = stepped(run)[1][0]
    shape = step.tree.shape
    for image in range(3):
        for node in range(1, shape.num_nodes):
            parent, rank = int(shape.parents[image, node]), int(shape.ranks[image, node])
            place = step.start[:, None] + shape.depths[image, parent]
            scores = step.tree.log_q[image, parent] + noise.gumbel(place, purpose)[image, 0]
            assert int(scores.topk(rank + 1).indices[rank]) == int(step.tree.tokens[image, node])


def test_relaxations_read_each_images_own_tree() -> None:
    for delta, is_exact in ((0.0, True), (0.5, False)):
        relaxed = METHODS["bounded"].with_options(k=10, delta=delta).made
        run = tiny_decoder(made_of("eagle2", recording(), relaxed.verifier)).generate(CONDITION, keys=KEYS)
        assert torch.equal(run.tokens, made("eagle2")[0].tokens) == is_exact
        assert (run.total_variation > 0).any() != is_exact
