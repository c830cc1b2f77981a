"""SJD-PAC: a tree at the front of the window, and images equal to plain decoding."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.drafters.windows.sjd_pac import fronted
from lantern.methods.registry import METHODS, build_decoder
from tests.tiny import select, tiny_condition, tiny_target

TARGET = tiny_target()
CONDITION = tiny_condition((4, 1, 6))
KEYS = [(9, 0), (9, 1), (4, 7)]


def decode(name: str, sampling: Sampling, images: list[int] | None = None, **settings: Any):  # type: ignore[no-untyped-def]
    images = [0, 1, 2] if images is None else images
    parts = build_decoder(METHODS[name].with_options(**settings), TARGET, sampling=sampling)
    steps: list[Step] = []
    made = parts.generate(select(CONDITION, images), keys=[KEYS[i] for i in images], callback=steps.append)
    return made, [step for step in steps if step.tree is not None]


def test_front_is_a_tree_before_a_chain() -> None:
    assert fronted(5, 2, 2).spelling == "0 1 0.0 0.1 1.0 1.1 0.0.0 0.0.0.0"
    assert fronted(4, 1, 3).spelling == "0 0.0 0.0.0"
    assert fronted(2, 3, 5).spelling == "0 1 2"


@pytest.mark.parametrize("front", [(1, 1), (3, 1), (3, 2), (2, 3), (4, 9)])
@pytest.mark.parametrize("window", [2, 5, 16])
def test_pictures_equal_plain_decoding(front: tuple[int, int], window: int) -> None:
    for sampling in (Sampling(guidance=3), Sampling(guidance=2, top_k=5, temperature=0.7), Sampling(temperature=0)):
        codes = build_decoder("plain", TARGET, sampling=sampling).generate(CONDITION, keys=KEYS).codes
        if window == 16 and front == (4, 9):
            continue  # more nodes than codes of a picture
        made, _ = decode("sjd-pac", sampling, window=window, width=front[0], levels=front[1])
        assert torch.equal(made.codes, codes)


@pytest.mark.parametrize("window", [2, 6, 16])
def test_front_of_width_one_is_a_plain_window(window: int) -> None:
    sampling = Sampling(guidance=3)
    mine, _ = decode("sjd-pac", sampling, window=window, width=1)
    plain, _ = decode("gumbel-jacobi", sampling, window=window)
    assert torch.equal(mine.passes, plain.passes)


def test_a_front_takes_fewer_passes() -> None:
    sampling, images = Sampling(guidance=3), [0, 1, 2]
    narrow, wide = (
        sum(int(decode("sjd-pac", sampling, images, window=8, width=width)[0].passes.sum()) for _ in range(1))
        for width in (1, 6)
    )
    assert wide < narrow


def test_siblings_are_the_next_best_codes_of_the_stale_distribution() -> None:
    sampling = Sampling(guidance=3)
    _, steps = decode("sjd-pac", sampling, images=[0], window=6, width=3, levels=1)
    for before, step in pairwise(steps):
        assert before.tree is not None and before.scores is not None and step.tree is not None
        row, place = int(before.counts[0]), int(step.start[0])
        if row > 5 or place > 15:
            continue
        choices = ((), *fronted(6, 3, 1).choices)
        chain = [i for i, choice in enumerate(choices) if not any(choice)]
        logits = before.scores.logits.unflatten(0, (1, 2))[:, :, chain[row] : chain[row] + 1]
        where = torch.tensor([[place]])
        noise = Noise([KEYS[0]], positions=16, vocab_size=24).gumbel(where)
        best = (sampling.log_probs(logits, where) + noise).topk(3).indices[0, 0].tolist()
        assert step.tree.tokens[0, 1:4].tolist() == best


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 1}, "window is 1"),
        ({"width": 0}, "width is 0"),
        ({"width": 25}, "25 wide"),
        ({"levels": 0}, "levels is 0"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode("sjd-pac", Sampling(), **settings)
