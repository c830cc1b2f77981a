"""ParallelSpec: drafts of one pass match training, and continued windows stay exact."""

from dataclasses import replace

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.drafters.heads.parallelspec import (
    ParallelDrafter,
    ParallelSpec,
    ParallelSpecConfig,
    group_mask,
)
from lantern.drafters.trees.static import named
from lantern.methods import METHODS
from tests.drafters.whole import whole_pictures
from tests.proof.pictures import DISTRIBUTION, SMALL, p_value, pictures
from tests.tiny import select
from tests.tiny_decoder import CONDITION, KEYS, TARGET, tiny_decoder
from tests.tiny_parts import tiny_part

DRAWING = """
1 . . | . . | . .
1 1 . | . . | . .
1 1 1 | . . | . .
1 . . | 1 . | . .
1 . . | 1 1 | . .
1 1 . | . . | 1 .
1 1 . | . . | 1 1
"""


def test_each_step_runs_one_drafter_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    guess = ParallelSpec.guess
    monkeypatch.setattr(
        ParallelSpec, "guess", lambda self, *given, **named: calls.append(1) or guess(self, *given, **named)
    )
    made = tiny_decoder("parallelspec").generate(select(CONDITION, [0]), keys=KEYS[:1])
    assert len(calls) == int(made.steps) - 1


def test_group_mask_matches_the_drawing() -> None:
    required = [[mark == "1" for mark in line.replace("|", "").split()] for line in DRAWING.split("\n") if line]
    assert group_mask(3, torch.tensor([0, 1]), 2).tolist() == required


@torch.no_grad()
def test_guesses_read_nothing_behind_their_anchor() -> None:
    module = tiny_part("parallelspec", TARGET)
    module.config = replace(module.config, anchors=99)
    tokens = torch.randint(0, 24, (3, 16), generator=torch.Generator().manual_seed(0))
    before = whole_pictures(TARGET, CONDITION, tokens)
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 24
    after = replace(before, tokens=changed, rows=before.rows.index_fill(2, torch.tensor([8]), 1.0))
    for old, new in zip(*(module.training_predictions(given, 4) for given in (before, after)), strict=True):
        assert old.features is not None and new.features is not None
        is_same = (old.features - new.features).abs().amax(-1).amax(0) < 1e-5
        assert torch.equal(is_same, old.places - old.depth < 8)


def test_anchors_are_random_in_training_and_fixed_in_evaluation() -> None:
    module = ParallelSpec(ParallelSpecConfig.for_target(TARGET.config, anchors=5))
    device = torch.device("cpu")
    sampled = [module.train()._choose_anchors(15, device).tolist() for _ in range(8)]
    assert len({tuple(anchors) for anchors in sampled}) > 1
    assert all(len(set(anchors)) == 5 and anchors[0] == 0 and max(anchors) < 15 for anchors in sampled)
    assert module.eval()._choose_anchors(15, device).tolist() == [0, 3, 6, 9, 12]


# Distributions with the drafter's own noise.


@pytest.mark.parametrize("tree", ["chain_3", "0 1 2 0.0 0.1 1.0 0.0.0"])
def test_sampled_trees_with_rejection_match_the_target_distribution(tree: str) -> None:
    method = METHODS["parallelspec-paper"].with_options(tree=tree)
    made = pictures(tiny_decoder(method, SMALL, DISTRIBUTION), 5000, seed=7)
    assert p_value(made.tokens) > 1e-4 and made.steps.float().mean() < 4


def test_too_deep_trees_raise() -> None:
    module = ParallelSpec(ParallelSpecConfig.for_target(TARGET.config, depths=2))
    with pytest.raises(ValueError, match="guesses 2 tokens"):
        ParallelDrafter(module, TARGET, tree=named("chain_3"), mode="gumbel", sampling=Sampling())
