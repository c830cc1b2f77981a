"""The cascade, and targets with 4-bit weights: decoding is exact for them, and the original is unchanged."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import Prefill
from lantern.decoding import plain
from lantern.drafters.combined.small_model import SmallModel
from lantern.drafters.combined.specmquant import CascadeDrafter, brush
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.trees.static import chain
from lantern.engines.engine import EagerEngine
from lantern.engines.prepared import quantized
from lantern.methods.registry import METHODS, build_decoder
from tests.tiny import tiny_condition, tiny_eagle, tiny_target

TARGET = tiny_target()
SMALL = tiny_target(seed=5, n_layer=1)
CONDITION = tiny_condition((4, 1, 6))
KEYS = [(9, 0), (9, 1), (4, 7)]
SAMPLING = Sampling(guidance=3, temperature=0.8)


def cascade(length: int, rounds: int, sampling: Sampling) -> CascadeDrafter:
    inner = EagleDrafter(tiny_eagle(TARGET), TARGET, tree=chain(length - 1), mode="gumbel", sampling=sampling)
    small = SmallModel(SMALL, TARGET, sampling=sampling, stage=length + 1)
    return CascadeDrafter(inner, small, length=length, width=3, rounds=rounds)


@torch.no_grad()
@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(guidance=3, temperature=0)], ids=["sampled", "greedy"])
@pytest.mark.parametrize("rounds", [1, 3, 7])
def test_first_codes_after_as_many_rounds_equal_the_small_models_own(rounds: int, sampling: Sampling) -> None:
    own = plain.generate(SMALL, CONDITION, sampling=sampling, keys=KEYS).codes
    drafter = cascade(7, rounds, sampling)
    noise = Noise(KEYS, positions=16, vocab_size=24, is_silent=sampling.is_greedy)
    features = torch.randn(3, sampling.rows, 6, 32, generator=torch.Generator().manual_seed(0))
    drafter.begin(Prefill(features, torch.ones(3, 6, dtype=torch.bool), own[:, 0], condition=CONDITION), noise)
    tree = drafter.propose()
    drafted = tree.tokens[:, [node for node, choice in enumerate(((), *drafter.tree.choices)) if not any(choice)]]
    assert torch.equal(drafted[:, : 1 + rounds], own[:, : 1 + rounds])
    assert tree.log_q is not None and tree.shape.widths == (3,) * 7


@torch.no_grad()
def test_codes_are_the_best_of_log_q_plus_noise() -> None:
    drafter, noise = cascade(5, 2, SAMPLING), Noise(KEYS, positions=16, vocab_size=24)
    features = torch.randn(3, 2, 6, 32, generator=torch.Generator().manual_seed(0))
    first = torch.tensor([3, 1, 8])
    drafter.begin(Prefill(features, torch.ones(3, 6, dtype=torch.bool), first, condition=CONDITION), noise)
    tree = drafter.propose()
    assert tree.log_q is not None
    torch.testing.assert_close(tree.log_q.exp().sum(-1), torch.ones(3, 16))
    places = (1 + tree.shape.depths).expand(3, -1)
    best = (tree.log_q + noise.gumbel(places)).topk(3).indices
    for node in range(1, tree.tokens.shape[1]):
        parent, rank = int(tree.shape.parents[node]), int(tree.shape.ranks[node])
        assert torch.equal(tree.tokens[:, node], best[:, parent, rank])


def test_copy_of_the_target_is_accepted_with_any_drafter() -> None:
    method = METHODS["specmquant"].with_options(length=5, steps=5, width=1)
    parts = build_decoder(
        method, TARGET, sampling=SAMPLING, drafter_module=tiny_eagle(TARGET), add_ons={"small": TARGET}
    )
    made = parts.generate(CONDITION, keys=KEYS)
    assert made.passes.tolist() == [1 + -(-15 // 6)] * 3


needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed: extra eval or dev")


@needs_torchao
@pytest.mark.parametrize("name", ["plain", "eagle1", "gumbel-jacobi", "specmquant", "self-cascade"])
def test_methods_are_exact_with_respect_to_a_quantised_target(name: str) -> None:
    own = quantized(TARGET)
    expected = plain.generate(own, CONDITION, sampling=SAMPLING, keys=KEYS).codes  # type: ignore[arg-type]
    parts = build_decoder(
        name,
        TARGET,
        sampling=SAMPLING,
        drafter_module=tiny_eagle(TARGET),
        add_ons={"small": SMALL},
        engine=EagerEngine(weights="int4"),
    )
    assert parts.target is own
    assert torch.equal(parts.generate(CONDITION, keys=KEYS).codes, expected)


@needs_torchao
def test_a_quantised_small_model_drafts_as_well() -> None:
    method = METHODS["specmquant"].with_options(small_bits=4)
    parts = build_decoder(
        method, TARGET, sampling=SAMPLING, drafter_module=tiny_eagle(TARGET), add_ons={"small": SMALL}
    )
    expected = plain.generate(TARGET, CONDITION, sampling=SAMPLING, keys=KEYS).codes
    assert torch.equal(parts.generate(CONDITION, keys=KEYS).codes, expected)


@needs_torchao
@torch.no_grad()
def test_quantising_rounds_a_copy_to_sixteen_values_per_group() -> None:
    target = tiny_target(seed=3)
    before = target.layers[0].attention.wo.weight.clone()
    made = quantized(target)
    assert quantized(target) is made and made is not target
    assert torch.equal(target.layers[0].attention.wo.weight, before)
    assert set(target.state_dict()) == set(tiny_target().state_dict())
    inputs = torch.eye(32)
    rounded = made.layers[0].attention.wo(inputs).T  # type: ignore[union-attr,operator,index]
    off = (rounded - before).abs().amax(1)
    assert off.max() > 0 and (off <= before.abs().amax(1) / 7).all()
    assert all(len(row.unique()) <= 16 for row in rounded.view(-1, 32))


@needs_torchao
def test_widths_that_are_not_multiples_of_a_group_raise() -> None:
    with pytest.raises(ValueError, match=r"layers.0.attention.wqkv has 16 inputs, expected a multiple of 32"):
        quantized(tiny_target(dim=16, n_head=1))


def test_missing_torchao_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lantern.engines.prepared.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="4-bit weights need torchao"):
        build_decoder("plain", tiny_target(), sampling=SAMPLING, engine=EagerEngine(weights="int4"))


def test_brush_is_a_chain_with_siblings() -> None:
    assert brush(3, 2).spelling == "0 1 0.0 0.1 0.0.0 0.0.1"
    assert brush(4, 1) == chain(4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"turns": -1}, "steps is -1"),
        ({"length": 1}, "length is 1, wanted a whole number of at least 2"),
        ({"width": 30}, "width is 30, wanted at most 24"),
        ({"small_bits": 8}, "small_bits is 8, wanted one of 0, 4"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_decoder(
            METHODS["specmquant"].with_options(**settings),
            TARGET,
            sampling=SAMPLING,
            drafter_module=tiny_eagle(TARGET),
            add_ons={"small": SMALL},
        )


@torch.no_grad()
def test_inner_verification_ends_when_the_chain_is_the_small_models_own() -> None:
    own = plain.generate(SMALL, CONDITION, sampling=SAMPLING, keys=KEYS).codes
    chains = {}
    for rounds in (0, 1):
        drafter = cascade(7, rounds, SAMPLING)
        noise = Noise(KEYS, positions=16, vocab_size=24)
        features = torch.randn(3, SAMPLING.rows, 6, 32, generator=torch.Generator().manual_seed(0))
        drafter.begin(Prefill(features, torch.ones(3, 6, dtype=torch.bool), own[:, 0], condition=CONDITION), noise)
        tokens = drafter.propose().tokens
        chains[rounds] = tokens[:, [n for n, choice in enumerate(((), *drafter.tree.choices)) if not any(choice)]]
    assert torch.equal(chains[0], own[:, :8]) and not torch.equal(chains[1], own[:, :8])
