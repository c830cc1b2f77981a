"""The cascade, and targets with 4-bit weights: decoding is exact for them, and the original is unchanged."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.noise import Noise
from lantern.core.prepared import quantized
from lantern.core.sampling import Sampling
from lantern.core.types import DraftTree
from lantern.drafters.combined.small_model import SmallModel
from lantern.drafters.combined.specmquant import CascadeDrafter, brush
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.trees.static import chain
from lantern.engines.engine import EagerEngine
from tests.drafters.sampled_trees import begin_after
from tests.tiny import tiny_eagle, tiny_target
from tests.tiny_decoder import CONDITION, KEYS, TARGET, plain_tokens, tiny_decoder

SMALL = tiny_target(seed=5, n_layer=1)
SAMPLING = Sampling(guidance=3, temperature=0.8)


@torch.no_grad()
def first_tree(length: int, rounds: int, first: Tensor, sampling: Sampling = SAMPLING) -> tuple[DraftTree, Tensor]:
    """Return the first tree of a cascade behind these first tokens, and the tokens of its chain."""
    inner = EagleDrafter(tiny_eagle(TARGET), TARGET, tree=chain(length - 1), mode="gumbel", sampling=sampling)
    small = SmallModel(SMALL, TARGET, sampling=sampling, stage=length + 1)
    drafter = CascadeDrafter(inner, small, length=length, width=3, rounds=rounds)
    noise = Noise(KEYS, positions=16, vocab_size=24, is_silent=sampling.is_greedy)
    features = torch.randn(3, sampling.rows, 6, 32, generator=torch.Generator().manual_seed(0))
    begin_after(drafter, first, features, noise)
    tree = drafter.propose()
    return tree, tree.tokens[:, [n for n, choice in enumerate(((), *drafter.tree.choices)) if not any(choice)]]


@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(guidance=3, temperature=0)], ids=["sampled", "greedy"])
@pytest.mark.parametrize("rounds", [1, 3, 7])
def test_first_tokens_after_as_many_rounds_equal_the_small_models_own(rounds: int, sampling: Sampling) -> None:
    own = plain_tokens(SMALL, sampling)
    tree, drafted = first_tree(7, rounds, own[:, 0], sampling)
    assert torch.equal(drafted[:, : 1 + rounds], own[:, : 1 + rounds])
    assert tree.log_q is not None and tree.shape.widths == (3,) * 7


def test_tokens_are_the_best_of_log_q_plus_noise() -> None:
    tree, _ = first_tree(5, 2, torch.tensor([3, 1, 8]))
    assert tree.log_q is not None
    torch.testing.assert_close(tree.log_q.exp().sum(-1), torch.ones(3, 16))
    places = (1 + tree.shape.depths).expand(3, -1)
    best = (tree.log_q + Noise(KEYS, positions=16, vocab_size=24).gumbel(places)).topk(3).indices
    for node in range(1, tree.tokens.shape[1]):
        parent, rank = int(tree.shape.parents[node]), int(tree.shape.ranks[node])
        assert torch.equal(tree.tokens[:, node], best[:, parent, rank])


def test_copy_of_the_target_is_accepted_with_any_drafter() -> None:
    parts = tiny_decoder("specmquant", sampling=SAMPLING, add_ons={"small": TARGET}, length=5, steps=5, width=1)
    made = parts.generate(CONDITION, keys=KEYS)
    assert made.steps.tolist() == [1 + -(-15 // 6)] * 3


needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed: extra eval or dev")


@needs_torchao
@pytest.mark.parametrize("name", ["plain", "eagle1", "gumbel-jacobi", "specmquant", "self-cascade"])
def test_methods_are_exact_with_respect_to_a_quantised_target(name: str) -> None:
    own: Any = quantized(TARGET)
    parts = tiny_decoder(name, sampling=SAMPLING, add_ons={"small": SMALL}, engine=EagerEngine(weights="int4"))
    assert parts.target is own
    assert torch.equal(parts.generate(CONDITION, keys=KEYS).tokens, plain_tokens(own, SAMPLING))


@needs_torchao
def test_a_quantised_small_model_drafts_as_well() -> None:
    parts = tiny_decoder("specmquant", sampling=SAMPLING, add_ons={"small": SMALL}, small_bits=4)
    assert torch.equal(parts.generate(CONDITION, keys=KEYS).tokens, plain_tokens(sampling=SAMPLING))


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
    monkeypatch.setattr("lantern.core.weights.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="int4 weights need torchao"):
        tiny_decoder("plain", tiny_target(), engine=EagerEngine(weights="int4"))


def test_brush_is_a_chain_with_siblings() -> None:
    assert brush(3, 2).spelling == "0 1 0.0 0.1 0.0.0 0.0.1"
    assert brush(4, 1) == chain(4)


def test_inner_verification_ends_when_the_chain_is_the_small_models_own() -> None:
    own = plain_tokens(SMALL, SAMPLING)
    chains = [first_tree(7, rounds, own[:, 0])[1] for rounds in (0, 1)]
    assert torch.equal(chains[0], own[:, :8]) and not torch.equal(chains[1], own[:, :8])
