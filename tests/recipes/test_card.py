"""The card's loss is that of decoding token by token."""

from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.decoding.plain import generate
from recipes.emoji import card
from recipes.emoji.card import copies, nats
from tests.tiny import tiny_condition, tiny_target


def test_the_loss_of_more_probable_tokens_is_smaller() -> None:
    target, condition = tiny_target(), tiny_condition((4, 2))
    made = generate(target, condition, sampling=Sampling(temperature=0.0), keys=[(0, 0), (0, 1)])
    (greedy, without), (other, _) = (
        nats(target, condition, tokens).unbind(1) for tokens in (made.tokens, (made.tokens + 1) % 24)
    )
    assert greedy.mean() < other.mean()
    assert without.shape == (2, 16) and not torch.equal(without, greedy)


def test_a_copy_is_nearer_than_one_and_a_half_times_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "encode", lambda vq, pictures, batch: pictures)
    monkeypatch.setattr(card, "decode", lambda vq, tokens, batch: tokens + 2)  # an error of 2 in every byte
    training = torch.randint(100, 200, (3, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    near, far = training[:2] + 2, training[2:] + 4
    vq: Any = None
    assert copies(vq, torch.cat([near, far]), training) == pytest.approx(2 / 3)
