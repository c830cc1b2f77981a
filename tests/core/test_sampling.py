import math
from dataclasses import astuple, fields, replace
from itertools import product

import numpy as np
import pytest
import torch

from lantern.core.sampling import Sampling, keep_largest, pick
from lantern.methods import METHODS
from tests.refusals import refused

LOGITS = torch.tensor([2.0, 1.0, 0.0, 1.0, -1.0])


def distribution(sampling: Sampling, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    rows = logits[None, None, None].expand(1, sampling.rows, 1, -1)
    return sampling.log_probs(rows, torch.zeros(1, 1, dtype=torch.long))[0, 0].exp()


def test_guidance_combines_the_rows_and_ends_after_its_interval() -> None:
    sampling, rows = Sampling(guidance=3, guidance_interval=1), torch.randn(2, 2, 5, 4)
    guided, everywhere = (of.guide(rows, torch.arange(5).expand(2, 5)) for of in (sampling, Sampling(guidance=3)))
    assert torch.allclose(everywhere, rows[:, 1] + 3 * (rows[:, 0] - rows[:, 1]))
    assert torch.equal(guided[:, :3], everywhere[:, :3])
    assert torch.equal(guided[:, 3:], rows[:, 0, 3:])
    assert sampling.scales(torch.arange(5)).tolist() == [3, 3, 3, 1, 1]


def test_temperature_zero_takes_the_lowest_of_equal_tokens() -> None:
    assert distribution(Sampling(guidance=1, temperature=0), torch.tensor([0.0, 3.0, 3.0])).tolist() == [0, 1, 0]


def test_top_k_keeps_ties_at_the_kth() -> None:
    kept = distribution(Sampling(guidance=1, top_k=2))
    assert (kept > 0).tolist() == [True, True, False, True, False]
    assert kept.sum() == pytest.approx(1)
    assert torch.equal(distribution(Sampling(guidance=1, top_k=99)), distribution(Sampling(guidance=1)))
    assert torch.equal(keep_largest(LOGITS, 2, may_look=True), keep_largest(LOGITS, 2))


def test_top_p_keeps_the_token_that_exceeds_it_and_comes_after_top_k() -> None:
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    assert (distribution(Sampling(guidance=1, top_p=0.4), logits) > 0).tolist() == [False, True, False, False]
    assert (distribution(Sampling(guidance=1, top_p=0.6), logits) > 0).tolist() == [False, True, False, True]
    assert (distribution(Sampling(guidance=1, top_p=1e-9), logits) > 0).sum() == 1
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert (distribution(Sampling(guidance=1, top_k=2, top_p=0.55), logits) > 0).tolist() == [True, False, False, False]


OTHER = {"guidance": 2.0, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "guidance_interval": 4}


@pytest.mark.parametrize("name", [one.name for one in fields(Sampling)])
def test_every_field_is_known_to_compiled_samplers_and_captured_rounds(name: str) -> None:
    usual, other = Sampling(), replace(Sampling(), **{name: OTHER[name]})
    assert other.needs_torch == (name not in ("guidance", "temperature", "top_k", "guidance_interval"))
    assert (other.form, other.settings) != (usual.form, usual.settings)
    assert (other.untruncated() == usual) == (not name.startswith("guidance"))


def test_numbers_of_numpy_become_pythons() -> None:
    made = Sampling(np.float32(2), np.float64(0.5), np.int64(7), np.float16(0.25), np.int32(3))  # type: ignore[arg-type]
    assert made == Sampling(2.0, 0.5, 7, 0.25, 3)
    assert [type(value) for value in astuple(made)] == [float, float, int, float, int]
    assert METHODS["gumbel-jacobi"].with_options(window=np.int64(4)) == METHODS["gumbel-jacobi"].with_options(window=4)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *product(("guidance", "temperature", "top_p"), (math.nan, math.inf, -1.0, 1e30)),
        *(("temperature", 1e-9), ("top_p", 0.0), ("top_k", -1), ("guidance_interval", -2)),
        *(("guidance", 10**400), ("top_k", 10**400)),  # too large for a float
    ],
)
def test_numbers_out_of_range_are_refused_by_name(name: str, bad: float) -> None:
    refused(lambda value: Sampling(**{name: value}), bad, match=f"^{name} is")
    refused(lambda value: Sampling(**{name: value}), "3", error=Exception, match=name)


def test_pick_matches_distribution_and_skips_zero_mass() -> None:
    distribution = torch.tensor([0.0, 2.0, 0.0, 5.0, 1.0, 0.0])
    uniforms = (torch.arange(8000).double() + 0.5) / 8000
    tokens = pick(distribution.expand(8000, -1), uniforms)
    assert torch.bincount(tokens, minlength=6).tolist() == [0, 2000, 0, 5000, 1000, 0]
    ends = torch.tensor([2.0**-33, 1 - 2.0**-33], dtype=torch.float64)
    assert pick(distribution.expand(2, -1), ends).tolist() == [1, 4]
