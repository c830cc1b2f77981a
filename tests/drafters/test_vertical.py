"""Vertical heads: the pool holds outputs of committed tokens only, and the share does not change the image."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import DraftTree
from lantern.drafters.heads.vertical import Vertical, VerticalConfig, VerticalDrafter
from lantern.drafters.trees.static import named
from tests.drafters.sampled_trees import drafted
from tests.drafters.whole import whole_pictures
from tests.tiny import loose_target
from tests.tiny_decoder import CONDITION, KEYS, SAMPLING, TARGET, tiny_decoder
from tests.tiny_parts import tiny_part


class Watched(VerticalDrafter):
    """Records the pool of each draft."""

    def begin(self, prefill, noise) -> None:  # type: ignore[no-untyped-def]
        self.pools: list[tuple[Tensor, Tensor]] = []
        super().begin(prefill, noise)

    def propose(self) -> DraftTree:
        tree = super().propose()
        self.pools.append((self.held.pool.clone(), self.held.is_filled.clone()))
        return tree


def watch(share: float) -> tuple[Watched, list[Any], list[Any]]:
    """Return the drafter, its drafts, and what training predicts of the images."""
    module, shape = tiny_part("vertical", TARGET), named("0 1 2 0.0 1.0 0.0.0")
    how: dict[str, Any] = {"mode": "gumbel", "sampling": SAMPLING, "records_log_q": True}
    drafter = Watched(module, TARGET, tree=shape, share=share, **how)
    tokens, drafts = drafted(drafter)
    return drafter, drafts, module.training_predictions(whole_pictures(TARGET, CONDITION, tokens), 3)


@torch.no_grad()
def test_pool_holds_outputs_of_committed_tokens_only() -> None:
    drafter, drafts, (*_, output) = watch(0.5)
    assert output.depth == 4 and output.places.tolist() == list(range(4, 16))
    for (known, *_), (pool, is_filled) in zip(drafts, drafter.pools, strict=True):
        for image, count in enumerate(known.clamp(max=16).tolist()):
            below = min(count + 4, 16)
            assert is_filled[image, :16].tolist() == [4 <= place < below for place in range(16)]
            torch.testing.assert_close(pool[image, 4:below], output.features[image, : below - 4], atol=2e-4, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_distributions_are_mixtures_below_the_first_row(share: float) -> None:
    _, drafts, (*ahead, above) = watch(share)
    compared = 0
    for known, tree, _ in drafts:
        for image, count in enumerate(known.tolist()):
            for output, node in zip(ahead, (0, 1, 4), strict=True):  # a node of each depth
                place = count + output.depth - 1
                if place >= 16:
                    continue
                at = output.places.tolist().index(place)
                distribution = SAMPLING.filtered(TARGET.head(output.features[image, at])).exp()
                if place >= 4:
                    other = SAMPLING.filtered(TARGET.head(above.features[image, place - 4])).exp()
                    distribution = (1 - share) * distribution + share * other
                torch.testing.assert_close(tree.log_q[image, node].exp(), distribution, atol=1e-3, rtol=1e-3)
                compared += 1
    assert compared > 60


@torch.no_grad()
def test_correct_pools_are_accepted() -> None:
    """Correct vertical guesses are accepted although the horizontal ones are useless."""
    target = loose_target()
    module = Vertical(VerticalConfig.for_target(target.config))
    module.init_for(target, torch.Generator())
    module.heads.fc.bias.data[: 4 * 32].normal_(0.0, 5.0, generator=torch.Generator().manual_seed(1))
    steps, how = [], {"sampling": Sampling(guidance=2), "add_ons": {"vertical": module}, "tree": "chain_4"}
    for share in (0.0, 0.9):
        parts = tiny_decoder("vertical", target, share=share, **how)  # type: ignore[arg-type]
        steps.append(float(parts.generate(CONDITION, keys=KEYS).steps.float().mean()))
    assert steps[1] < steps[0] - 2


@torch.no_grad()
def test_training_reads_nothing_behind_the_token_above() -> None:
    module = tiny_part("vertical", TARGET)
    tokens = torch.randint(0, 24, (3, 16), generator=torch.Generator().manual_seed(0))
    given, other = (whole_pictures(TARGET, CONDITION, c) for c in (tokens, tokens.index_fill(1, torch.tensor([9]), 3)))
    for old, new, reach in zip(*(module.training_predictions(e, 2) for e in (given, other)), (1, 2, 4), strict=True):
        assert old.features is not None and new.features is not None
        is_same = (old.features - new.features).abs().amax((0, 2)) < 1e-5
        assert torch.equal(is_same[old.places - reach < 9], torch.ones(len(old.places[old.places - reach < 9])).bool())
        assert not is_same[old.places - reach == 9].any()
