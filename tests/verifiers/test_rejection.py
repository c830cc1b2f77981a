"""Multi-round rejection at the edges; tests/proof holds its law to the target's."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lantern.verifiers.rejection import RejectionVerifier
from tests.verifiers.toys import expected, outcome, toy


def test_a_code_that_the_target_cannot_draw_is_never_accepted() -> None:
    laws = toy()
    laws = replace(laws, q_next=torch.eye(5)[[1, 0, 0, 0, 0]] * 0.9 + 0.02)
    assert laws.p_next[0, 1] == 0
    assert outcome(laws, RejectionVerifier(), "sampled")[0, 1] == 0


def test_the_law_at_temperature_zero_is_the_argmax() -> None:
    laws = toy()
    hot = torch.nn.functional.one_hot
    greedy = replace(laws, p=hot(laws.p.argmax(), 5).float(), p_next=hot(laws.p_next.argmax(-1), 5).float())
    for mode in ("point", "sampled"):
        assert torch.equal(outcome(greedy, RejectionVerifier(), mode, runs=2000), expected(greedy))


def test_a_law_relaxation_is_refused() -> None:
    class Law:
        def relax(self, log_p: Tensor, log_q: Tensor) -> Tensor:
            return log_q

    with pytest.raises(Exception, match="use RelaxedVerifier|Expected type"):
        RejectionVerifier(Law())  # type: ignore[arg-type]
