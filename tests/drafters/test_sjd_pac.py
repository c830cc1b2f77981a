"""SJD-PAC: a tree at the front of the window, and images equal to plain decoding."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.drafters.windows.sjd_pac import fronted
from tests.drafters.sampled_trees import stepped
from tests.tiny_decoder import KEYS, SAMPLING, plain_tokens, tiny_decoder


def decode(sampling: Sampling = SAMPLING, images: list[int] | None = None, **settings: Any) -> tuple[Any, list[Any]]:
    return stepped(tiny_decoder("sjd-pac", sampling=sampling, **settings), images)


def test_front_is_a_tree_before_a_chain() -> None:
    assert fronted(5, 2, 2).spelling == "0 1 0.0 0.1 1.0 1.1 0.0.0 0.0.0.0"
    assert fronted(4, 1, 3).spelling == "0 0.0 0.0.0"
    assert fronted(2, 3, 5).spelling == "0 1 2"


@pytest.mark.parametrize("front", [(1, 1), (3, 1), (3, 2), (2, 3), (4, 9)])
@pytest.mark.parametrize("window", [2, 5, 16])
def test_pictures_equal_plain_decoding(front: tuple[int, int], window: int) -> None:
    if window == 16 and front == (4, 9):
        return  # more nodes than tokens of a picture
    for sampling in (SAMPLING, Sampling(guidance=2, top_k=5, temperature=0.7), Sampling(temperature=0)):
        made, _ = decode(sampling, window=window, width=front[0], levels=front[1])
        assert torch.equal(made.tokens, plain_tokens(sampling=sampling))


@pytest.mark.parametrize("window", [2, 6, 16])
def test_front_of_width_one_is_a_plain_window(window: int) -> None:
    mine, _ = decode(window=window, width=1)
    plain, _ = stepped(tiny_decoder("gumbel-jacobi", window=window))
    assert torch.equal(mine.steps, plain.steps)


def test_a_front_takes_fewer_passes() -> None:
    narrow, wide = (int(decode(window=8, width=width)[0].steps.sum()) for width in (1, 6))
    assert wide < narrow


def test_siblings_are_the_next_best_tokens_of_the_stale_distribution() -> None:
    _, steps = decode(images=[0], window=6, width=3, levels=1)
    for before, step in pairwise(steps):
        row, place = int(before.counts[0]), int(step.start[0])
        if row > 5 or place > 15:
            continue
        choices = ((), *fronted(6, 3, 1).choices)
        chain = [i for i, choice in enumerate(choices) if not any(choice)]
        logits = before.scores.logits[:, :, chain[row] : chain[row] + 1]
        where = torch.tensor([[place]])
        noise = Noise([KEYS[0]], positions=16, vocab_size=24).gumbel(where)
        best = (SAMPLING.log_probs(logits, where) + noise).topk(3).indices[0, 0].tolist()
        assert step.tree.tokens[0, 1:4].tolist() == best
