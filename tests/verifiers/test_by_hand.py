"""Gumbel match and the coupling of windows by hand; tests/proof compares their tokens with plain decoding's."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Noise, Sampling
from lantern.core.types import DraftTree, Step, Verdict
from lantern.decoding.loop import LogitRows
from lantern.drafters.trees import chain, named
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.gumbel import deepest_path
from lantern.verifiers.relaxations.acceptance import Grouped
from lantern.verifiers.relaxations.rule import UnderTest
from tests.proof.worlds import GivenRows
from tests.refusals import refused
from tests.tiny_decoder import BLIND, CONDITION, KEYS, tiny_decoder


def test_the_deepest_path_is_found() -> None:
    shape = named("0 1 2 0.0 0.1 1.0 2.0 2.1").shape()  # 1 2 3 below the root, 4 5 below 1, 6 below 2, 7 8 below 3
    matches = torch.tensor(
        [
            [1, 0, 0, 0, 1, 1, 1, 1, 1],  # nothing below the root matches: deeper matches do not count
            [1, 0, 1, 0, 0, 0, 0, 0, 0],
            [1, 0, 0, 1, 1, 0, 0, 0, 1],
            [1, 1, 0, 1, 0, 0, 0, 1, 0],
        ]
    ).bool()
    path = deepest_path(matches, shape)
    assert path.length.tolist() == [0, 1, 2, 2]
    assert path.last.tolist() == [0, 2, 8, 7]
    assert path.nodes.tolist() == [[0, 0], [2, 0], [3, 8], [3, 7]]


@pytest.mark.parametrize("name", ["eagle1", "eagle1-rejection", "lantern", "tolerance", "bounded", "eagle2-rejection"])
def test_as_many_rows_are_read_as_tokens_are_sampled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, at = list[int](), LogitRows._at
    monkeypatch.setattr(LogitRows, "_at", lambda self, nodes: read.append(nodes.numel()) or at(self, nodes))
    sampling = Sampling(guidance=2.0, temperature=0.9, top_k=20, top_p=0.98)
    steps = list[Step]()
    how: dict[str, Any] = {"keys": KEYS[:1], "callback": steps.append}
    tiny_decoder(name, sampling=sampling).generate(CONDITION.select([0]), **how)
    lengths = [int(step.verdict.length) for step in steps if step.verdict is not None]
    assert read == [1] * (1 + sum(lengths) + len(lengths)) and max(lengths) > 0
    read.clear()
    tiny_decoder(name, sampling=sampling, engine=BLIND).generate(CONDITION.select([0]), **how)
    assert read == []


TOKENS, GRID = 5, 200


class Gridded(Noise):
    """Uniforms of a window's tests and samples on a grid of midpoints, shuffled differently at each place.

    Each pair of values comes once over GRID^2 images, so that frequencies are exact to 1 / GRID.
    """

    def __init__(self) -> None:
        values = (torch.arange(GRID) + 0.5).double() / GRID
        self.pairs = torch.cartesian_prod(values, values)
        self.iterations: Tensor | None = None

    def gumbel(self, positions: Tensor, purpose: int = 1) -> Tensor:
        raise AssertionError("coupling draws with uniforms")

    def uniform(self, positions: Tensor, lanes: int, *, purpose: int = 3, iterations: Tensor | None = None) -> Tensor:
        self.iterations = iterations
        generator = torch.Generator().manual_seed(0)
        places = [self.pairs[torch.randperm(len(self.pairs), generator=generator)] for _ in positions[0]]
        return torch.stack(places, 1)


def distributions(nodes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(nodes, TOKENS, generator=generator) * 1.5).softmax(-1)


def walk(
    p: Tensor, q: Tensor, tokens: list[int], redraw: str = "coupled", rule: Grouped | None = None
) -> tuple[Verdict, Noise]:
    """Walk GRID^2 images with the same window, whose root is token 0 and whose first token has number 7."""
    noise, runs = Gridded(), GRID * GRID
    shape = chain(len(tokens)).shape()
    nodes = torch.tensor([0, *tokens]).expand(runs, -1)
    tree = DraftTree(nodes, shape, "jacobi", q.log().expand(runs, -1, -1))
    positions = (7 + shape.depths).expand(runs, -1)
    verifier: Any = CouplingVerifier(redraw, rule)  # type: ignore[arg-type]
    return verifier.verify(tree, GivenRows(p.log().expand(runs, -1, -1), positions, noise), noise), noise


def distribution_of(tokens: Tensor) -> Tensor:
    return torch.bincount(tokens, minlength=TOKENS) / len(tokens)


def test_samples_follow_p_and_change_with_least_probability() -> None:
    p, q = distributions(3, 0), distributions(3, 1)
    marginal, stays = torch.zeros(2, TOKENS), torch.zeros(2)
    for token in range(TOKENS):
        verdict, _ = walk(p, q, [token, token])
        for place in range(2):
            marginal[place] += q[place, token] * distribution_of(verdict.samples[:, place])
            stays[place] += q[place, token] * (verdict.samples[:, place] == token).float().mean()
    assert (marginal - p[:2]).abs().max() < 2 / GRID
    assert (stays - torch.minimum(p, q)[:2].sum(1)).abs().max() < 2 / GRID


def test_coupling_keeps_tokens_behind_a_change_and_independent_redraws_do_not() -> None:
    p = distributions(3, 0)
    p[0] = torch.tensor([0.0, 0.4, 0.6, 0.0, 0.0])
    q = torch.stack([torch.eye(TOKENS)[3], p[1], p[2]])
    coupled, _ = walk(p, q, [3, 1])
    assert (coupled.length == 0).all() and (coupled.path == 0).all()
    assert (distribution_of(coupled.next_token) - p[0]).abs().max() < 2 / GRID
    assert (coupled.samples[:, 1] == 1).all()
    independent, _ = walk(p, q, [3, 1], "independent")
    assert torch.equal(independent.next_token, coupled.next_token)
    assert (distribution_of(independent.samples[:, 1]) - p[1]).abs().max() < 2 / GRID


def test_windows_without_log_q_and_relaxed_coupled_ones_raise() -> None:
    shape = chain(1).shape()
    tree = DraftTree(torch.zeros(1, 2, dtype=torch.long), shape, "jacobi")
    log_p = distributions(2, 0).log()[None]
    for odd in (tree, replace(tree, mode="point")):
        rows = GivenRows(log_p, shape.depths[None], Gridded())
        refused(CouplingVerifier().verify, odd, rows, Gridded(), match="has no log q")
    refused(CouplingVerifier, "coupled", groups(2), match='Grouped cannot test windows with redraw "coupled"')


def groups(size: int) -> Grouped:
    vectors = torch.randn(TOKENS, 3, generator=torch.Generator().manual_seed(5))
    return Grouped(vectors, group=size, p_radius=1.0, d_radius=2.5)


def test_a_relaxed_window_follows_its_rule_and_reports_no_less_than_it_moves() -> None:
    p, q, rule = distributions(3, 3), distributions(3, 4), groups(4)
    output, reported = torch.zeros(TOKENS), 0.0
    for token in range(TOKENS):
        verdict, _ = walk(p, q, [token, 1], "independent", rule)
        ruling = rule.judge(UnderTest(p[:1], q[:1], torch.tensor([token]), is_point=False))
        chance = float((ruling.mass[0] / q[0, token]).clamp(max=1))
        assert float((verdict.length > 0).float().mean()) == pytest.approx(chance, abs=2 / GRID)
        expected = (1 - chance) * ruling.left[0] / ruling.left[0].sum()
        expected[token] += chance
        first = distribution_of(verdict.samples[:, 0])
        assert torch.allclose(first, expected, atol=3 / GRID)
        output += q[0, token] * first
        reported += float(q[0, token] * verdict.cost.total_variation[:, 0].mean())
    moved = float((output - p[0]).abs().sum() / 2)
    assert 0.02 < moved <= reported + 3 / GRID
