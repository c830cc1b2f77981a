"""PosS: every depth is drafted by its specialist from true features and the drafted ones before it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lantern.cli.train import find_config
from lantern.core.config import load_config
from lantern.drafters.eagle.poss import Poss, PossConfig
from lantern.drafters.examples import Examples
from lantern.training.drafter import DrafterConfig, DrafterTask
from lantern.training.kinds import new_module
from tests.tiny import tiny_condition
from tests.tiny_decoder import TARGET
from tests.tiny_parts import tiny_part

CONDITION = tiny_condition((4, 2))


def by_hand(module: Poss, features: Tensor, tokens: Tensor, depth: int, scale: float = 3.0) -> Tensor:
    """The specialist's own layer over a sequence, without a cache."""
    own = module.layers[module.specialist_at(depth)]
    x = module.add_scale(own.fc(module.pair(features, tokens)), torch.full(tokens.shape, scale))
    steps = module.rotary(torch.arange(tokens.shape[1])[None])
    return own(x, steps, None, cache=None, slots=None)


def test_specialists_cover_their_depths() -> None:
    of = {n: Poss(PossConfig.for_target(TARGET.config, depths=6, per_layer=n)) for n in (1, 2, 3)}
    assert [len(of[n].layers) for n in (1, 2, 3)] == [6, 3, 2]
    assert [of[1].specialist_at(depth) for depth in range(8)] == [0, 1, 2, 3, 4, 5, 5, 5]
    assert [of[2].specialist_at(depth) for depth in range(8)] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert [of[3].specialist_at(depth) for depth in range(8)] == [0, 0, 0, 1, 1, 1, 1, 1]


def examples() -> Examples:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(24, (2, 16), generator=generator)
    return Examples(tokens, torch.randn(2, 2, 16, 32, generator=generator), torch.tensor([3.0, 3.0]))


@pytest.mark.parametrize("per_layer", [1, 2, 3])
def test_specialists_get_gradients_from_their_own_depths_only(per_layer: int) -> None:
    module = tiny_part("poss", TARGET, depths=4, per_layer=per_layer).requires_grad_(True)
    for depth, made in enumerate(module.training_predictions(examples(), 4)):
        assert made.features is not None
        module.zero_grad()
        made.features.square().mean().backward(retain_graph=True)
        learns = [any(p.grad is not None and bool(p.grad.any()) for p in layer.parameters()) for layer in module.layers]
        assert learns == [i == depth // per_layer for i in range(len(module.layers))]


@pytest.mark.parametrize(("config", "served"), [("poss-1", [1] * 4), ("poss", [2, 2]), ("poss-3", [3, 3])])
def test_shipped_configs_train_each_specialist_on_all_of_its_depths(config: str, served: list[int]) -> None:
    read = load_config(DrafterConfig, find_config(f"drafter-{config}"))
    module = new_module("poss", TARGET, read.model, seed=0)
    assert isinstance(module, Poss) and len(module.layers) == len(served)
    depths = [module.specialist_at(depth) for depth in range(read.unroll)]
    assert [depths.count(number) for number in range(len(served))] == served


def test_training_without_drafts_of_a_specialist_raises() -> None:
    read = load_config(DrafterConfig, find_config("drafter-poss-3"))
    with pytest.raises(ValueError, match="unroll is 3, wanted at least 4"):
        DrafterTask(replace(read, unroll=3), TARGET, Unread())
    assert DrafterTask(replace(read, unroll=4), TARGET, Unread()).config.unroll == 4


class Unread:
    """Placeholder for unused images."""

    def read(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        raise AssertionError(f"pictures {list(numbers)} were read")


def test_untrained_specialists_repeat_the_feature() -> None:
    module = Poss(PossConfig.for_target(TARGET.config))
    module.init_for(TARGET, torch.Generator().manual_seed(0))
    features, tokens = torch.randn(1, 5, 32), torch.randint(24, (1, 5))
    for depth in range(6):
        out = by_hand(module, features, tokens, depth)
        assert torch.allclose(out, features + 0.05 * TARGET.tok_embeddings(tokens), atol=1e-5)
