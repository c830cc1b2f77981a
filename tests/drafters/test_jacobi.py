"""Jacobi windows equal plain decoding with Gumbel match and match its distribution with coupling; mutants do not."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Generation, Step, Verdict, Verifier
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.trees.static import chain
from lantern.drafters.windows.jacobi import JacobiDrafter
from lantern.models.llamagen.transformer import Transformer
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from tests.proof.pictures import DISTRIBUTION, SMALL, enumerated, p_value, pictures, teacher_forced
from tests.proof.test_mutants import OldDistribution, SameUniforms
from tests.tiny import loose_target, select, tiny_eagle
from tests.tiny_decoder import CONDITION, KEYS, SAMPLING, TARGET, generate, plain_tokens, tiny_decoder

INITS = ("random", "repeat-left")
NAMES = ("sjd", "scd", "gumbel-jacobi")


def decode(name: str, sampling: Sampling, *, images: list[int] | None = None, **how: Any) -> Generation:
    images = [0, 1, 2] if images is None else images
    return tiny_decoder(name, sampling=sampling, **how).generate(
        select(CONDITION, images), keys=[KEYS[i] for i in images]
    )


@pytest.mark.parametrize("name", ["sjd", "scd"])
def test_tokens_outside_the_filter_are_never_sampled(name: str) -> None:
    sampling = Sampling(guidance=3, top_k=3)
    tokens = (
        tiny_decoder(name, sampling=sampling)
        .generate(select(CONDITION, [0] * 20), keys=[(1, i) for i in range(20)])
        .tokens
    )
    forced = teacher_forced(TARGET, select(CONDITION, [0] * 20), tokens, sampling)
    assert (forced.gather(-1, tokens[..., None]) > -torch.inf).all()


def steps(name: str, target: Transformer) -> float:
    """Return the mean steps of images of 16 tokens."""
    parts = tiny_decoder(name, target, Sampling(guidance=2), window=6, init="random")
    made = parts.generate(select(CONDITION, [0, 1] * 20), keys=[(3, i) for i in range(40)])
    return float(made.steps.float().mean())


@pytest.mark.parametrize("name", NAMES)
def test_independent_tokens_take_few_steps(name: str) -> None:
    assert steps(name, loose_target()) < 8


def test_coupling_takes_fewer_steps_than_independent_redraws() -> None:
    assert steps("scd", TARGET) < steps("sjd", TARGET)


# The distribution, against the enumerated one of pictures of four tokens out of five.

PICTURES = 5000


def draw(verifier: Verifier, *, window: int, init: str) -> Generation:
    drafter = JacobiDrafter(SMALL, window=window, init=init)
    decoder = tiny_decoder("scd", SMALL, DISTRIBUTION)
    return pictures(replace(decoder, drafter=drafter, verifier=verifier), PICTURES)


def test_enumerated_distribution_matches_plain_decoding() -> None:
    assert enumerated().sum() == pytest.approx(1.0, abs=1e-5)
    assert p_value(pictures(tiny_decoder("plain", SMALL, DISTRIBUTION), PICTURES).tokens) > 1e-4


@pytest.mark.parametrize("redraw", ["coupled", "independent"])
@pytest.mark.parametrize(("window", "init"), [(2, "random"), (3, "repeat-left"), (4, "random"), (4, "repeat-left")])
def test_windows_match_the_target_distribution(window: int, init: str, redraw: str) -> None:
    made = draw(CouplingVerifier(redraw), window=window, init=init)  # type: ignore[arg-type]
    assert p_value(made.tokens) > 1e-4
    assert made.steps.float().mean() < 4


@pytest.mark.parametrize("mutant", [OldDistribution(), SameUniforms()])
def test_mutants_change_the_distribution(mutant: CouplingVerifier) -> None:
    assert p_value(draw(mutant, window=4, init="repeat-left").tokens) < 1e-6


# Errors.


def test_verifiers_without_samples_raise() -> None:
    drafter = JacobiDrafter(TARGET, keeps_distributions=False)
    counts, none = torch.ones(1, dtype=torch.long), cast(Any, None)
    verdict = Verdict(torch.zeros(1, 15, dtype=torch.long), counts * 0, counts)
    with pytest.raises(AssertionError, match="returned no samples"):
        drafter.observe(Step(1, counts, counts, counts[:, None], none, verdict=verdict))


def test_windows_with_distributions_need_coupling() -> None:
    with pytest.raises(ValueError, match='mode "gumbel": use one of jacobi'):
        generate(JacobiDrafter(TARGET, keeps_distributions=False), CouplingVerifier())
    with pytest.raises(ValueError, match='mode "jacobi": use one of iid, point, sampled'):
        generate(JacobiDrafter(TARGET), RejectionVerifier())
    drafter = EagleDrafter(tiny_eagle(TARGET), TARGET, tree=chain(2), mode="sampled", sampling=SAMPLING)
    with pytest.raises(ValueError, match='mode "sampled": use one of jacobi'):
        generate(drafter, CouplingVerifier())
    assert torch.equal(generate(JacobiDrafter(TARGET), GumbelVerifier()).tokens, plain_tokens())
