"""Detection of logits that are not finite, if codes were sampled from them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.types import Step
from lantern.decoding.loop import FiniteSoFar
from lantern.methods import METHODS
from tests.tiny import tiny_target
from tests.tiny_decoder import CONDITION, KEYS, tiny_decoder

WINDOWS = [name for name, method in METHODS.items() if method.made.calls("CouplingVerifier")]


def distributions(value: float, *places: tuple[int, int, int]) -> Tensor:
    logits = torch.randn(2, 2, 4, 7, generator=torch.Generator().manual_seed(0))
    for image, row, node in places:
        logits[image, row, node, 3] = value
    return logits


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("row", [0, 1])
def test_one_nonfinite_logit_in_either_row_is_detected(value: float, row: int) -> None:
    finite = FiniteSoFar(2, torch.device("cpu"))
    finite.look(distributions(0.0))
    assert finite.flags.tolist() == [True, True]
    finite.look(distributions(value, (1, row, 2)))
    finite.look(distributions(0.0))
    assert finite.flags.tolist() == [True, False]


def test_infinities_of_opposite_sign_are_detected() -> None:
    logits = distributions(torch.inf, (0, 0, 1))
    logits[0, 1, 1, 3] = -torch.inf
    finite = FiniteSoFar(2, torch.device("cpu"))
    finite.look(logits)
    assert finite.flags.tolist() == [False, True]


def test_logits_without_sampled_code_are_ignored() -> None:
    finite = FiniteSoFar(2, torch.device("cpu"))
    nodes, unused = torch.tensor([[0, 2], [0, 3]]), torch.tensor([[False, True], [False, False]])
    finite.look(distributions(torch.nan, (0, 0, 1), (0, 0, 2), (1, 0, 1), (1, 0, 2)), nodes=nodes, unused=unused)
    assert finite.flags.tolist() == [True, True]
    finite.look(distributions(torch.nan, (0, 0, 3), (1, 0, 3)), nodes=nodes, unused=unused)
    assert finite.flags.tolist() == [True, False]


class Spoilt:
    """Makes the logits after node `node` of the first image NaN in pass `at`, and reports the accepted path."""

    def __init__(self, target: Any, node: int, at: int) -> None:
        self.target, self.node, self.at, self.passes, self.counts = target, node, at, 0, list[int]()
        self.forward, target.forward = target.forward, self.score

    def score(self, *args: Any, **named: Any) -> Any:
        scores = self.forward(*args, **named)
        self.passes += 1
        if self.passes == self.at:
            scores.logits.unflatten(0, (3, -1))[0, :, self.node] = torch.nan
        return scores

    def watch(self, step: Step) -> None:
        self.counts.append(int(step.counts[0]))


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("node", [0, 1, 3])
def test_only_visited_nodes_count(node: int, at: int) -> None:
    target = tiny_target()
    parts = tiny_decoder("eagle1", target, tree="chain_3")
    expected = parts.generate(CONDITION, keys=KEYS).codes
    spoilt = Spoilt(target, node, at)
    made = parts.generate(CONDITION, keys=KEYS, callback=spoilt.watch)
    assert made.is_finite is not None
    is_used = spoilt.counts[at] > node
    assert made.is_finite.tolist() == [not is_used, True, True]
    assert torch.equal(made.codes[1:], expected[1:]) and (is_used or torch.equal(made.codes, expected))


@pytest.mark.parametrize("name", WINDOWS)
def test_window_checks_the_logits_of_its_drafts(name: str) -> None:
    target = tiny_target()
    parts = tiny_decoder(name, target)
    assert parts.drafter is not None
    Spoilt(target, parts.drafter.max_nodes - 1, 1)
    is_finite = parts.generate(CONDITION, keys=KEYS).is_finite
    assert is_finite is not None and is_finite.tolist() == [False, True, True]
