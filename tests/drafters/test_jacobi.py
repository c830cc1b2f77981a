"""Jacobi windows equal plain decoding with Gumbel match and match its distribution with coupling; mutants do not."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import DraftTree, Generation, Leftovers, NoiseSource, Step, Verdict, Verifier
from lantern.decoding import loop, plain
from lantern.drafters.eagle.drafter import EagleChain
from lantern.drafters.eagle.eagle1 import Eagle, EagleConfig
from lantern.drafters.windows.jacobi import JacobiDrafter
from lantern.methods.registry import METHODS, build_decoder
from lantern.models.llamagen.transformer import Transformer
from lantern.verifiers.coupling import CouplingVerifier
from tests.proof.pictures import DISTRIBUTION, SMALL, enumerated, p_value, teacher_forced
from tests.tiny import select, tiny_condition, tiny_eagle, tiny_target

TARGET = tiny_target()
CONDITION = tiny_condition((4, 1, 6))
KEYS = [(9, 0), (9, 1), (4, 7)]
INITS = ("random", "repeat-left", "drafter")
NAMES = ("sjd", "scd", "gumbel-jacobi")


def decode(name: str, sampling: Sampling, *, form: str = "guided", images: list[int] | None = None, **settings: object):  # type: ignore[no-untyped-def]
    images = [0, 1, 2] if images is None else images
    method = METHODS[name].with_options(**settings)
    parts = build_decoder(method, TARGET, sampling=sampling, drafter_module=tiny_eagle(TARGET, form=form))
    return parts.generate(select(CONDITION, images), keys=[KEYS[i] for i in images])


def expected(sampling: Sampling) -> Tensor:
    return plain.generate(TARGET, CONDITION, sampling=sampling, keys=KEYS).codes


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("window", [2, 5, 8, 16])
def test_windows_equal_plain_decoding(window: int, init: str, guidance: float) -> None:
    sampling = Sampling(guidance=guidance)
    codes = expected(sampling)
    for images in ([0, 1, 2], [1], [2, 0]):
        made = decode("gumbel-jacobi", sampling, images=images, window=window, init=init)
        assert torch.equal(made.codes, codes[images])


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
        assert torch.equal(decode("gumbel-jacobi", sampling, init=init, form=form).codes, expected(sampling))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("init", INITS)
def test_greedy_windows_equal_plain_decoding(name: str, init: str) -> None:
    for window, guidance in ((2, 3), (6, 1), (16, 3)):
        sampling = Sampling(guidance=guidance, temperature=0)
        assert torch.equal(decode(name, sampling, window=window, init=init).codes, expected(sampling))


@pytest.mark.parametrize("name", ["sjd", "scd"])
@pytest.mark.parametrize("init", INITS)
def test_codes_depend_only_on_the_key(name: str, init: str) -> None:
    sampling = Sampling(guidance=3)
    batch = decode(name, sampling, window=5, init=init).codes
    for images in ([2, 0, 1], [1], [0, 0]):
        assert torch.equal(decode(name, sampling, images=images, window=5, init=init).codes, batch[images])


@pytest.mark.parametrize("name", ["sjd", "scd"])
def test_codes_outside_the_filter_are_never_sampled(name: str) -> None:
    sampling = Sampling(guidance=3, top_k=3)
    parts = build_decoder(METHODS[name], TARGET, sampling=sampling)
    codes = parts.generate(select(CONDITION, [0] * 20), keys=[(1, i) for i in range(20)]).codes
    forced = teacher_forced(TARGET, select(CONDITION, [0] * 20), codes, sampling)
    assert (forced.gather(-1, codes[..., None]) > -torch.inf).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block_size", [1, 4])
def test_windows_are_limited_to_the_grid(name: str, block_size: int) -> None:
    target, sampling = tiny_target(block_size=block_size), Sampling()
    for init in INITS:
        method = METHODS[name].with_options(window=9, init=init)
        parts = build_decoder(method, target, sampling=sampling, drafter_module=tiny_eagle(target))
        made = parts.generate(CONDITION, keys=KEYS)
        assert made.codes.shape == (3, block_size) and (made.passes <= block_size).all()
        if name == "gumbel-jacobi":
            assert torch.equal(made.codes, plain.generate(target, CONDITION, sampling=sampling, keys=KEYS).codes)


# Codes that are almost independent: the next pass nearly always repeats the window.


def loose_target() -> Transformer:
    target = tiny_target()
    weight = target.tok_embeddings.weight.data
    weight.copy_(weight[:1] + 0.05 * (weight - weight[:1]))
    return target


def passes(name: str, init: str, target: Transformer) -> float:
    """Return the mean passes per image of 16 codes; the drafter repeats its feature, which suits this target."""
    module = Eagle(EagleConfig.for_target(target.config)).eval()
    module.init_weights(target.tok_embeddings.weight, torch.Generator().manual_seed(0))
    method = METHODS[name].with_options(window=6, init=init)
    parts = build_decoder(method, target, sampling=Sampling(guidance=2), drafter_module=module)
    made = parts.generate(select(CONDITION, [0, 1] * 20), keys=[(3, i) for i in range(40)])
    return float(made.passes.float().mean())


@pytest.mark.parametrize("name", NAMES)
def test_independent_codes_take_few_passes_and_fewer_with_a_drafter(name: str) -> None:
    random = passes(name, "random", loose_target())
    assert random < 8
    assert passes(name, "drafter", loose_target()) < random


def test_coupling_takes_fewer_passes_than_independent_redraws() -> None:
    assert passes("scd", "random", TARGET) < passes("sjd", "random", TARGET)


# The distribution, against the enumerated one of pictures of four codes out of five.

PICTURES = 5000


def draw(verifier: Verifier, *, window: int, init: str, seed: int = 0) -> Generation:
    continuation = None
    if init == "drafter":
        module = tiny_eagle(SMALL)
        continuation = EagleChain(module, SMALL, window=window, length=2, is_gumbel=False, sampling=DISTRIBUTION)
    drafter = JacobiDrafter(SMALL, window=window, init=init, continuation=continuation)
    condition, keys = select(tiny_condition((3,)), [0] * PICTURES), [(seed, i) for i in range(PICTURES)]
    return loop.generate(SMALL, condition, sampling=DISTRIBUTION, keys=keys, drafter=drafter, verifier=verifier)


def test_enumerated_distribution_matches_plain_decoding() -> None:
    assert enumerated().sum() == pytest.approx(1.0, abs=1e-5)
    condition, keys = select(tiny_condition((3,)), [0] * PICTURES), [(0, i) for i in range(PICTURES)]
    assert p_value(plain.generate(SMALL, condition, sampling=DISTRIBUTION, keys=keys).codes) > 1e-4


@pytest.mark.parametrize("redraw", ["coupled", "independent"])
@pytest.mark.parametrize(("window", "init"), [(2, "random"), (3, "drafter"), (4, "random"), (4, "repeat-left")])
def test_windows_match_the_target_distribution(window: int, init: str, redraw: str) -> None:
    made = draw(CouplingVerifier(redraw), window=window, init=init)  # type: ignore[arg-type]
    assert p_value(made.codes) > 1e-4
    assert made.passes.float().mean() < 4


@dataclass(frozen=True)
class RecordsOldDistributions(CouplingVerifier):
    """Reports for kept codes the distribution they were first sampled from."""

    def walk(self, tree: DraftTree, log_p: Tensor, positions: Tensor, noise: NoiseSource) -> Verdict:
        verdict = super().walk(tree, log_p, positions, noise)
        assert verdict.leftovers is not None and tree.log_q is not None
        sampled = verdict.leftovers.tokens
        is_kept = torch.nn.functional.pad(sampled[:, :-1] == tree.tokens[:, 1:], (0, 1))
        distributions = torch.where(is_kept[..., None], tree.log_q, log_p)
        return replace(verdict, leftovers=Leftovers(sampled, distributions))


@dataclass(frozen=True)
class UsesUniformsTwice(CouplingVerifier):
    """Samples with the same uniforms in every step."""

    def walk(self, tree: DraftTree, log_p: Tensor, positions: Tensor, noise: NoiseSource) -> Verdict:
        return super().walk(tree, log_p, positions, Forgetful(noise))


class Forgetful:
    """Noise that does not depend on the step."""

    def __init__(self, noise: NoiseSource) -> None:
        self.gumbel, self._noise = noise.gumbel, noise

    def uniform(self, positions: Tensor, lanes: int, *, iterations: Tensor | None = None, purpose: int = 3) -> Tensor:
        return self._noise.uniform(positions, lanes)


@pytest.mark.parametrize("mutant", [RecordsOldDistributions(), UsesUniformsTwice()])
def test_mutants_change_the_distribution(mutant: CouplingVerifier) -> None:
    assert p_value(draw(mutant, window=4, init="repeat-left").codes) < 1e-6


def test_continuations_keep_their_state_in_place() -> None:
    continuation = EagleChain(tiny_eagle(SMALL), SMALL, window=3, length=2, is_gumbel=False, sampling=DISTRIBUTION)
    drafter, places = JacobiDrafter(SMALL, window=3, init="drafter", continuation=continuation), list[int]()
    made = loop.generate(
        SMALL,
        tiny_condition((3,)),
        sampling=DISTRIBUTION,
        keys=[(0, 0)],
        drafter=drafter,
        verifier=CouplingVerifier(),
        callback=lambda step: places.append(continuation.known.data_ptr()) if step.index else None,
    )
    assert len(places) == int(made.passes) - 1 > 1 and len(set(places)) == 1


# Errors.


def test_verifiers_without_leftovers_raise() -> None:
    drafter = JacobiDrafter(TARGET, keeps_distributions=False)
    counts = torch.ones(1, dtype=torch.long)
    verdict = Verdict(torch.zeros(1, 15, dtype=torch.long), counts * 0, counts)
    with pytest.raises(ValueError, match="returned no leftovers"):
        drafter.observe(Step(1, counts, counts, counts[:, None], verdict=verdict))


def test_windows_with_distributions_need_coupling() -> None:
    with pytest.raises(ValueError, match='mode "gumbel": use one of jacobi'):
        build_decoder(METHODS["scd"].with_spec(mode="gumbel"), TARGET, sampling=Sampling())
    with pytest.raises(ValueError, match='mode "jacobi": use one of iid, point, sampled'):
        build_decoder(METHODS["scd"].with_spec(verifier="rejection"), TARGET, sampling=Sampling())
    with pytest.raises(ValueError, match='mode "sampled": use one of jacobi'):
        odd = METHODS["eagle1-rejection"].with_spec(verifier="coupling")
        build_decoder(odd, TARGET, sampling=Sampling(), drafter_module=tiny_eagle(TARGET))
    built = build_decoder(METHODS["gumbel-jacobi"].with_spec(mode="jacobi"), TARGET, sampling=Sampling())
    assert torch.equal(built.generate(CONDITION, keys=KEYS).codes, expected(Sampling()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 1}, "window is 1, wanted a whole number from 2"),
        ({"init": "zero"}, 'init is "zero", wanted one of random, repeat-left, drafter'),
        ({"init": "drafter"}, "this model has none"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_decoder(METHODS["scd"].with_options(**settings), TARGET, sampling=Sampling())


def test_continuation_requires_its_init() -> None:
    with pytest.raises(ValueError, match="others take none"):
        JacobiDrafter(TARGET, init="drafter")
