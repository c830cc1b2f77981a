"""Plain decoding with a cache of few rows, against masked passes over the whole image and enumerated images."""

from typing import Any

import pytest
import torch

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import Generation
from lantern.decoding import loop, plain, row_cache
from lantern.decoding.cache import PromptCache
from tests.decoding.test_row_front import masked
from tests.proof.pictures import teacher_forced
from tests.tiny_decoder import CONDITION, KEYS, SAMPLING, TARGET


def decode(first: int, last: int, sampling: Sampling = SAMPLING, **how: Any) -> Generation:
    given = {"sampling": sampling, "keys": KEYS, "first_rows": first, "last_rows": last}
    return row_cache.generate(TARGET, CONDITION, **given, **how)


@pytest.mark.parametrize(("first", "last"), [(0, 4), (1, 3), (3, 1), (9, 1)])
@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(guidance=3, temperature=0)])
def test_with_all_rows_codes_are_those_of_plain_decoding(first: int, last: int, sampling: Sampling) -> None:
    made = decode(first, last, sampling)
    assert torch.equal(made.codes, plain.generate(TARGET, CONDITION, sampling=sampling, keys=KEYS).codes)
    assert made.total_variation_max is not None and made.total_variation_max.max() < 1e-5


@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 1), (0, 2), (1, 2)])
@torch.no_grad()
def test_codes_are_the_targets_samples_given_the_rows_that_are_kept(first: int, last: int) -> None:
    """One pass over the finished image, whose mask shows every code the codes in the cache, and itself."""
    made, columns = decode(first, last), 4
    numbers = torch.arange(16)
    age = numbers[:, None] - numbers
    kept = (numbers < first * columns) | (age < last * columns)
    log_p = masked(made.codes, (age >= 0) & kept)
    noise = Noise(KEYS, positions=16, vocab_size=24, device=torch.device("cpu"))
    plainly = teacher_forced(TARGET, CONDITION, made.codes, SAMPLING)
    spent = torch.zeros(3)
    for place in range(1, 16):
        at = torch.full((3, 1), place)
        assert torch.equal(made.codes[:, place], (log_p[:, place - 1] + noise.gumbel(at)[:, 0]).argmax(-1)), place
        spent += (log_p[:, place - 1].exp() - plainly[:, place].exp()).abs().sum(-1) / 2
    assert (spent > 0.02).all() and torch.allclose(made.total_variation, spent, atol=1e-4)
    assert (made.passes == 16).all()


def test_the_cache_holds_the_rows_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, begin = [], loop.start

    def recorded(*given: Any, **named: Any) -> Any:
        begun = begin(*given, **named)
        sizes.append(begun.cache.codes)
        return begun

    monkeypatch.setattr(loop, "start", recorded)
    decode(1, 2, measured=False)
    decode(1, 2)
    assert sizes == [12, 12]


def test_without_pricing_the_cost_is_not_a_number_and_codes_are_the_same() -> None:
    made, whole = decode(1, 1, measured=False), decode(1, 1, prompts=PromptCache())
    assert torch.equal(made.codes, whole.codes) and made.total_variation.isnan().all()


def test_forced_codes_stay_and_cost_nothing() -> None:
    forced = torch.full((3, 16), -1)
    forced[:, :8] = 5
    made = decode(0, 1, forced=forced)
    assert (made.codes[:, :8] == 5).all() and (made.codes[:, 8:] != 5).any()
    assert (made.total_variation <= 8).all() and (made.total_variation > 0).all()


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="first_rows 1, last_rows 0: wanted at least 0 and 1"):
        decode(1, 0)
