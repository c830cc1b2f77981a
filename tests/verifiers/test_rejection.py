"""Edge cases of multi-round rejection; tests/proof compares its distribution with the target's."""

from dataclasses import replace

import pytest
import torch

from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.cool import Cool
from tests.verifiers.toys import expected, outcome, toy


def test_codes_of_zero_probability_are_never_accepted() -> None:
    distributions = toy()
    distributions = replace(distributions, q_next=torch.eye(5)[[1, 0, 0, 0, 0]] * 0.9 + 0.02)
    assert distributions.p_next[0, 1] == 0
    assert outcome(distributions, RejectionVerifier(), "sampled")[0, 1] == 0


def test_rejection_at_temperature_zero_gives_the_argmax() -> None:
    distributions = toy()
    hot = torch.nn.functional.one_hot
    greedy = replace(
        distributions,
        p=hot(distributions.p.argmax(), 5).float(),
        p_next=hot(distributions.p_next.argmax(-1), 5).float(),
    )
    for mode in ("point", "sampled"):
        assert torch.equal(outcome(greedy, RejectionVerifier(), mode, runs=2000), expected(greedy))


def test_distribution_relaxations_raise() -> None:
    with pytest.raises(Exception, match="use RelaxedVerifier|Expected type"):
        RejectionVerifier(Cool())  # type: ignore[arg-type]
