"""Tree policies by hand, on layers of arbitrary numbers as the dynamic drafter passes them; the map of acceptance."""

import dataclasses
from typing import Any

import pytest
import torch

from lantern.core.types import DraftTree, Step, Verdict
from lantern.decoding.loop import NO_SCORES
from lantern.drafters import policies
from lantern.drafters.trees import chain

IMAGES, NODES, WIDTH = 2, 3, 4


def layer(depth: int = 1, **changes: Any) -> policies.Layer:
    """A layer of two images, three nodes each and four candidates below each."""
    generator = torch.Generator().manual_seed(0)

    def logs(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).log_softmax(-1)

    fields: dict[str, Any] = {"depth": depth, "side": 4, "places": torch.tensor([5, 9]), "width": WIDTH}
    fields |= {name: logs(IMAGES, NODES) for name in ("reach", "joint")}
    fields |= {name: torch.rand(IMAGES, NODES, generator=generator) for name in ("entropy", "collision", "near")}
    fields |= {name: logs(IMAGES, NODES, WIDTH) for name in ("log_q", "match")}
    made: Any = policies.Layer(**dict.fromkeys(field.name for field in dataclasses.fields(policies.Layer)))  # type: ignore[arg-type]
    vars(made).update(fields | changes)
    return made


def wanted(policy: policies.Policy, values: list[list[float]], depths: list[int]) -> list[list[int]]:
    """Return the nodes and depth that a policy prefers for candidates of these probabilities, to depth 2."""
    pool = policies.Pool(torch.tensor(values).log(), torch.tensor(depths), 2)
    return [size.tolist() for size in policy.preferred_size(pool)]


def stopped(policy: policies.Policy, given: policies.Layer) -> list[list[bool]]:
    """Return below which nodes a policy drafts nothing; elsewhere it gives the probabilities to match."""
    chances = policy.chances(given)
    is_over = (chances == -torch.inf).all(-1)
    assert torch.equal(chances[~is_over], given.match[~is_over])
    return is_over.tolist()


def test_open_paths_rank_above_stopped_ones_and_children_below_parents() -> None:
    assert policies.MAX_DEPTH * policies.MIN_LOG > policies.STOPPED_BELOW > policies.STOPPED
    deep = torch.tensor(policies.MAX_DEPTH * policies.STOPPED)
    assert deep + policies.MAX_LOG < deep


