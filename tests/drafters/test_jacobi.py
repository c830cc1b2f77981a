"""Jacobi windows equal plain decoding with Gumbel match and match its distribution with coupling; mutants do not."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Generation, Step, Verdict, Verifier
from lantern.drafters.eagle.drafter import EagleChain, EagleDrafter
from lantern.drafters.eagle.eagle1 import Eagle, EagleConfig
from lantern.drafters.trees.static import chain
from lantern.drafters.windows.jacobi import JacobiDrafter
from lantern.generation.decoder import build_decoder
from lantern.methods import METHODS
from lantern.models.llamagen.transformer import Transformer
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from tests.proof.pictures import DISTRIBUTION, SMALL, enumerated, p_value, pictures, teacher_forced
from tests.proof.test_mutants import OldDistribution, SameUniforms
from tests.tiny import loose_target, select, tiny_eagle, tiny_target
from tests.tiny_decoder import CONDITION, KEYS, SAMPLING, TARGET, generate, plain_tokens, tiny_decoder

INITS = ("random", "repeat-left", "drafter")
NAMES = ("sjd", "scd", "gumbel-jacobi")


def decode(name: str, sampling: Sampling, *, images: list[int] | None = None, **how: Any) -> Generation:
    images = [0, 1, 2] if images is None else images
    return tiny_decoder(name, sampling=sampling, **how).generate(
        select(CONDITION, images), keys=[KEYS[i] for i in images]
    )


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("window", [2, 5, 8, 16])
def test_windows_equal_plain_decoding(window: int, init: str, guidance: float) -> None:
    sampling = Sampling(guidance=guidance)
    tokens = plain_tokens(sampling=sampling)
    for images in ([0, 1, 2], [1], [2, 0]):
        made = decode("gumbel-jacobi", sampling, images=images, window=window, init=init)
        assert torch.equal(made.tokens, tokens[images])


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(guidance=3, temperature=0.7, top_k=5),
        Sampling(guidance=2, top_p=0.6),
        Sampling(guidance=4, guidance_interval=5),
    ],
)
def test_windows_equal_plain_decoding_for_all_sampling_options(sampling: Sampling, init: str) -> None:
    for form in ("guided", "rows"):
        made = decode("gumbel-jacobi", sampling, init=init, form=form)
        assert torch.equal(made.tokens, plain_tokens(sampling=sampling))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("init", INITS)
def test_greedy_windows_equal_plain_decoding(name: str, init: str) -> None:
    for window, guidance in ((2, 3), (6, 1), (16, 3)):
        sampling = Sampling(guidance=guidance, temperature=0)
        made = decode(name, sampling, window=window, init=init)
        assert torch.equal(made.tokens, plain_tokens(sampling=sampling))


@pytest.mark.parametrize("name", ["sjd", "scd"])
@pytest.mark.parametrize("init", INITS)
def test_tokens_depend_only_on_the_key(name: str, init: str) -> None:
    batch = decode(name, SAMPLING, window=5, init=init).tokens
    for images in ([2, 0, 1], [1], [0, 0]):
        assert torch.equal(decode(name, SAMPLING, images=images, window=5, init=init).tokens, batch[images])


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block_size", [1, 4])
def test_windows_are_limited_to_the_grid(name: str, block_size: int) -> None:
    target, sampling = tiny_target(block_size=block_size), Sampling()
    for init in INITS:
        made = tiny_decoder(name, target, sampling, window=9, init=init).generate(CONDITION, keys=KEYS)
        assert made.tokens.shape == (3, block_size) and (made.steps <= block_size).all()
        if name == "gumbel-jacobi":
            assert torch.equal(made.tokens, plain_tokens(target, sampling))


def steps(name: str, init: str, target: Transformer) -> float:
    """Return the mean passes per image of 16 tokens; the drafter repeats its feature, which suits this target."""
    module = Eagle(EagleConfig.for_target(target.config)).eval()
    module.init_weights(target.tok_embeddings.weight, torch.Generator().manual_seed(0))
    parts = tiny_decoder(name, target, Sampling(guidance=2), module=module, window=6, init=init)
    made = parts.generate(select(CONDITION, [0, 1] * 20), keys=[(3, i) for i in range(40)])
    return float(made.steps.float().mean())


@pytest.mark.parametrize("name", NAMES)
def test_independent_tokens_take_few_passes_and_fewer_with_a_drafter(name: str) -> None:
    random = steps(name, "random", loose_target())
    assert random < 8
    assert steps(name, "drafter", loose_target()) < random


def test_coupling_takes_fewer_passes_than_independent_redraws() -> None:
    assert steps("scd", "random", TARGET) < steps("sjd", "random", TARGET)


# The distribution, against the enumerated one of pictures of four tokens out of five.

PICTURES = 5000


def draw(verifier: Verifier, *, window: int, init: str) -> Generation:
    continuation = None
    if init == "drafter":
        module = tiny_eagle(SMALL)
        continuation = EagleChain(module, SMALL, window=window, length=2, is_gumbel=False, sampling=DISTRIBUTION)
    drafter = JacobiDrafter(SMALL, window=window, init=init, continuation=continuation)
    decoder = tiny_decoder("scd", SMALL, DISTRIBUTION)
    return pictures(replace(decoder, drafter=drafter, verifier=verifier), PICTURES)


def test_enumerated_distribution_matches_plain_decoding() -> None:
    assert enumerated().sum() == pytest.approx(1.0, abs=1e-5)
    assert p_value(pictures(tiny_decoder("plain", SMALL, DISTRIBUTION), PICTURES).tokens) > 1e-4


@pytest.mark.parametrize("redraw", ["coupled", "independent"])
@pytest.mark.parametrize(("window", "init"), [(2, "random"), (3, "drafter"), (4, "random"), (4, "repeat-left")])
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


def test_continuation_requires_its_init_and_a_drafter() -> None:
    with pytest.raises(ValueError, match="this model has none"):
        build_decoder(METHODS["scd"].with_options(init="drafter"), TARGET, sampling=SAMPLING)
    with pytest.raises(ValueError, match="others take none"):
        JacobiDrafter(TARGET, init="drafter")
