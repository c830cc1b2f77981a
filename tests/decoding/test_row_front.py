"""Rows decoded in parallel (ZipAR, PJD), against masked passes over the whole image and enumerated images."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Noise, Sampling
from lantern.core.types import Generation
from lantern.decoding import plain
from lantern.decoding.loop import begin, run
from lantern.decoding.row_front import RowFront
from tests.proof.pictures import teacher_forced
from tests.tiny import uncached
from tests.tiny_decoder import CONDITION, KEYS, SAMPLING, TARGET


def decode(
    lead: int, drafts: int = 0, sampling: Sampling = SAMPLING, *, measured: bool = True, **how: Any
) -> Generation:
    state = RowFront(TARGET, sampling, lead=lead, drafts=drafts, measured=measured)
    return run(begin(state, CONDITION, keys=KEYS, **how))


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(guidance=1, top_k=6), Sampling(guidance=3, temperature=0)])
def test_with_a_window_of_a_whole_row_tokens_are_those_of_plain_decoding(drafts: int, sampling: Sampling) -> None:
    made = decode(4, drafts, sampling)
    expected = plain.generate(TARGET, CONDITION, sampling=sampling, keys=KEYS)
    assert torch.equal(made.tokens, expected.tokens)
    assert made.total_variation_max.max() < 1e-5
    assert (made.steps == 16).all() if drafts == 0 else (made.steps < 16).any()


@pytest.mark.parametrize("lead", [1, 2, 3])
@torch.no_grad()
def test_tokens_are_the_targets_samples_given_the_tokens_that_existed(lead: int) -> None:
    """One pass over the finished image, whose mask shows every token what it saw when it was decoded.

    Rows add a token per pass once the row above is ahead.
    """
    made, side = decode(lead), 4
    assert (made.steps == 3 * lead + 4).all()
    numbers = torch.arange(16)
    row, column = numbers // side, numbers % side
    fed = row * lead + column  # the pass in which a token is an input
    seen = (numbers <= numbers[:, None]) & (fed <= fed[:, None])
    noise = Noise(KEYS, positions=16, vocab_size=24, device=torch.device("cpu"))
    plainly = teacher_forced(TARGET, CONDITION, made.tokens, SAMPLING)
    spent = torch.zeros(3)
    for place in range(1, 16):
        first = place % side == 0
        # The first token of a row follows a copy of the last token of the row above that existed.
        head = place - side + lead - 1 if first else place - 1
        mask, inputs = seen.clone(), made.tokens.clone()
        if first:
            mask[place - 1] = (numbers < place - 1) & (fed <= row[place] * lead - 1)
            mask[place - 1, place - 1] = True
            inputs[:, place - 1] = made.tokens[:, head]
        log_p = masked(inputs, mask)[:, place - 1]
        at = torch.full((3, 1), place)
        assert torch.equal(made.tokens[:, place], (log_p + noise.gumbel(at)[:, 0]).argmax(-1)), place
        spent += (log_p.exp() - plainly[:, place].exp()).abs().sum(-1) / 2
    assert torch.allclose(made.total_variation, spent, atol=1e-4) and (spent > 0).all() and made.accepted.numel() == 0


def masked(tokens: Tensor, seen: Tensor) -> Tensor:
    """Return log p of what follows each token under a mask between tokens, without a cache."""
    logits = uncached(TARGET, CONDITION, tokens, seen=seen)[:, :, -16:]
    return SAMPLING.log_probs(logits, torch.arange(1, 17).clamp(max=15).expand(3, -1))


@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_of_rows_save_passes_and_are_counted(drafts: int) -> None:
    made = decode(2, drafts)
    emitted = made.tokens.shape[1] - made.accepted.sum(1)
    assert made.accepted.shape == made.reached.shape == (3, drafts)
    assert (made.accepted <= made.reached).all() and (made.steps <= emitted).all()
    greedy = decode(2, drafts, Sampling(guidance=3, temperature=0))
    assert (greedy.steps <= 10).all() and greedy.accepted.sum() > 0


def test_without_pricing_the_cost_is_not_a_number_and_tokens_are_the_same() -> None:
    made, whole = decode(2, measured=False), decode(2)
    assert torch.equal(made.tokens, whole.tokens) and made.total_variation.isnan().all()


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="lead 0, drafts 0: wanted at least 1 and 0"):
        decode(0)


@pytest.mark.parametrize(("drafts", "kept"), [(0, 5), (3, 8)])
def test_kept_tokens_are_those_that_follow_from_them_alone(drafts: int, kept: int) -> None:
    """Kept tokens end in the middle of a row, or with it; rows as long as the lead give plain decoding's tokens."""
    forced = torch.where(torch.arange(16) < kept, torch.arange(48).view(3, 16) % 24, -1)
    made = decode(4, drafts, forced=forced)
    expected = plain.generate(TARGET, CONDITION, sampling=SAMPLING, keys=KEYS, forced=forced)
    assert torch.equal(made.tokens, expected.tokens) and (made.steps <= expected.steps).all()
    assert made.total_variation.max() < 1e-4
    relaxed = decode(1, drafts, forced=forced)
    assert torch.equal(relaxed.tokens[:, :kept], forced[:, :kept]) and (relaxed.total_variation > 0).all()
