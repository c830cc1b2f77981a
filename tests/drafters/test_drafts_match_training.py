"""Every trained drafter drafts the distributions that it was trained with, along every path of its trees.

Those of vertical heads are mixed with the guesses of a pool.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import DraftTree
from lantern.drafters import heads
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.eagle.vispec import ViSpecDrafter
from lantern.drafters.trees import named
from lantern.training.drafter import kinds
from tests.drafters.sampled_trees import drafted, ways, whole_pictures
from tests.tiny import loose_target, tiny_target
from tests.tiny_decoder import CONDITION, KEYS, TARGET, tiny_decoder
from tests.tiny_parts import tiny_part

DEEP = tiny_target(n_layer=5, block_size=25)
KINDS: list[tuple[str, Any, dict[str, Any]]] = [
    ("eagle1", EagleDrafter, {}),
    ("eagle1", EagleDrafter, {"form": "rows"}),
    ("eagle1", EagleDrafter, {"layers": 2}),
    ("eagle3", EagleDrafter, {"layers": 1}),
    ("eagle3", EagleDrafter, {"layers": 2, "fused": (2, 2)}),
    ("poss", EagleDrafter, {"depths": 5, "per_layer": 1}),
    ("poss", EagleDrafter, {"depths": 5, "per_layer": 2}),
    ("poss", EagleDrafter, {"depths": 5, "per_layer": 2, "form": "rows"}),
    ("vispec", ViSpecDrafter, {"recent": 1}),
    ("vispec", ViSpecDrafter, {"recent": 2, "summaries": 3}),
    ("vispec", ViSpecDrafter, {"recent": 6, "summaries": 0, "has_globe": False}),
    ("parallelspec", heads.ParallelDrafter, {"anchors": 99}),
    ("medusa", heads.MedusaDrafter, {"reads_token": True}),
    ("medusa", heads.MedusaDrafter, {"reads_token": False}),
    ("vertical", partial(heads.VerticalDrafter, share=0.0), {}),
    ("vertical", partial(heads.VerticalDrafter, share=0.3), {}),
    ("vertical", partial(heads.VerticalDrafter, share=1.0), {}),
]


def test_every_kind_that_is_trained_is_here() -> None:
    assert {kind for kind, *_ in KINDS} == set(kinds())


@torch.no_grad()
@pytest.mark.parametrize(("kind", "drafter", "changes"), KINDS)
def test_drafts_match_training(kind: str, drafter: Any, changes: dict[str, Any]) -> None:
    module = tiny_part(kind, DEEP, **changes)
    sampling = Sampling(guidance=3, temperature=0.9)
    tree = named("0 1 2 0.0 0.1 1.0 0.0.0 0.0.1 0.1.0 1.0.0 0.0.0.0")
    made = drafter(module, DEEP, tree=tree, mode="gumbel", sampling=sampling, records_log_q=True)
    tokens, drafts = drafted(made, DEEP, CONDITION, sampling)
    paths = [(known, drawn, node, way) for known, drawn, _ in drafts[::4] for node, way in ways(drawn).items()]
    images = torch.cat([along(tokens, known, drawn, way) for known, drawn, _, way in paths])
    examples = whole_pictures(DEEP, CONDITION.select([0, 1, 2] * len(paths)), images)
    predictions = module.training_predictions(examples, 1 + max(len(way) for *_, way in paths))
    compared = 0
    for i, (known, drawn, node, way) in enumerate(paths):
        found = predictions[len(way)]
        for image, count in enumerate(known.tolist()):
            row, place = 3 * i + image, count + len(way)
            if place >= 25:
                continue
            at = found.places.tolist().index(place)
            if found.logits is not None:
                logits = found.logits[row, at]
            elif found.rows is not None:
                logits = sampling.guide(DEEP.head(found.rows[row, :, at])[None, :, None], torch.tensor([[place]]))
            else:
                logits = DEEP.head(found.features[row, at])
            expected = sampling.filtered(logits.flatten())
            if kind == "vertical" and place >= 5:  # the pool holds a guess from the token above
                above = predictions[-1]
                other = DEEP.head(above.features[row, above.places.tolist().index(place)])
                share = drafter.keywords["share"]
                expected = ((1 - share) * expected.exp() + share * sampling.filtered(other).exp()).log()
            torch.testing.assert_close(drawn.log_q[image, node], expected, atol=2e-3, rtol=1e-3)
            compared += 1
    assert compared > 60


def along(tokens: Tensor, known: Tensor, tree: DraftTree, way: list[int]) -> Tensor:
    """Return the images with the tokens of a drafted path at their places: training reads true tokens only."""
    changed = tokens.clone()
    for image, count in enumerate(known.tolist()):
        path = tree.tokens[image, way][: max(25 - count, 0)]
        changed[image, count : count + len(path)] = path
    return changed


@torch.no_grad()
def test_untrained_heads_repeat_the_feature() -> None:
    module = heads.Medusa(heads.MedusaConfig.for_target(TARGET.config))
    module.init_for(TARGET, torch.Generator())
    features, tokens = torch.randn(2, 5, 32), torch.zeros(2, 5, dtype=torch.long)
    output = module.heads(features, tokens, torch.full((2, 5), 3.0))
    assert torch.equal(output, features[:, :, None].expand(-1, -1, 4, -1))
    assert torch.equal(module.heads.embed_tokens.weight, TARGET.tok_embeddings.weight)


def test_a_group_of_masks_sees_the_pairs_up_to_its_anchor_and_itself() -> None:
    pairs, masks = ["1000000", "1100000", "1110000"], ["1001000", "1001100", "1100010", "1100011"]
    expected = [[mark == "1" for mark in line] for line in pairs + masks]
    assert heads.group_mask(3, torch.tensor([0, 1]), 2).tolist() == expected


def test_each_step_runs_one_drafter_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, guess = [], heads.ParallelSpec.guess
    monkeypatch.setattr(
        heads.ParallelSpec, "guess", lambda self, *of, **how: calls.append(1) or guess(self, *of, **how)
    )
    made = tiny_decoder("parallelspec").generate(CONDITION.select([0]), keys=KEYS[:1])
    assert len(calls) == int(made.steps) - 1


@torch.no_grad()
def test_correct_pools_are_accepted() -> None:
    """Correct vertical guesses are accepted although the horizontal ones are useless."""
    target = loose_target()
    module = heads.Vertical(heads.VerticalConfig.for_target(target.config))
    module.init_for(target, torch.Generator())
    module.heads.fc.bias.data[: 4 * 32].normal_(0.0, 5.0, generator=torch.Generator().manual_seed(1))
    steps, how = [], {"sampling": Sampling(guidance=2), "add_ons": {"vertical": module}, "tree": "chain_4"}
    for share in (0.0, 0.9):
        parts = tiny_decoder("vertical", target, share=share, **how)  # type: ignore[arg-type]
        steps.append(float(parts.generate(CONDITION, keys=KEYS).steps.float().mean()))
    assert steps[1] < steps[0] - 2
