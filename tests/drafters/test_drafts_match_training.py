"""Every trained drafter drafts the distributions that it was trained with, along every path of its trees."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import DraftTree
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.eagle.vispec import ViSpecDrafter
from lantern.drafters.heads import MedusaDrafter, ParallelDrafter
from lantern.drafters.trees import named
from tests.drafters.sampled_trees import drafted, ways, whole_pictures
from tests.tiny import select, tiny_target
from tests.tiny_decoder import CONDITION
from tests.tiny_parts import tiny_part

TARGET = tiny_target(n_layer=5, block_size=25)
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
    ("parallelspec", ParallelDrafter, {"anchors": 99}),
    ("medusa", MedusaDrafter, {"reads_token": True}),
    ("medusa", MedusaDrafter, {"reads_token": False}),
]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "drafter", "changes"), KINDS)
def test_drafts_match_training(kind: str, drafter: Any, changes: dict[str, Any]) -> None:
    module = tiny_part(kind, TARGET, **changes)
    sampling = Sampling(guidance=3, temperature=0.9)
    tree = named("0 1 2 0.0 0.1 1.0 0.0.0 0.0.1 0.1.0 1.0.0 0.0.0.0")
    made = drafter(module, TARGET, tree=tree, mode="gumbel", sampling=sampling, records_log_q=True)
    tokens, drafts = drafted(made, TARGET, CONDITION, sampling)
    paths = [(known, drawn, node, way) for known, drawn, _ in drafts[::4] for node, way in ways(drawn).items()]
    images = torch.cat([along(tokens, known, drawn, way) for known, drawn, _, way in paths])
    examples = whole_pictures(TARGET, select(CONDITION, [0, 1, 2] * len(paths)), images)
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
                logits = sampling.guide(TARGET.head(found.rows[row, :, at])[None, :, None], torch.tensor([[place]]))
            else:
                logits = TARGET.head(found.features[row, at])
            expected = sampling.filtered(logits.flatten())
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
