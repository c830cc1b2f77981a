"""Vertical heads: the pool holds outputs of committed codes only, and the share does not change the image."""

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import DraftTree
from lantern.decoding import loop, plain
from lantern.drafters.heads.vertical import Vertical, VerticalConfig, VerticalDrafter
from lantern.drafters.trees.static import named
from lantern.methods.registry import METHODS, build_decoder
from lantern.verifiers.gumbel import GumbelVerifier
from tests.drafters.whole import whole_pictures
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_parts import tiny_part, tiny_parts

TARGET = tiny_target()
CONDITION = tiny_condition((4, 1, 6))
KEYS = [(9, 0), (9, 1), (4, 7)]
SAMPLING = Sampling(guidance=3)


class Watched(VerticalDrafter):
    """Records the known codes, the pool, and log q of each draft."""

    def begin(self, prefill, noise) -> None:  # type: ignore[no-untyped-def]
        self.seen: list[tuple[Tensor, Tensor, Tensor, DraftTree]] = []
        super().begin(prefill, noise)

    def propose(self) -> DraftTree:
        tree = super().propose()
        self.seen.append((self._pairs.known.clone(), self._pool.clone(), self._is_filled.clone(), tree))
        return tree


def watch(share: float) -> tuple[Watched, Vertical, Tensor]:
    module = tiny_part("vertical", TARGET)
    drafter = Watched(
        module,
        TARGET,
        tree=named("0 1 2 0.0 1.0 0.0.0"),
        mode="gumbel",
        sampling=SAMPLING,
        share=share,
        records_log_q=True,
    )
    made = loop.generate(TARGET, CONDITION, sampling=SAMPLING, keys=KEYS, drafter=drafter, verifier=GumbelVerifier())
    return drafter, module, made.codes


@torch.no_grad()
def test_pool_holds_outputs_of_committed_codes_only() -> None:
    drafter, module, codes = watch(0.5)
    output = module.training_predictions(whole_pictures(TARGET, CONDITION, codes, 3.0), 3)[-1]
    assert output.depth == 4 and output.places.tolist() == list(range(4, 16)) and output.features is not None
    for known, pool, is_filled, _ in drafter.seen:
        for image, count in enumerate(known.clamp(max=16).tolist()):
            below = min(count + 4, 16)
            assert is_filled[image, :16].tolist() == [4 <= place < below for place in range(16)]
            torch.testing.assert_close(pool[image, 4:below], output.features[image, : below - 4], atol=2e-4, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_distributions_are_mixtures_below_the_first_row(share: float) -> None:
    drafter, module, codes = watch(share)
    *ahead, above = module.training_predictions(whole_pictures(TARGET, CONDITION, codes, 3.0), 3)
    assert above.features is not None
    compared = 0
    for known, _, _, tree in drafter.seen:
        assert tree.log_q is not None
        for image, count in enumerate(known.tolist()):
            for output, node in zip(ahead, (0, 1, 4), strict=True):  # a node of each depth
                place = count + output.depth - 1
                if place >= 16 or output.features is None:
                    continue
                at = output.places.tolist().index(place)
                distribution = SAMPLING.filtered(TARGET.head(output.features[image, at])).exp()
                if place >= 4:
                    other = SAMPLING.filtered(TARGET.head(above.features[image, place - 4])).exp()
                    distribution = (1 - share) * distribution + share * other
                torch.testing.assert_close(tree.log_q[image, node].exp(), distribution, atol=1e-3, rtol=1e-3)
                compared += 1
    assert compared > 60


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(guidance=2, top_k=4), Sampling(temperature=0)])
def test_share_does_not_change_the_picture(share: float, sampling: Sampling) -> None:
    method = METHODS["vertical"].with_options(share=share, tree="0 1 2 3 0.0 0.1 1.0 0.0.0 0.0.0.0 0.0.0.0.0")
    made = build_decoder(method, TARGET, sampling=sampling, add_ons=tiny_parts(TARGET)).generate(CONDITION, keys=KEYS)
    assert torch.equal(made.codes, plain.generate(TARGET, CONDITION, sampling=sampling, keys=KEYS).codes)


@torch.no_grad()
def test_correct_pools_are_accepted() -> None:
    """Correct vertical guesses are accepted although the horizontal ones are useless."""
    target = tiny_target()
    weight = target.tok_embeddings.weight.data
    weight.copy_(weight[:1] + 0.05 * (weight - weight[:1]))  # codes are almost independent
    module = Vertical(VerticalConfig.for_target(target.config))
    module.init_for(target, torch.Generator())
    module.heads.fc.bias.data[: 4 * 32].normal_(0.0, 5.0, generator=torch.Generator().manual_seed(1))
    passes = []
    for share in (0.0, 0.9):
        method = METHODS["vertical"].with_options(share=share, tree="chain_4")
        parts = build_decoder(method, target, sampling=Sampling(guidance=2), add_ons={"vertical": module})
        passes.append(float(parts.generate(CONDITION, keys=KEYS).passes.float().mean()))
    assert passes[1] < passes[0] - 2


@torch.no_grad()
def test_training_reads_nothing_behind_the_code_above() -> None:
    module = tiny_part("vertical", TARGET)
    codes = torch.randint(0, 24, (3, 16), generator=torch.Generator().manual_seed(0))
    given, other = (
        whole_pictures(TARGET, CONDITION, c, 3.0) for c in (codes, codes.index_fill(1, torch.tensor([9]), 3))
    )
    for old, new, reach in zip(*(module.training_predictions(e, 2) for e in (given, other)), (1, 2, 4), strict=True):
        assert old.features is not None and new.features is not None
        is_same = (old.features - new.features).abs().amax((0, 2)) < 1e-5
        assert torch.equal(is_same[old.places - reach < 9], torch.ones(len(old.places[old.places - reach < 9])).bool())
        assert not is_same[old.places - reach == 9].any()


@pytest.mark.parametrize("share", [-0.1, 1.5, True, "half"])
def test_invalid_shares_raise(share: object) -> None:
    with pytest.raises(ValueError, match="wanted a number from 0 to 1"):
        METHODS["vertical"].with_options(share=share)


def test_invalid_configs_raise() -> None:
    for fields in ({"depths": 0}, {"block_size": 15}):
        with pytest.raises(ValueError, match="wanted"):
            VerticalConfig.for_target(TARGET.config, **fields)
