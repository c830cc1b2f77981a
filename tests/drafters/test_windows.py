"""Jacobi windows and SJD-PAC: distributions, steps saved, and the tree at the front of a window."""

from itertools import pairwise
from typing import Any, Literal

import pytest
import torch

from lantern.core.sampling import Noise
from lantern.core.types import Step
from lantern.drafters.lookup import RepeatDrafter
from lantern.drafters.windows import JacobiDrafter, fronted
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from tests.drafters.sampled_trees import stepped
from tests.refusals import refused
from tests.tiny_decoder import KEYS, SAMPLING, TARGET, generate, plain_tokens, tiny_decoder


def test_windows_with_distributions_need_coupling() -> None:
    with pytest.raises(ValueError, match='mode "gumbel": use one of jacobi'):
        generate(JacobiDrafter(TARGET, keeps_distributions=False), CouplingVerifier())
    refused(generate, JacobiDrafter(TARGET), RejectionVerifier(), match='mode "jacobi": use one of iid, point, sampled')
    assert torch.equal(generate(JacobiDrafter(TARGET), GumbelVerifier()).tokens, plain_tokens())


def decode(images: list[int] | None = None, **settings: Any) -> tuple[Any, list[Any]]:
    return stepped(tiny_decoder("sjd-pac", **settings), images)


def test_a_front_is_a_tree_before_a_chain_and_saves_passes_if_wide() -> None:
    assert fronted(5, 2, 2).spelling == "0 1 0.0 0.1 1.0 1.1 0.0.0 0.0.0.0"
    assert fronted(4, 1, 3).spelling == "0 0.0 0.0.0"
    assert fronted(2, 3, 5).spelling == "0 1 2"
    plain, _ = stepped(tiny_decoder("gumbel-jacobi", window=8))
    narrow, wide = (decode(window=8, width=width)[0] for width in (1, 6))
    assert torch.equal(narrow.tokens, plain_tokens()) and torch.equal(wide.tokens, plain_tokens())
    assert torch.equal(narrow.steps, plain.steps) and wide.steps.sum() < narrow.steps.sum()


def test_siblings_are_the_next_best_tokens_of_the_stale_distribution() -> None:
    _, steps = decode(images=[0], window=6, width=3, levels=1)
    chain = [i for i, choice in enumerate(((), *fronted(6, 3, 1).choices)) if not any(choice)]
    compared = 0
    for before, step in pairwise(steps):
        row, place = int(before.counts[0]), int(step.start[0])
        if row > 5 or place > 15:
            continue
        logits, where = before.scores.logits[:, :, chain[row] : chain[row] + 1], torch.tensor([[place]])
        noise = Noise([KEYS[0]], positions=16, vocab_size=24).gumbel(where)
        best = (SAMPLING.log_probs(logits, where) + noise).topk(3).indices[0, 0].tolist()
        assert step.tree.tokens[0, 1:4].tolist() == best
        compared += 1
    assert compared > 2


@pytest.mark.parametrize(("side", "distance"), [("left", 1), ("above", 4)])
@pytest.mark.parametrize("length", [1, 6, 40])
def test_each_token_repeats_its_neighbour(side: Literal["left", "above"], distance: int, length: int) -> None:
    steps = list[Step]()
    made = generate(RepeatDrafter(TARGET, side=side, length=length), callback=steps.append)
    assert torch.equal(made.tokens, plain_tokens())
    seen = 0
    for step in steps[1:]:
        assert step.tree is not None and step.tree.shape.depth == min(length, 16)
        for image, start in enumerate(step.start.tolist()):
            row: list[Any] = made.tokens[image, :start].tolist()  # with the drafts behind it
            for draft in step.tree.tokens[image, 1:].tolist():
                wanted = len(row) - distance if len(row) >= distance else start - 1
                assert draft == row[wanted]
                row.append(draft)
                seen += 1
    assert seen > 0
