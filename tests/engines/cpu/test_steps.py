"""Fused steps in C++: tokens and statistics equal those of the loops."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Purpose, Sampling, purpose_key, random_gumbel
from lantern.core.types import Generation, Step
from lantern.decoding.loop import State, begin
from lantern.decoding.rounds import TorchRounds
from lantern.drafters.windows import TRIAL, JacobiDrafter
from lantern.engines.cpu.engine import CpuEngine, is_fused
from lantern.engines.cpu.target import gumbel
from lantern.generation.generator import Decoder
from lantern.models.llamagen.transformer import Transformer
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.distributions import Mixture
from lantern.verifiers.relaxations.neighbours import Lantern
from lantern.verifiers.relaxed import RelaxedVerifier
from tests.tiny import wide_target
from tests.tiny_decoder import CONDITION, KEYS, tiny_decoder
from tests.tiny_parts import tiny_part

TOKENS = 64  # of images whose steps are compared
DISTRIBUTIONS = [
    Sampling(guidance=3.0),
    Sampling(guidance=1.0, temperature=0.7),
    Sampling(guidance=7.5, guidance_interval=20, temperature=1.3),
    Sampling(guidance=3.0, top_k=5),
    Sampling(guidance=3.0, temperature=0.0),
    Sampling(guidance=3.0, guidance_interval=2**32 + 1, top_k=2**32 + 1),  # more than C++ holds in these numbers
]
WINDOWS: list[dict[str, Any]] = [
    {"window": 2},
    {"window": 5, "init": "random"},
    {"window": 16},
    {"window": 80, "init": "random"},  # wider than the picture
    {"window": 4, "least": 3.9},  # given up after the first steps
]
RELAXED: list[dict[str, Any]] = [
    {"method": "bounded-window", "window": 5},
    {"method": "bounded-window", "window": 16, "init": "random", "delta": 0.4},
    {"method": "bounded-window", "window": 80, "cap": 3.0},
]
DRAFTED: list[dict[str, Any]] = [
    {"method": "eagle1", "tree": "chain_3"},
    {"method": "eagle1", "tree": "0 1 0.0 0.1 1.0 0.0.0 1.0.0 1.0.0.0"},
    {"method": "parallelspec", "tree": "chain_4"},
    {"method": "parallelspec", "tree": "grown_8_3"},
]
TESTED: list[dict[str, Any]] = [  # by rejection, whose probabilities are rounded otherwise
    {"method": "eagle1-rejection", "tree": "grown_8_2"},
    {"method": "lantern", "tree": "chain_3", "k": 8, "delta": 0.3},
    {"method": "lantern", "tree": "grown_8_3", "k": 8, "delta": 0.3, "residual": "released"},
    {"method": "lantern", "tree": "grown_8_3", "k": 6, "delta": 0.1, "residual": "cool", "shared": True},
    {"method": "lantern++", "tree": "naive_extend_57", "k": 5, "lambda_": 5.0},
    {"method": "lantern", "tree": "chain_4", "k": 8, "delta": 0.3, "drafts": "parallelspec"},
    {"method": "parallelspec-paper", "tree": "grown_8_3"},
]
CLAIMING = TESTED[1:6]


def parts_of(target: Transformer, sampling: Sampling, options: dict[str, Any] | None) -> Decoder:
    name = "plain" if options is None else "gumbel-jacobi"
    settings: dict[str, Any] = {"method": name} | (options or {})
    own, dtype = copy.deepcopy(target), target.tok_embeddings.weight.dtype
    parts = {"parallelspec": tiny_part("parallelspec", target).to(dtype)}
    return tiny_decoder(target=own, sampling=sampling, engine=CpuEngine(), add_ons=parts, **settings)


def by_the_loop(parts: Decoder, monkeypatch: pytest.MonkeyPatch, **watching: Any) -> Generation:
    with monkeypatch.context() as patch:
        patch.setattr(CpuEngine, "drive", lambda _, states: TorchRounds(states))
        patch.setattr(parts.target, "sampler", lambda *_: None)  # the loop's own, by torch
        patch.setattr(parts.target, "make_gumbel", None)
        return parts.generate(CONDITION, keys=KEYS, **watching)


# options with every other sampling, and in turn with each dtype; at temperature 0 nothing is relaxed or drawn
CASES = [
    (options, sampling, (torch.float32, torch.bfloat16)[j // 2 % 2])
    for i, options in enumerate([None, *WINDOWS, *RELAXED, *DRAFTED, *TESTED])
    for j, sampling in enumerate(DISTRIBUTIONS)
    if (i + j) % 2 == 0 and not (options in (*RELAXED, *TESTED) and sampling.is_greedy)
]
# the drafts behind the first are less probable than e^-60
CASES += [(options, Sampling(guidance=7.5, temperature=0.01), torch.float32) for options in TESTED[2:4]]


@pytest.mark.parametrize(("options", "sampling", "dtype"), CASES, ids=str)
def test_fused_steps_give_tokens_and_statistics_of_the_loop(
    options: dict[str, Any] | None, sampling: Sampling, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(wide_target(block_size=36).to(dtype), sampling, options)
    expected = by_the_loop(parts, monkeypatch)
    monkeypatch.setattr(parts.target, "forward", None)  # no pass except those of fused steps
    found = parts.generate(CONDITION, keys=KEYS)
    for name in ("tokens", "steps", "accepted", "reached", "relaxed", "is_finite"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in ("total_variation", "total_variation_max", "latent_distance", "excess"):
        mine, its = getattr(found, name), getattr(expected, name)
        assert (mine is None) == (its is None) and (mine is None or near(mine, its, options)), name
    is_moved = found.total_variation > 0
    assert bool(is_moved.any()) == (options in (*RELAXED, *CLAIMING)) and (options not in RELAXED or is_moved.all())


def near(one: Tensor, other: Tensor, options: dict[str, Any] | None) -> bool:
    """Return whether tensors are equal, up to the rounding of probabilities where drafts are tested by rejection."""
    return torch.allclose(one, other, rtol=0.0, atol=1e-4 if options in TESTED else 0.0)


def seen_of(step: Step, image: int) -> dict[str, Any]:
    """Return what a step says of an image up to its end: drafts and verdict may have more than the image has."""
    count, tree, verdict = int(step.counts[image]), step.tree, step.verdict
    # nodes that predict a token of the image; what others give is not read
    inside = (torch.zeros(1) if tree is None else tree.shape.depths.flatten()) < TOKENS - step.start[image]
    seen: dict[str, Any] = {"start": step.start[image], "tokens": step.tokens[image, :count]}
    seen |= {"logits": step.scores.logits[image][:, inside].clone()}
    if tree is not None and verdict is not None:
        seen |= {"drafts": tree.tokens[image, inside], "path": verdict.path[image, : count - 1]}
        seen |= {"length": verdict.length[image].clamp(max=count - 1)}
        if (cost := verdict.cost) is not None:
            seen |= {"relaxed": cost.relaxed[image, : count - 1], "spent": cost.total_variation[image, :count]}
            seen |= {} if cost.latent_distance is None else {"moved": cost.latent_distance[image, :count]}
    return seen


@pytest.mark.parametrize(
    "options", [None, {"window": 5}, {"window": 16, "init": "random"}, *RELAXED[:2], *DRAFTED, *TESTED], ids=str
)
def test_callbacks_see_the_steps_of_the_loop(options: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(wide_target(block_size=TOKENS), DISTRIBUTIONS[0], options)

    def watched(run: Callable[..., Generation]) -> tuple[Generation, list[tuple[Step, list[dict[str, Any]]]]]:
        seen = list[tuple[Step, list[dict[str, Any]]]]()

        def watch(step: Step) -> None:
            seen.append((step, [seen_of(step, image) for image in range(len(KEYS))]))

        return run(callback=watch), seen

    expected, loop = watched(lambda **how: by_the_loop(parts, monkeypatch, **how))
    found, fused = watched(lambda **how: parts.generate(CONDITION, keys=KEYS, **how))
    assert torch.equal(found.tokens, expected.tokens)
    for (a, looped), (b, joined) in zip(loop, fused, strict=True):
        assert a.index == b.index and torch.equal(a.counts, b.counts)
        for image in a.counts.nonzero().flatten().tolist():  # others are finished, and idle
            one, other = looped[image], joined[image]
            assert one.keys() == other.keys() and torch.equal(one["logits"], other["logits"])
            assert all(near(one[name], other[name], options) for name in one)
            assert torch.equal(one["tokens"], b.tokens[image, : int(b.counts[image])])


@pytest.mark.parametrize("options", [None, {"window": 5}], ids=str)
def test_with_an_interval_a_callback_gets_some_of_the_steps(options: dict[str, Any] | None) -> None:
    parts, every, some = parts_of(wide_target(block_size=36), DISTRIBUTIONS[0], options), list[Step](), list[Step]()
    expected = parts.generate(CONDITION, keys=KEYS, callback=every.append)
    found = parts.generate(CONDITION, keys=KEYS, callback=some.append, interval=60.0)
    assert torch.equal(found.tokens, expected.tokens)
    assert 1 < len(some) <= 1 + len(KEYS) < len(every) and some[-1].index == every[-1].index
    by_index = {step.index: step for step in every}
    for step in some:
        same = by_index[step.index]
        assert torch.equal(step.counts, same.counts) and torch.equal(step.start, same.start)


@pytest.mark.parametrize("watching", [{}, {"callback": lambda _: None}], ids=["alone", "watched"])
def test_a_window_that_commits_too_few_tokens_is_given_up(watching: dict[str, Any]) -> None:
    sampling, target = Sampling(guidance=1.0), wide_target(block_size=36)  # random weights: drafts are seldom right
    kept, given_up = (parts_of(target, sampling, {"window": 4, "least": least}) for least in (1.0, 3.0))
    mine, its = (parts.generate(CONDITION, keys=KEYS, **watching) for parts in (given_up, kept))
    assert torch.equal(mine.tokens, its.tokens)
    assert (mine.steps >= its.steps).all() and (mine.steps > its.steps).any()
    tested = mine.reached[:, 0]
    assert int(tested.max()) == TRIAL < int(its.reached[:, 0].min())


@pytest.mark.parametrize("options", [None, {"window": 5}, RELAXED[0], TESTED[1]], ids=str)
def test_nan_logits_are_reported_per_picture(options: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    target = wide_target(block_size=36, vocab_size=256)
    made = parts_of(target, DISTRIBUTIONS[0], options).generate(CONDITION, keys=KEYS)
    tokens = [set(row[:-1].tolist()) for row in made.tokens]
    only = next(iter(tokens[2] - tokens[0] - tokens[1]))
    target.tok_embeddings.weight.data[only] = torch.nan
    parts = parts_of(target, DISTRIBUTIONS[0], options)
    found = parts.generate(CONDITION, keys=KEYS).is_finite
    is_relaxed = options in RELAXED  # then the drafts' rows count too
    assert found is not None and not found[2] and (is_relaxed or found.tolist() == [True, True, False])
    expected = by_the_loop(parts, monkeypatch).is_finite
    assert expected is not None and torch.equal(found, expected)


def test_noise_equals_that_of_torch() -> None:
    seeds, images = torch.tensor([0, 7, 2**63 - 1]), torch.tensor([3, 2**40 + 5, 0])
    key = purpose_key(seeds, Purpose.TARGET)
    for positions, count in ((torch.arange(9), 32), (torch.tensor([8, 3]), 13), (torch.tensor([1, 8]), 150)):
        expected, found = torch.zeros(2, 3, 9, count).unbind()
        random_gumbel(key, images, positions, expected)
        gumbel(key, images, positions, found)
        assert torch.equal(found, expected)


def test_patient_steps_end_when_an_image_is_complete() -> None:
    parts = parts_of(wide_target(block_size=36), DISTRIBUTIONS[0], None)
    early, late = (parts.begin(CONDITION.select([i]), keys=KEYS[i : i + 1], is_joined=True) for i in range(2))
    alone = parts.engine.drive([early])
    for _ in range(5):
        alone()
    parts.engine.drive([early, late], alone)(patience=60.0)
    assert early.is_done() and (int(early.known), int(late.known)) == (36, 31)


def test_a_picture_of_one_token_needs_no_step_and_steps_are_timed() -> None:
    for options in (None, {"window": 5}):
        parts = parts_of(wide_target(block_size=1), DISTRIBUTIONS[0], options)
        made = parts.generate(CONDITION, keys=KEYS, callback=lambda step: None)
        assert made.tokens.shape == (3, 1) and made.steps.tolist() == [1, 1, 1]
    parts = parts_of(wide_target(), DISTRIBUTIONS[0], {"window": 5})
    made = parts.generate(CONDITION, keys=KEYS, is_timed=True)
    assert set(made.seconds) == {"prefill", "score", "walk"} and min(made.seconds.values()) > 0


def test_unsupported_parts_are_decoded_by_the_loop() -> None:
    target, engine = wide_target(block_size=36), CpuEngine()

    def fits(name: str, sampling: Sampling = DISTRIBUTIONS[0], **options: Any) -> bool:
        decoder = tiny_decoder(name, target, sampling, engine=engine, **options)
        return is_fused(decoder.begin(CONDITION, keys=KEYS))

    drafted = ("eagle1", "parallelspec", "eagle1-rejection", "lantern", "lantern++")
    assert all(fits(name) for name in ("plain", "gumbel-jacobi", "bounded-window", *drafted))
    assert not any(fits(name) for name in ("cool", "grouped", "eagle1-traversal", "lantern-paper"))
    assert not fits("lantern", Sampling(temperature=0.0)) and not fits("lantern", form="rows")
    assert not fits("bounded-window", mode="coupled")
    assert not fits("plain", Sampling(top_p=0.9)) and not fits("gumbel-jacobi", Sampling(top_p=0.9))
    assert not any(fits(name) for name in ("eagle2", "poss", "medusa", "sjd")) and not fits("eagle1", form="rows")
    assert not is_fused(tiny_decoder("plain", target).begin(CONDITION, keys=KEYS))


def test_subclasses_which_may_decide_otherwise_are_run_by_the_loop() -> None:
    target = CpuEngine().prepare(wide_target(block_size=36))

    def fits(window: type[JacobiDrafter], match: type[GumbelVerifier], rule: type[Mixture] | None = None) -> bool:
        drafter = window(target, window=4, keeps_distributions=rule is not None)
        verifier = match() if rule is None else RelaxedVerifier(rule(), match())
        return is_fused(begin(State(target, DISTRIBUTIONS[0], drafter, verifier), CONDITION, keys=KEYS))

    window, match, rule = (cast(Any, type("Own", (kind,), {})) for kind in (JacobiDrafter, GumbelVerifier, Mixture))
    assert fits(JacobiDrafter, GumbelVerifier) and fits(JacobiDrafter, GumbelVerifier, Mixture)
    assert not fits(window, GumbelVerifier) and not fits(JacobiDrafter, match)
    assert not fits(window, GumbelVerifier, Mixture) and not fits(JacobiDrafter, match, Mixture)
    assert not fits(JacobiDrafter, GumbelVerifier, rule)
    tested = tiny_decoder("lantern", wide_target(block_size=36), DISTRIBUTIONS[0], engine=CpuEngine())
    test: Any = tested.verifier
    own = type("Own", (Lantern,), {})(test.relaxation.table, 3), type("Own", (RejectionVerifier,), {})()
    for verifier, fits_too in ((test, True), (RejectionVerifier(own[0]), False), (own[1], False)):
        tested.verifier = verifier
        assert is_fused(tested.begin(CONDITION, keys=KEYS)) == fits_too
