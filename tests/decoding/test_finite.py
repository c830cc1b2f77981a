"""Detection of logits that are not finite, if tokens were sampled from them."""

from typing import Any

import pytest
import torch

from lantern.core.types import Step
from lantern.decoding.statistics import totals
from lantern.methods import METHODS
from tests.tiny import tiny_target
from tests.tiny_decoder import CONDITION, KEYS, tiny_decoder

WINDOWS = [name for name, method in METHODS.items() if "CouplingVerifier(" in str(method.made.verifier)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("other", [0.0, torch.inf])
def test_one_nonfinite_logit_in_either_row_is_detected(value: float, row: int, other: float) -> None:
    """Also beside an infinity in the other guidance row, whose sign may be the opposite."""
    logits = torch.randn(2, 2, 4, 7, generator=torch.Generator().manual_seed(0))
    assert totals(logits).isfinite().all()
    logits[1, row, 2, 3], logits[1, 1 - row, 2, 3] = value, other
    assert totals(logits).isfinite().tolist() == [True, False]
    others = torch.tensor([True, True, False, True]).expand(2, 4)
    assert totals(logits, others).isfinite().all() and totals(logits, ~others).isfinite().tolist() == [True, False]


class Spoilt:
    """Makes the logits after node `node` of the first image NaN in pass `at`."""

    def __init__(self, target: Any, node: int, at: int) -> None:
        self.node, self.at, self.passes = node, at, 0
        self.forward, target.forward = target.forward, self.score

    def score(self, *args: Any, **named: Any) -> Any:
        scores = self.forward(*args, **named)
        self.passes += 1
        if self.passes == self.at:
            scores.logits.unflatten(0, (3, -1))[0, :, self.node] = torch.nan
        return scores


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("node", [0, 1, 3])
def test_only_visited_nodes_count(node: int, at: int) -> None:
    target = tiny_target()
    parts = tiny_decoder("eagle1", target, tree="chain_3")
    expected = parts.generate(CONDITION, keys=KEYS).tokens
    Spoilt(target, node, at)
    steps = list[Step]()
    made = parts.generate(CONDITION, keys=KEYS, callback=steps.append)
    is_used = int(steps[at].counts[0]) > node
    assert made.is_finite.tolist() == [not is_used, True, True]
    assert torch.equal(made.tokens[1:], expected[1:]) and (is_used or torch.equal(made.tokens, expected))


@pytest.mark.parametrize("name", WINDOWS)
def test_window_checks_the_logits_of_its_drafts(name: str) -> None:
    target = tiny_target()
    parts = tiny_decoder(name, target)
    Spoilt(target, parts.drafter.max_nodes - 1, 1)
    assert parts.generate(CONDITION, keys=KEYS).is_finite.tolist() == [False, True, True]
