"""ParallelSpec: drafts of one pass match training, and continued windows stay exact."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import DraftTree
from lantern.decoding import loop, plain
from lantern.drafters.heads.parallelspec import (
    ParallelChain,
    ParallelDrafter,
    ParallelSpec,
    ParallelSpecConfig,
    group_mask,
)
from lantern.drafters.trees.static import named
from lantern.drafters.windows.jacobi import JacobiDrafter
from lantern.methods.registry import METHODS, build_decoder
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from tests.drafters.whole import whole_pictures
from tests.tiny import select, tiny_condition, tiny_target
from tests.tiny_parts import tiny_part, tiny_parts

TARGET = tiny_target()
CONDITION = tiny_condition((4, 1, 6))
KEYS = [(9, 0), (9, 1), (4, 7)]
DRAWING = """
1 . . | . . | . .
1 1 . | . . | . .
1 1 1 | . . | . .
1 . . | 1 . | . .
1 . . | 1 1 | . .
1 1 . | . . | 1 .
1 1 . | . . | 1 1
"""


class Watched(ParallelDrafter):
    """Records the known codes and the guesses."""

    def begin(self, prefill, noise) -> None:  # type: ignore[no-untyped-def]
        self.seen: list[tuple[Tensor, Tensor]] = []
        super().begin(prefill, noise)

    def propose(self) -> DraftTree:
        guesses = self.context.guess(self._pairs, self._pairs.last)
        self.seen.append((self._pairs.known.clone(), guesses))
        return super().propose()  # staging the same pairs again changes nothing


@torch.no_grad()
@pytest.mark.parametrize("tree", ["chain_5", "grown_8_3"])
def test_drafts_match_training(tree: str) -> None:
    module, sampling = tiny_part("parallelspec", TARGET), Sampling(guidance=3)
    module.config = replace(module.config, anchors=99)  # behind every code
    drafter = Watched(module, TARGET, tree=named(tree), mode="gumbel", sampling=sampling)
    made = loop.generate(TARGET, CONDITION, sampling=sampling, keys=KEYS, drafter=drafter, verifier=GumbelVerifier())
    required = module.training_predictions(whole_pictures(TARGET, CONDITION, made.codes, 3.0), drafter.depth)
    compared = 0
    for known, guesses in drafter.seen:
        for image, count in enumerate(known.tolist()):
            for text in required:
                if count + text.depth - 1 < 16 and text.features is not None:
                    at = text.places.tolist().index(count + text.depth - 1)
                    torch.testing.assert_close(
                        guesses[image, text.depth - 1], text.features[image, at], atol=2e-4, rtol=1e-3
                    )
                    compared += 1
    assert compared > 60


def test_each_step_runs_one_drafter_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    guess = ParallelSpec.guess
    monkeypatch.setattr(
        ParallelSpec, "guess", lambda self, *given, **named: calls.append(1) or guess(self, *given, **named)
    )
    parts = build_decoder(METHODS["parallelspec"], TARGET, sampling=Sampling(), add_ons=tiny_parts(TARGET))
    made = parts.generate(select(CONDITION, [0]), keys=KEYS[:1])
    assert len(calls) == int(made.passes) - 1


def test_group_mask_matches_the_drawing() -> None:
    required = [[mark == "1" for mark in line.replace("|", "").split()] for line in DRAWING.split("\n") if line]
    assert group_mask(3, torch.tensor([0, 1]), 2).tolist() == required


@torch.no_grad()
def test_guesses_read_nothing_behind_their_anchor() -> None:
    module = tiny_part("parallelspec", TARGET)
    module.config = replace(module.config, anchors=99)
    codes = torch.randint(0, 24, (3, 16), generator=torch.Generator().manual_seed(0))
    before = whole_pictures(TARGET, CONDITION, codes, 3.0)
    changed = codes.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 24
    after = replace(before, codes=changed, rows=before.rows.index_fill(2, torch.tensor([8]), 1.0))
    for old, new in zip(*(module.training_predictions(given, 4) for given in (before, after)), strict=True):
        assert old.features is not None and new.features is not None
        is_same = (old.features - new.features).abs().amax(-1).amax(0) < 1e-5
        assert torch.equal(is_same, old.places - old.depth < 8)


def test_anchors_are_random_in_training_and_fixed_in_evaluation() -> None:
    module = ParallelSpec(ParallelSpecConfig.for_target(TARGET.config, anchors=5))
    device = torch.device("cpu")
    sampled = [module.train()._choose_anchors(15, device).tolist() for _ in range(8)]
    assert len({tuple(anchors) for anchors in sampled}) > 1
    assert all(len(set(anchors)) == 5 and anchors[0] == 0 and max(anchors) < 15 for anchors in sampled)
    assert module.eval()._choose_anchors(15, device).tolist() == [0, 3, 6, 9, 12]


@pytest.mark.parametrize("window", [2, 5, 8, 16])
@pytest.mark.parametrize(
    "sampling", [Sampling(guidance=1), Sampling(guidance=3, top_k=5), Sampling(guidance=4, guidance_interval=5)]
)
def test_continued_windows_equal_plain_decoding(window: int, sampling: Sampling) -> None:
    method = METHODS["jacobi-parallel"].with_options(window=window)
    parts = build_decoder(method, TARGET, sampling=sampling, add_ons=tiny_parts(TARGET))
    required = plain.generate(TARGET, CONDITION, sampling=sampling, keys=KEYS).codes
    for images in ([0, 1, 2], [1]):
        made = parts.generate(select(CONDITION, images), keys=[KEYS[i] for i in images])
        assert torch.equal(made.codes, required[images])


@torch.no_grad()
def test_guesses_behind_windows_match_training() -> None:
    module, sampling = tiny_part("parallelspec", TARGET), Sampling(guidance=3)
    module.config = replace(module.config, anchors=99)
    continuation = ParallelChain(module, TARGET, window=6, is_gumbel=False, sampling=sampling)
    codes = torch.randint(0, 24, (3, 16), generator=torch.Generator().manual_seed(3))
    given = whole_pictures(TARGET, CONDITION, codes, 3.0)
    required = module.training_predictions(given, 5)
    prefill, noise = FakePrefill(given.rows[:, :, :1], codes[:, 0]), FakeNoise()
    distributions = [continuation.begin(prefill, noise).log_q]  # type: ignore[arg-type]
    # A window of six codes of which two are committed, then one of six behind these.
    for start in (1, 3):
        there = slice(start, start + 6)
        left = continuation.extend(given.rows[:, :, there], codes[:, there], torch.full((3,), 2))
        distributions.append(left.log_q)
    for last, distribution in zip((0, 6, 8), distributions, strict=True):
        assert distribution is not None and distribution.shape[1] == 5
        for text in required:
            assert text.features is not None
            at = text.places.tolist().index(last + text.depth)
            expected = sampling.filtered(TARGET.head(text.features[:, at]))
            torch.testing.assert_close(distribution[:, text.depth - 1], expected, atol=1e-3, rtol=1e-3)


class FakePrefill:
    """Return what the chain reads of a prompt."""

    def __init__(self, features: Tensor, first: Tensor) -> None:
        self.features, self.first = features, first


class FakeNoise:
    """One half, everywhere."""

    def uniform(self, places: Tensor, lanes: int, **_: object) -> Tensor:
        return torch.full((*places.shape, lanes), 0.5, dtype=torch.float64)


def loose_target() -> tuple:
    """Return a target with almost independent codes, and a drafter that repeats its feature."""
    target = tiny_target()
    weight = target.tok_embeddings.weight.data
    weight.copy_(weight[:1] + 0.05 * (weight - weight[:1]))
    module = ParallelSpec(ParallelSpecConfig.for_target(target.config)).eval()
    module.init_for(target, torch.Generator().manual_seed(0))
    return target, module


def test_continued_windows_take_fewer_passes_than_random_ones() -> None:
    target, module = loose_target()
    passes = {}
    for init in ("random", "drafter"):
        method = METHODS["jacobi-parallel"].with_options(window=8, init=init)
        parts = build_decoder(method, target, sampling=Sampling(guidance=2), add_ons={"parallelspec": module})
        made = parts.generate(select(CONDITION, [0, 1] * 20), keys=[(3, i) for i in range(40)])
        passes[init] = float(made.passes.float().mean())
    assert passes["drafter"] < passes["random"] - 0.5


# Distributions with the drafter's own noise: pictures of four codes out of five.

SMALL = tiny_target(block_size=4, vocab_size=5)
DISTRIBUTION = Sampling(guidance=2)
PICTURES = 5000


def pairs_of(codes: Tensor) -> Tensor:
    return torch.stack([torch.bincount(codes[:, j] * 5 + codes[:, j + 1], minlength=25) for j in range(3)]) / PICTURES


def variation(codes: Tensor, other: Tensor) -> float:
    return float(((pairs_of(codes) - pairs_of(other)).abs().sum(1) / 2).max())


@pytest.fixture(scope="module")
def plain_codes() -> Tensor:
    condition, keys = select(tiny_condition((3,)), [0] * PICTURES), [(0, i) for i in range(PICTURES)]
    return plain.generate(SMALL, condition, sampling=DISTRIBUTION, keys=keys).codes


@pytest.mark.parametrize("tree", ["chain_3", "0 1 2 0.0 0.1 1.0 0.0.0"])
def test_sampled_trees_with_rejection_match_the_target_distribution(tree: str, plain_codes: Tensor) -> None:
    method = METHODS["parallelspec"].with_spec(mode="sampled", verifier="rejection", tree=tree)
    parts = build_decoder(method, SMALL, sampling=DISTRIBUTION, add_ons=tiny_parts(SMALL))
    made = parts.generate(select(tiny_condition((3,)), [0] * PICTURES), keys=[(7, i) for i in range(PICTURES)])
    assert variation(made.codes, plain_codes) < 0.06  # two samples of 5,000 differ by about 0.035
    assert made.passes.float().mean() < 4


def test_continued_coupled_windows_match_the_target_distribution(plain_codes: Tensor) -> None:
    chain = ParallelChain(tiny_part("parallelspec", SMALL), SMALL, window=3, is_gumbel=False, sampling=DISTRIBUTION)
    drafter = JacobiDrafter(SMALL, window=3, init="drafter", continuation=chain)
    condition, keys = select(tiny_condition((3,)), [0] * PICTURES), [(7, i) for i in range(PICTURES)]
    made = loop.generate(
        SMALL, condition, sampling=DISTRIBUTION, keys=keys, drafter=drafter, verifier=CouplingVerifier("coupled")
    )
    assert variation(made.codes, plain_codes) < 0.06


# Errors.


def test_too_deep_trees_raise() -> None:
    module = ParallelSpec(ParallelSpecConfig.for_target(TARGET.config, depths=2))
    with pytest.raises(ValueError, match="guesses 2 codes"):
        ParallelDrafter(module, TARGET, tree=named("chain_3"), mode="gumbel", sampling=Sampling())


@pytest.mark.parametrize("fields", [{"depths": 0}, {"depths": 65}, {"anchors": 0}, {"form": "rows"}])
def test_invalid_configs_raise(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="wanted"):
        ParallelSpecConfig.for_target(TARGET.config, **fields)
