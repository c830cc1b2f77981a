"""EAGLE-3: taps record the inputs of layers, and drafts match passes without a cache."""

import pytest
import torch
from torch import Tensor

from lantern.decoding.prompt import PromptCache
from lantern.drafters.eagle.eagle3 import Eagle3, Eagle3Config
from lantern.drafters.examples import Examples, fused_layers
from lantern.training.kinds import new_module
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_parts import tiny_part

TARGET = tiny_target(n_layer=5)
CONDITION = tiny_condition((4, 2))


def test_taps_give_what_enters_layers() -> None:
    target, seen = tiny_target(n_layer=5), list[Tensor]()
    for layer in (1, 3):
        target.layers[layer].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    inputs = torch.randn(2, 4, 32)
    output = target(inputs, torch.arange(6, 10).expand(2, -1), taps=(3, 1))
    assert output.fused is not None
    assert torch.equal(output.fused, torch.cat([seen[1], seen[0]], -1))


def test_without_taps_there_is_nothing_beside_features() -> None:
    assert TARGET(torch.randn(1, 2, 32), torch.tensor([[6, 7]])).fused is None


def test_the_layers_are_those_of_the_paper() -> None:
    assert fused_layers(16) == (2, 8, 13)
    assert Eagle3Config.for_target(TARGET.config).fused == fused_layers(5) == (2, 2, 2)
    assert tiny_part("eagle3", tiny_target(n_layer=16)).taps == (2, 8, 13)


def test_one_prompt_cache_serves_drafters_with_and_without_taps() -> None:
    cache, taps = PromptCache(), (1, 2)
    plain = cache.read(TARGET, CONDITION, 2)
    tapped = cache.read(TARGET, CONDITION, 2, taps=taps)
    again = cache.read(TARGET, CONDITION, 2, taps=taps)
    assert plain.fused is None and len(cache) == 4
    assert tapped.fused is not None and again.fused is not None
    assert tapped.fused.shape == (2, 2, 1, 64) and torch.equal(tapped.fused, again.fused)
    assert torch.equal(tapped.features, plain.features)


def test_a_fresh_drafter_says_what_the_target_says_of_the_last_tapped_layer() -> None:
    module = Eagle3(Eagle3Config.for_target(TARGET.config))
    module.init_for(TARGET, torch.Generator().manual_seed(0))
    layers, tokens = torch.randn(1, 5, 3 * 32), torch.randint(24, (1, 5))
    out = module(module.enter(layers), tokens, torch.arange(5)[None], scales=torch.full((1, 5), 3.0))
    expected = TARGET.head(TARGET.norm(layers[..., -32:]))
    torch.testing.assert_close(module.logits(out, None), expected)


def examples() -> Examples:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(24, (2, 16), generator=generator)
    rows, layers = (torch.randn(2, 2, *more, 16, 32, generator=generator) for more in ((), (3,)))
    return Examples(tokens, rows, torch.tensor([2.0, 3.0]), layers=layers)


def test_gradients_reach_every_weight() -> None:
    module = tiny_part("eagle3", TARGET).requires_grad_(True)
    output = [made.logits for made in module.training_predictions(examples(), 2)]
    torch.stack([logits.square().mean() for logits in output if logits is not None]).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())


def test_guided_layers_are_put_side_by_side() -> None:
    given = examples()
    assert given.layers is not None
    guided = tiny_part("eagle3", TARGET).inputs(given)
    c, u = given.layers.unbind(1)
    expected = u[1, 2] + 3.0 * (c[1, 2] - u[1, 2])
    torch.testing.assert_close(guided[1, 0, :, 64:], expected)


def test_a_drafter_of_fewer_layers_trains_on_the_last_ones() -> None:
    target, given = tiny_target(n_layer=16), examples()
    module = new_module("eagle3", target, {"fused": [13]}, seed=0)
    assert isinstance(module, Eagle3) and module.taps == (13,)
    assert given.layers is not None
    torch.testing.assert_close(module.inputs(given)[:, 0], given.guide(given.layers)[:, 2])
    assert len(module.training_predictions(given, 2)) == 2
    with pytest.raises(ValueError, match=r"fused is \[8\], wanted \[2, 8, 13\] or the last of these"):
        new_module("eagle3", target, {"fused": [8]}, seed=0)


def test_taps_are_traced_in_one_piece_with_the_target() -> None:
    """torch.compile makes one program without graph breaks for each set of taps."""
    target = tiny_target()
    traced = torch.compile(target.forward, backend="eager", fullgraph=True, dynamic=False)
    inputs, positions = torch.randn(2, 4, 32), torch.arange(6, 10).expand(2, -1)
    with torch.no_grad():
        for taps in ((), (1, 0), (1,)):
            output, expected = traced(inputs, positions, taps=taps), target(inputs, positions, taps=taps)
            assert (output.fused is None) == (not taps)
            if taps:
                torch.testing.assert_close(output.fused, expected.fused)
            torch.testing.assert_close(output.logits, expected.logits)