def test_match_probability_matches_simulated_targets() -> None:
    """The target's sample is the arg-max of scores + noise, as `match_chances` assumes, over 200,000 targets."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, generator=generator)
    noise = -torch.rand(200_000, 6, generator=generator).log().neg().log()
    sampled = torch.bincount((scores + 0.7 * noise).argmax(1), minlength=6) / 200_000
    assert (sampled - policies.match_chances(scores, 0.7).exp()).abs().max() < 0.005


def test_traits_have_the_order_of_their_names() -> None:
    given: Any = layer(2)
    of = {name: policies.traits_of(given)[..., i] for i, name in enumerate(policies.TRAITS)}
    assert torch.equal(of["match"], given.match) and torch.equal(of["log_q"], given.log_q)
    assert torch.equal(of["joint"], given.joint[..., None] + given.match)
    assert (of["depth"] == 3).all() and of["rank"][0, 0].tolist() == [0, 1, 2, 3]
    assert of["row"][:, 0, 0].tolist() == [0.25, 0.5] and of["column"][:, 0, 0].tolist() == [0.25, 0.25]
    assert torch.equal(of["up_right"][:, 2, 1], given.near[:, 2])


def test_eagle2_takes_q_or_the_probability_to_match() -> None:
    given = layer()
    assert policies.Eagle2("q").chances(given) is given.log_q and policies.Eagle2("match").chances(given) is given.match
    assert wanted(policies.Eagle2(), [[0.5, 0.2, 0.1, 0.0]], [1, 1, 2, 2]) == [[3], [3]]


def test_the_predictable_form_reads_the_parents_distribution_alone() -> None:
    policy = policies.PredictableEagle2()
    policy.begin(IMAGES, torch.device("cpu"))
    peaked, flat = (policy.chances(layer(log_q=None, match=None, collision=torch.full((2, 3), c))) for c in (1.0, 0.0))
    assert torch.equal(peaked[..., 0], torch.zeros(2, 3)) and (peaked[..., 1:] == -torch.inf).all()
    assert torch.allclose(flat[0, 0].exp(), torch.tensor([0.424, 0.115, 0.065, 0.055]))


def test_ddd_stops_below_beams_of_low_probability_from_its_check_on() -> None:
    reach = torch.tensor([[0.3, 0.2, 0.1], [0.05, 0.04, 0.01]]).log()  # probabilities .6 and .1
    assert stopped(policies.Ddd(alive=0.2), layer(reach=reach)) == [[False] * 3, [True] * 3]
    late, low = policies.Ddd(alive=0.5, check=2), torch.full((2, 3), -9.0)
    assert [stopped(late, layer(d, reach=low))[0][0] for d in (0, 1, 2)] == [False, False, True]
    values = [[0.9, 0.8, 0.0], [0.9, 0.1, 0.05]]  # one more depth only where the last beam continues
    assert wanted(policies.Ddd(alive=0.3), values, [1, 2, 2])[1] == [3, 2]


def test_svip_stops_below_uncertain_nodes_other_than_the_root() -> None:
    entropy = torch.tensor([[0.1, 2.0, 6.0], [5.0, 0.0, 1.0]])  # sqrt(.15 H): .12 .55 .95 | .87 0 .39
    policy = policies.Svip(threshold=0.6)
    assert stopped(policy, layer(0, entropy=entropy)) == [[False] * 3] * 2
    assert stopped(policy, layer(1, entropy=entropy)) == [[False, False, True], [True, False, False]]


def test_c2t_reads_its_traits_and_counts_nodes_above_the_threshold() -> None:
    module, given = policies.C2T(policies.C2TConfig(traits=("joint", "entropy", "depth"))), layer()
    module.init_weights(torch.Generator().manual_seed(0))
    traits = policies.traits_of(given)
    assert torch.allclose(policies.C2TPolicy(module).chances(given).exp(), torch.sigmoid(module(traits)))
    for name in policies.TRAITS:
        changed = traits.clone()
        changed[..., policies.TRAITS.index(name)] += 3.0
        assert torch.equal(module(changed), module(traits)) == (name not in module.config.traits)
    assert wanted(policies.C2TPolicy(module, threshold=0.1), [[0.5, 0.2, 0.02]], [1, 1, 2]) == [[2], [1]]


def test_radar_stops_until_the_next_step_and_reads_earlier_depths() -> None:
    policy = policies.RadarPolicy(policies.Radar(policies.RadarConfig(beam=4, hidden=8)))
    policy.part.init_weights(torch.Generator().manual_seed(0))
    policy.part.second.weight.data.zero_()
    policy.part.second.bias.data.fill_(-5.0)
    none, every = [[False] * 3] * 2, [[True] * 3] * 2
    assert stopped(policy, layer(0)) == none and stopped(policy, layer(1)) == every  # the first depth is always drafted
    policy.part.second.bias.data.fill_(5.0)
    assert stopped(policy, layer(2)) == every and stopped(policy, layer(0)) == stopped(policy, layer(1)) == none
    policy.part.init_weights(torch.Generator().manual_seed(0))
    beam, side = torch.full((1, 4), -1.0), torch.zeros(1, 4)
    first, memory = policy.part(beam, side)
    assert not torch.equal(policy.part(beam, side, memory)[0], first)
    assert policies.padded_beam(torch.tensor([[-3.0, -1.0]]), 3).tolist() == [[-1.0, -3.0, policies.MIN_LOG]]


@pytest.mark.parametrize(("near", "depth", "width"), [(0.1, 1, 12), (0.32, 2, 6), (0.56, 4, 3), (0.8, 10, 2)])
def test_adt_trees_are_deep_where_drafts_were_accepted_and_wide_elsewhere(near: float, depth: int, width: int) -> None:
    policy, children = policies.AdtTree(end=0.1, nodes=12), list[int]()
    for d in range(12):
        given = layer(d, near=torch.full((2, 3), near), width=12, match=torch.zeros(2, 3, 12))
        children.append(int((policy.chances(given) > -torch.inf)[0, 0].sum()))
    assert children == [width] * depth + [0] * (12 - depth)


SIDE, TOKENS = 4, 16
EMPTY = torch.full((1, TOKENS + 1), policies.PRIOR)


def chain_step(length: int, counts: int | None = None) -> Step:
    """A chain of two drafted tokens in one image, of which `length` were accepted."""
    tree = DraftTree(torch.zeros(1, 3, dtype=torch.long), chain(2).shape(), "gumbel")
    path = torch.tensor([[1, 2]]) * (torch.arange(2) < length)
    kept = torch.tensor([length + 1 if counts is None else counts])
    verdict = Verdict(path, torch.tensor([length]), torch.zeros(1, dtype=torch.long))
    return Step(1, torch.tensor([3]), kept, torch.zeros(1, 3, dtype=torch.long), NO_SCORES, tree, verdict)


def test_neighbours_are_the_left_upper_and_upper_right_tokens() -> None:
    seen = torch.arange(TOKENS + 1.0)[None]
    seen[0, TOKENS] = -1.0
    known = torch.tensor([16])

    def of(place: int, known: torch.Tensor = known) -> list[float]:
        return policies.neighbours(seen, torch.tensor([[place]]), known, SIDE)[0, 0].tolist()

    assert of(6) == [5, 2, 3]
    assert of(0) == [-1, -1, -1] and of(2) == [1, -1, -1]
    assert of(4) == [-1, 0, 1] and of(7) == [6, 3, -1]
    assert of(10, torch.tensor([9])) == [8, 6, 7]  # tokens from 9 on are unknown: the last known one is used


def test_a_step_updates_only_tested_tokens() -> None:
    after = policies.updated_map(EMPTY, chain_step(1), SIDE)  # tokens 3 and 4: accepted, then rejected
    assert after[0, 3] == 0.75 and after[0, 4] < 0.5
    assert (after[0, [i for i in range(TOKENS + 1) if i not in (3, 4)]] == policies.PRIOR).all()
    after = policies.updated_map(EMPTY, chain_step(2), SIDE)  # a bonus token behind a leaf is not tested
    assert after[0, 3] == 0.75 and after[0, 4] > 0.5 and after[0, 5] == policies.PRIOR
    assert torch.equal(policies.updated_map(EMPTY, chain_step(0, counts=0), SIDE), EMPTY)  # a finished image
