"""EAGLE-1, EAGLE-3, PosS, FR-Spec and ViSpec: what they start from, read and draft."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.io import load_component, save_component
from lantern.core.sampling import Sampling
from lantern.decoding.cache import PromptCache
from lantern.drafters.base import Examples, fused_layers
from lantern.drafters.eagle.drafter import FrequencyTable
from lantern.drafters.eagle.networks import Eagle, Eagle3, Eagle3Config, EagleConfig, Poss, PossConfig
from lantern.drafters.eagle.vispec import ViSpec, ViSpecConfig
from lantern.training.drafter import new_module
from tests.drafters.sampled_trees import stepped, whole_pictures
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import CONDITION, KEYS, TARGET, tiny_decoder
from tests.tiny_parts import tiny_part, tiny_table

DEEP = tiny_target(n_layer=5)
WARM = Sampling(guidance=3, temperature=0.9)


def random_examples() -> Any:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(24, (2, 16), generator=generator)
    rows, layers = (torch.randn(2, 2, *more, 16, 32, generator=generator) for more in ((), (3,)))
    return Examples(tokens, rows, torch.tensor([2.0, 3.0]), layers=layers)


def test_untrained_modules_repeat_the_feature() -> None:
    features, tokens = torch.randn(1, 5, 32), torch.randint(24, (1, 5))
    scales, expected = torch.full((1, 5), 3.0), features + 0.05 * TARGET.tok_embeddings(tokens)
    module = Eagle(EagleConfig.for_target(TARGET.config))
    module.init_weights(TARGET.tok_embeddings.weight, torch.Generator().manual_seed(0))
    assert torch.allclose(module(features, tokens, torch.arange(5)[None], scales=scales), expected, atol=1e-5)
    specialists = Poss(PossConfig.for_target(TARGET.config))
    specialists.init_for(TARGET, torch.Generator().manual_seed(0))
    for depth in range(6):
        own = specialists.layers[specialists.specialist_at(depth)]
        x = specialists.add_scale(own.fc(specialists.pair(features, tokens)), scales)
        out = own(x, specialists.rotary(torch.arange(5)[None]), None, cache=None, slots=None)
        assert torch.allclose(out, expected, atol=1e-5)


def test_fresh_samples_are_never_ranked_by_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's noise is that of token numbers, which nodes share."""

    def refused(*_: Any, **how: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(type(TARGET), "ranker", lambda *_: refused)
    tiny_decoder("eagle1-traversal", tree="chain_2").generate(CONDITION, keys=KEYS)
    with pytest.raises(ZeroDivisionError):
        tiny_decoder("eagle1-rejection", tree="chain_2").generate(CONDITION, keys=KEYS)


def test_taps_give_what_enters_the_layers_of_the_paper() -> None:
    target, seen = tiny_target(n_layer=5), list[Tensor]()
    for layer in (1, 3):
        target.layers[layer].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    output = target(torch.randn(2, 4, 32), torch.arange(6, 10).expand(2, -1), taps=(3, 1))
    assert output.tapped is not None and torch.equal(output.tapped, torch.cat([seen[1], seen[0]], -1))
    assert fused_layers(16) == (2, 8, 13)
    assert Eagle3Config.for_target(DEEP.config).fused == fused_layers(5) == (2, 2, 2)
    assert tiny_part("eagle3", tiny_target(n_layer=16)).taps == (2, 8, 13)


def test_one_prompt_cache_serves_drafters_with_and_without_taps() -> None:
    cache, taps, condition = PromptCache(), (1, 2), tiny_condition((4, 2))
    plain, one, again = (cache.read(DEEP, condition, 2, taps=read) for read in ((), taps, taps))
    assert plain.tapped is None and len(cache) == 4 and one.tapped is not None and again.tapped is not None
    assert one.tapped.shape == (2, 2, 1, 64) and torch.equal(one.tapped, again.tapped)
    assert torch.equal(one.features, plain.features)


def test_a_fresh_drafter_says_what_the_target_says_of_the_last_tapped_layer() -> None:
    module = Eagle3(Eagle3Config.for_target(DEEP.config))
    module.init_for(DEEP, torch.Generator().manual_seed(0))
    layers, tokens = torch.randn(1, 5, 3 * 32), torch.randint(24, (1, 5))
    out = module(module.enter(layers), tokens, torch.arange(5)[None], scales=torch.full((1, 5), 3.0))
    torch.testing.assert_close(module.logits(out, None), DEEP.head(DEEP.norm(layers[..., -32:])))


def test_guided_layers_are_put_side_by_side_and_fewer_are_the_last_ones() -> None:
    given, target = random_examples(), tiny_target(n_layer=16)
    c, u = given.layers.unbind(1)
    torch.testing.assert_close(tiny_part("eagle3", DEEP).inputs(given)[1, 0, :, 64:], u[1, 2] + 3 * (c[1, 2] - u[1, 2]))
    module = new_module("eagle3", target, {"fused": [13]}, seed=0)
    assert isinstance(module, Eagle3) and module.taps == (13,)
    torch.testing.assert_close(module.inputs(given)[:, 0], given.guide(given.layers)[:, 2])
    with pytest.raises(ValueError, match=r"fused is \[8\], wanted \[2, 8, 13\] or the last of these"):
        new_module("eagle3", target, {"fused": [8]}, seed=0)


@torch.no_grad()
def test_hooks_of_a_specialist_take_effect_on_its_keys() -> None:
    module, written = tiny_part("poss", TARGET, depths=2), list[Tensor]()
    own, cache = module.layers[0], SimpleNamespace(write=lambda *of: written.append(of[-1]))
    given = torch.ones(1, 2, 32), module.rotary(torch.arange(2)[None]), cache, torch.zeros(1, 2)
    own.write_keys(*given)
    own.attention.wqkv.register_forward_hook(lambda *of: 2 * of[-1])
    own.write_keys(*given)
    torch.testing.assert_close(written[1], 2 * written[0])


@pytest.mark.parametrize(
    ("per_layer", "of"), [(1, [0, 1, 2, 3, 4, 5, 5, 5]), (2, [0, 0, 1, 1, 2, 2, 2, 2]), (3, [0, 0, 0, 1, 1, 1, 1, 1])]
)
def test_specialists_cover_their_depths_and_learn_from_them_only(per_layer: int, of: list[int]) -> None:
    module = Poss(PossConfig.for_target(TARGET.config, depths=6, per_layer=per_layer))
    assert len(module.layers) == max(of) + 1 and [module.specialist_at(depth) for depth in range(8)] == of
    module = tiny_part("poss", TARGET, depths=4, per_layer=per_layer).requires_grad_(True)
    for depth, made in enumerate(module.training_predictions(random_examples(), 4)):
        module.zero_grad()
        made.features.square().mean().backward(retain_graph=True)
        learns = [any(p.grad is not None and bool(p.grad.any()) for p in layer.parameters()) for layer in module.layers]
        assert learns == [i == of[depth] for i in range(len(module.layers))]


@pytest.mark.parametrize("form", ["guided", "rows"])
def test_frequent_tokens_are_drafted_and_all_of_them_give_eagle(form: str) -> None:
    how: dict[str, Any] = {"sampling": WARM, "form": form, "tree": "narrow_10"}
    settings: list[tuple[str, dict[str, int]]] = [("fr-spec", {"vocabulary": 24}), ("eagle1", {})]
    mine, eagle = (stepped(tiny_decoder(name, **more, **how))[1] for name, more in settings)
    assert [step.tree.tokens.tolist() for step in mine] == [step.tree.tokens.tolist() for step in eagle]
    frequent = set(tiny_table(TARGET).ranking[:4].tolist())  # type: ignore[index,operator]
    _, steps = stepped(tiny_decoder("fr-spec", vocabulary=4, **how))
    assert all(set(step.tree.tokens[:, 1:].flatten().tolist()) <= frequent for step in steps)


def test_ranking_is_by_count_then_by_number(tmp_path: Any) -> None:
    table = FrequencyTable.of_tokens(torch.tensor([[3, 3, 1], [1, 5, 3]]), 6)
    assert table.ranking.tolist() == [3, 1, 5, 0, 2, 4]
    save_component(table.state_dict(), table.config, tmp_path / "fr-spec")
    again = load_component(FrequencyTable, type(table.config), tmp_path / "fr-spec")
    assert torch.equal(again.counts, table.counts) and again.config == table.config


WIDER = tiny_target(block_size=36)


@torch.no_grad()
def test_old_rows_are_seen_only_through_their_tokens() -> None:
    module = tiny_part("vispec", WIDER, recent=1)
    tokens = torch.randint(0, 24, (3, 36), generator=torch.Generator().manual_seed(0))
    given = whole_pictures(WIDER, CONDITION, tokens)
    # Two pairs of row 0 are swapped: a row's token is a sum, which does not depend on their order.
    swapped = list(range(36))
    swapped[1], swapped[2] = 2, 1
    other = replace(given, tokens=tokens[:, swapped], rows=given.rows[:, :, swapped])
    old, new = (module.training_predictions(e, 1)[0].features for e in (given, other))
    differs = (old - new).abs().amax((0, 2)) > 1e-4
    assert differs[2:12].any()  # rows 0 and 1 see the pairs of row 0
    assert not differs[12:].any()  # rows from 2 on do not


@torch.no_grad()
def test_untrained_module_equals_eagle_without_compression() -> None:
    module = ViSpec(ViSpecConfig.for_target(WIDER.config, summaries=0, recent=6))
    module.init_for(WIDER, torch.Generator().manual_seed(0))
    plain = Eagle(EagleConfig.for_target(WIDER.config))
    plain.load_state_dict({name: x for name, x in module.state_dict().items() if name in plain.state_dict()})
    for layer, twin in zip(module.layers, plain.layers, strict=True):
        layer.attention.wo.weight.data.normal_(generator=torch.Generator().manual_seed(1))
        twin.attention.wo.weight.data.copy_(layer.attention.wo.weight)
    tokens = torch.randint(0, 24, (3, 36), generator=torch.Generator().manual_seed(0))
    given = whole_pictures(WIDER, CONDITION, tokens)
    for ours, theirs in zip(module.training_predictions(given, 3), plain.training_predictions(given, 3), strict=True):
        torch.testing.assert_close(ours.features, theirs.features, atol=1e-4, rtol=1e-4)
