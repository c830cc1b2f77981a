"""A smaller model of the same family drafts for a model of transformers, at toy size and with random weights."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.decoding.loop import ForcedTokens
from lantern.drafters.combined import SmallModel
from lantern.generation.generator import build_decoder
from lantern.methods import METHODS
from lantern.models.transformers.components import Components
from lantern.training.drafter import new_module
from tests import tiny_transformers as tiny

# Emu3 has newlines; the third grid has rows shorter than a chain
CASES: dict[str, tuple[int, int] | None] = {"janus": None, "emu3": (24, 24), "emu3-narrow": (64, 16)}
SAMPLINGS = [Sampling(guidance=4.0), Sampling(guidance=4.0, temperature=0.0), Sampling(guidance=1.0, top_k=6)]
PROMPTS, KEYS = ["a red apple", "the sky"], [(3, 0), (3, 1)]


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
        built(name, each, sampling).generate(condition(name), keys=KEYS).tokens for each in ("plain", method)
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
        found[method] = built(name, method, SAMPLINGS[0]).generate(condition(name), keys=KEYS, forced=forced)
        assert (found[method].steps <= 2 + columns).all()
    same = built(name, "self-cascade", SAMPLINGS[0], target)
    itself = same.generate(condition(name), keys=KEYS, forced=forced)
    assert itself.steps.tolist() == [2 + -(-columns // 5)] * 2
    monkeypatch.setattr(ForcedTokens, "common_prefix", 1)
    slow = built(name, "plain", SAMPLINGS[0]).generate(condition(name), keys=KEYS, forced=forced)
    assert all(torch.equal(one.tokens, slow.tokens) for one in (*found.values(), itself))


def test_a_model_of_another_family_and_four_bits_are_refused() -> None:
    target = parts("emu3").target
    changed = tiny.assemble("emu3", smaller("emu3"), tiny.processor("emu3"), (24, 24)).target
    changed.config = replace(changed.config, family="lumina")
    with pytest.raises(ValueError, match="the small model has family lumina, its target emu3"):
        SmallModel(changed, target, sampling=Sampling(), stage=2)
    with pytest.raises(ValueError, match="small_bits=4 quantizes LlamaGen's layers only"):
        built("emu3", "specmquant", SAMPLINGS[0], small_bits=4)
