"""A small model drafts alone, or between a drafter and the target, also for transformers; and 4-bit weights."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Noise, Sampling
from lantern.core.types import Condition, DraftTree
from lantern.core.weights import quantized
from lantern.decoding.loop import ForcedTokens
from lantern.drafters.combined import CascadeDrafter, SelfCascadeDrafter, SmallModel
from lantern.drafters.trees import chain, named
from lantern.engines.engine import EagerEngine
from lantern.generation.generator import build_decoder
from lantern.methods import METHODS
from lantern.models.transformers.components import Components
from lantern.training.drafter import new_module
from tests import tiny_transformers as tiny
from tests.drafters.sampled_trees import begin_after, drafted
from tests.tiny import needs_torchao, tiny_eagle, tiny_target, uncached
from tests.tiny_decoder import CONDITION, KEYS, TARGET, plain_tokens, tiny_decoder

SMALL = tiny_target(seed=5, n_layer=1)
WARM, GREEDY = Sampling(guidance=3, temperature=0.8), Sampling(guidance=3, temperature=0)


def noise_of(sampling: Sampling) -> Noise:
    return Noise(KEYS, positions=16, vocab_size=24, is_silent=sampling.is_greedy)


@torch.no_grad()
@pytest.mark.parametrize("sampling", [WARM, GREEDY, Sampling(guidance=1)], ids=str)
def test_first_chain_equals_the_small_models_picture(sampling: Sampling) -> None:
    own = plain_tokens(SMALL, sampling)
    drafter = SelfCascadeDrafter(SMALL, TARGET, tree=chain(15), sampling=sampling)
    begin_after(drafter, own[:, 0], torch.zeros(3, 1, 1, 1), noise_of(sampling))
    assert torch.equal(drafter.propose().tokens, own)


@pytest.mark.parametrize("tree", ["chain_4", "narrow_10"])
def test_copy_of_the_target_is_always_accepted(tree: str) -> None:
    made = tiny_decoder("self-cascade", tree=tree, add_ons={"small": TARGET}).generate(CONDITION, keys=KEYS)
    assert torch.equal(made.tokens, plain_tokens())
    assert made.steps.tolist() == [1 + -(-15 // (named(tree).depth + 1))] * 3
    cascade = tiny_decoder("specmquant", sampling=WARM, add_ons={"small": TARGET}, length=5, steps=5, width=1)
    assert cascade.generate(CONDITION, keys=KEYS).steps.tolist() == [1 + -(-15 // 6)] * 3


def test_recorded_log_q_is_the_small_models() -> None:
    sampling = Sampling(guidance=2)
    drafter = SelfCascadeDrafter(SMALL, TARGET, tree=named("0 1 0.0 1.0"), sampling=sampling, records_log_q=True)
    tokens, drafts = drafted(drafter, sampling=sampling)
    known, tree, _ = drafts[1]
    for image in range(3):
        for node, path in ((0, []), (1, [1]), (2, [2])):
            output = torch.cat([tokens[image, : known[image]], tree.tokens[image, path]])[None]
            logits = uncached(SMALL, CONDITION.select([image]), output)[:, :, -1:]
            expected = sampling.log_probs(logits, torch.tensor([[output.shape[1]]]))[0, 0]
            torch.testing.assert_close(tree.log_q[image, node], expected, atol=1e-4, rtol=1e-4)


def test_small_models_of_other_sizes_raise() -> None:
    for name, value in (("vocab_size", 25), ("block_size", 9), ("cls_token_num", 5)):
        with pytest.raises(ValueError, match=f"the small model has {name} {value}, its target"):
            SmallModel(tiny_target(**{name: value}), TARGET, sampling=Sampling(), stage=2)


@torch.no_grad()
def first_tree(length: int, rounds: int, first: Tensor, sampling: Sampling = WARM) -> tuple[DraftTree, Tensor]:
    """Return the first tree of a cascade behind these first tokens, and the tokens of its chain."""
    how: dict[str, Any] = {"length": length, "width": 3, "rounds": rounds, "sampling": sampling}
    drafter = CascadeDrafter(tiny_eagle(TARGET), TARGET, SMALL, **how)
    features = torch.randn(3, sampling.rows, 6, 32, generator=torch.Generator().manual_seed(0))
    begin_after(drafter, first, features, noise_of(sampling))
    tree = drafter.propose()
    return tree, tree.tokens[:, [n for n, choice in enumerate(((), *drafter.tree.choices)) if not any(choice)]]


@pytest.mark.parametrize(("rounds", "sampling"), [(1, WARM), (3, GREEDY), (7, WARM)], ids=str)
def test_first_tokens_after_as_many_rounds_equal_the_small_models_own(rounds: int, sampling: Sampling) -> None:
    own = plain_tokens(SMALL, sampling)
    tree, drafted = first_tree(7, rounds, own[:, 0], sampling)
    assert torch.equal(drafted[:, : 1 + rounds], own[:, : 1 + rounds])
    assert tree.log_q is not None and tree.shape.widths == (3,) * 7
    if rounds == 1:  # without a number of rounds they end when the chain is the small model's own
        assert not torch.equal(drafted, own[:, :8]) and torch.equal(first_tree(7, 0, own[:, 0])[1], own[:, :8])


def test_tokens_are_the_best_of_log_q_plus_noise() -> None:
    tree, _ = first_tree(5, 2, torch.tensor([3, 1, 8]))
    torch.testing.assert_close(tree.log_q.exp().sum(-1), torch.ones(3, 16))
    best = (tree.log_q + noise_of(WARM).gumbel((1 + tree.shape.depths).expand(3, -1))).topk(3).indices
    for node in range(1, tree.tokens.shape[1]):
        parent, rank = int(tree.shape.parents[node]), int(tree.shape.ranks[node])
        assert torch.equal(tree.tokens[:, node], best[:, parent, rank])


@needs_torchao
@pytest.mark.parametrize(("weights", "small_bits"), [("int4", 0), ("full", 4)])
def test_a_quantised_target_or_small_model_drafts_as_well(weights: Any, small_bits: int) -> None:
    own: Any = quantized(TARGET) if weights == "int4" else TARGET
    engine = EagerEngine(weights=weights)
    parts = tiny_decoder("specmquant", sampling=WARM, add_ons={"small": SMALL}, engine=engine, small_bits=small_bits)
    assert parts.target is own
    assert torch.equal(parts.generate(CONDITION, keys=KEYS).tokens, plain_tokens(own, WARM))


@needs_torchao
@torch.no_grad()
def test_quantising_rounds_a_copy_to_sixteen_values_per_group() -> None:
    target = tiny_target(seed=3)
    before = target.layers[0].attention.wo.weight.clone()
    made = quantized(target)
    assert quantized(target) is made and made is not target
    assert torch.equal(target.layers[0].attention.wo.weight, before)
    rounded = made.layers[0].attention.wo(torch.eye(32)).T  # type: ignore[union-attr,operator,index]
    off = (rounded - before).abs().amax(1)
    assert off.max() > 0 and (off <= before.abs().amax(1) / 7).all()
    assert all(len(row.unique()) <= 16 for row in rounded.view(-1, 32))
    with pytest.raises(ValueError, match=r"layers.0.attention.wqkv has 16 inputs, expected a multiple of 32"):
        quantized(tiny_target(dim=16, n_head=1))


def test_missing_torchao_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lantern.core.weights.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="int4 weights need torchao"):
        tiny_decoder("plain", tiny_target(), engine=EagerEngine(weights="int4"))


# Emu3 has newlines; the third grid has rows shorter than a chain
CASES: dict[str, tuple[int, int] | None] = {"janus": None, "emu3": (24, 24), "emu3-narrow": (64, 16)}
SAMPLINGS = [Sampling(guidance=4.0), Sampling(guidance=4.0, temperature=0.0), Sampling(guidance=1.0, top_k=6)]
PROMPTS = ["a red apple", "the sky"]


def family(name: str) -> str:
    return name.partition("-")[0]


def smaller(name: str) -> Any:
    made = tiny.make(family(name), 1)
    body = made.model.language_model if family(name) == "janus" else made.model.text_model
    body.layers, body.config.num_hidden_layers = body.layers[:1], 1
    return made


@cache
def parts(name: str, is_small: bool = False) -> Components:
    model, words = smaller(name) if is_small else None, tiny.processor(family(name))
    return tiny.assemble(family(name), model, words, CASES[name])


@cache
def condition(name: str) -> Condition:
    text = parts(name).text
    return text.condition(PROMPTS)


def built(name: str, method: str, sampling: Sampling, small: Any = None, **settings: Any) -> Any:
    target, chosen = parts(name).target, METHODS[method].with_options(**settings)
    eagle = new_module("eagle1", target, {"form": "rows"}, seed=0).eval()
    add_ons: Any = {"eagle1": eagle, "small": small or parts(name, True).target}
    return build_decoder(chosen, target, sampling=sampling, add_ons=add_ons)


@pytest.mark.parametrize(
    ("name", "method", "sampling"),
    [
        ("janus", "self-cascade", SAMPLINGS[1]),
        ("emu3", "self-cascade", SAMPLINGS[2]),
        *product(("janus", "emu3"), ("specmquant", "specmquant-paper"), SAMPLINGS[:1]),
    ],
)
def test_tokens_are_those_of_plain_decoding(name: str, method: str, sampling: Sampling) -> None:
    plain, found = (
        built(name, each, sampling).generate(condition(name), keys=KEYS[:2]).tokens for each in ("plain", method)
    )
    assert torch.equal(found, plain)


@pytest.mark.parametrize(("name", "sampling"), list(zip(CASES, [*SAMPLINGS[:2], SAMPLINGS[0]], strict=True)))
def test_drafts_of_the_target_itself_are_all_accepted(name: str, sampling: Sampling) -> None:
    """Its prompts, positions and newlines are those of the target: a pass gives a chain of four and the token behind.

    Of many images some would notice newlines of earlier passes that are not read.
    """
    tokens, text = parts(name).target.config.block_size, parts(name).text
    made = built(name, "self-cascade", sampling, parts(name).target)
    steps = made.generate(text.condition(PROMPTS * 8), keys=[(3, i) for i in range(16)]).steps
    assert steps.tolist() == [1 + -(-(tokens - 1) // 5)] * 16


@pytest.mark.parametrize("name", CASES)
def test_kept_tokens_are_read_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = parts(name).target
    tokens, columns = target.config.block_size, target.config.raster.columns
    kept = tokens - columns
    forced = torch.where(torch.arange(tokens) < kept, torch.arange(2 * tokens).view(2, -1) % 24, -1)
    found = {}
    for method in ("plain", "self-cascade", "gumbel-jacobi"):
        found[method] = built(name, method, SAMPLINGS[0]).generate(condition(name), keys=KEYS[:2], forced=forced)
        assert (found[method].steps <= 2 + columns).all()
    same = built(name, "self-cascade", SAMPLINGS[0], target)
    itself = same.generate(condition(name), keys=KEYS[:2], forced=forced)
    assert itself.steps.tolist() == [2 + -(-columns // 5)] * 2
    monkeypatch.setattr(ForcedTokens, "common_prefix", 1)
    slow = built(name, "plain", SAMPLINGS[0]).generate(condition(name), keys=KEYS[:2], forced=forced)
    assert all(torch.equal(one.tokens, slow.tokens) for one in (*found.values(), itself))


def test_a_model_of_another_family_and_four_bits_are_refused() -> None:
    target = parts("emu3").target
    changed = tiny.assemble("emu3", smaller("emu3"), tiny.processor("emu3"), (24, 24)).target
    changed.config = replace(changed.config, family="lumina")
    with pytest.raises(ValueError, match="the small model has family lumina, its target emu3"):
        SmallModel(changed, target, sampling=Sampling(), stage=2)
    with pytest.raises(ValueError, match="small_bits=4 quantizes LlamaGen's layers only"):
        built("emu3", "specmquant", SAMPLINGS[0], small_bits=4)
