"""The bounded relaxation in C++: the law and the price of the one in torch, and windows that go by it."""

import copy
import ctypes
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.catalog import METHODS, Engine, Parts, build
from lantern.kernels import turns
from lantern.kernels.build import library
from lantern.kernels.relaxing import Relaxing, Rules
from lantern.relaxations.bounded import Bounded
from lantern.relaxations.neighbours import proximity_distances, proximity_table
from lantern.sampling import Sampling
from lantern.types import Relaxed, Step
from tests.tiny import tiny_condition, tiny_target

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, with which fused passes are built")

VOCAB = 64
CODEBOOK = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(0))
TABLE = proximity_table(CODEBOOK, 20)
DISTANCES = proximity_distances(CODEBOOK, TABLE)
CONDITION = tiny_condition((4, 1, 6))
KEYS = [(9, 0), (9, 1), (4, 7)]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"delta": 0.05},
    {"delta": 1.0, "cap": 1e6, "k": 20},
    {"width": 5, "rounds": 4},
    {"width": 1000, "k": 1, "distances": DISTANCES[:, :3]},
    {"distances": None},
]


def bounded(**changes: Any) -> Bounded:
    return Bounded(TABLE, **({"k": 10, "distances": DISTANCES} | changes))


def relax(by: Bounded, p: Tensor, q: Tensor) -> Relaxed:
    """As `Bounded.relax`, of probabilities."""
    rules, r = Rules(by), p.clone()
    spent, travelled = torch.zeros(2, len(r)).unbind()
    tensors: list[Any] = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (r, q, spent, travelled)]
    library().lantern_relax(ctypes.byref(rules.told), *map(ctypes.c_int32, r.shape), *tensors)
    return Relaxed(r.log(), spent, None if by.distances is None else travelled)


def laws(kind: str, count: int = 200) -> Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    scale = {"flat": 0.3, "peaked": 6.0}.get(kind, 1.5)
    logits = scale * torch.randn(count, VOCAB, generator=generator)
    if kind == "filtered":
        logits = logits.masked_fill(torch.rand(count, VOCAB, generator=generator) < 0.8, -torch.inf)
        logits[:, 3] = 0.0
    if kind == "single":
        logits = torch.full_like(logits, -torch.inf).scatter(1, logits.argmax(1, keepdim=True), 0.0)
    return logits.softmax(-1)


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
@pytest.mark.parametrize("q", ["flat", "peaked", "filtered", "single"])
@pytest.mark.parametrize("p", ["flat", "usual", "filtered"])
def test_laws_and_prices_are_those_of_the_slow_version(p: str, q: str, changes: dict[str, Any]) -> None:
    by, target, draft = bounded(**changes), laws(p), laws(q)
    expected = by.relax(target.log(), draft.log(), depths=torch.zeros(len(target), dtype=torch.long), levels=1)
    found = relax(by, target, draft)
    assert torch.allclose(found.log_r.exp(), expected.log_r.exp(), atol=2e-6)
    assert torch.allclose(found.total_variation, expected.total_variation, atol=2e-6)
    assert (found.latent_distance is None) == (expected.latent_distance is None)
    if found.latent_distance is not None and expected.latent_distance is not None:
        assert torch.allclose(found.latent_distance, expected.latent_distance, rtol=1e-5, atol=1e-5)
    moved = (found.log_r.exp() - target).abs().sum(-1) / 2
    assert (moved <= by.delta + 1e-6).all() and torch.allclose(moved, found.total_variation, atol=2e-6)


def test_who_wants_most_asks_first_whatever_stands_before_it() -> None:
    """Many codes want the same little: only one of them may ask beside the one that wants much."""
    target = torch.full((1, VOCAB), 1 / VOCAB)
    draft = target - 0.002
    draft[:, :10] = 1 / VOCAB + 0.001
    draft[:, 40] += 1 - draft.sum()
    by = bounded(width=2, delta=1.0, k=20)
    expected = by.relax(target.log(), draft.log(), depths=torch.zeros(1, dtype=torch.long), levels=1).log_r.exp()
    found = relax(by, target, draft).log_r.exp()
    assert expected[0, 40] > target[0, 40] + 0.005 and found[0, 40] > target[0, 40] + 0.005
    assert (found[0, :10] > target[0, :10]).sum() == 1


def test_no_law_moves_toward_itself() -> None:
    target = laws("usual")
    found = relax(bounded(), target, target)
    assert torch.equal(found.log_r.exp(), target.log().exp()) and not found.total_variation.any()


def parts_of(sampling: Sampling, **options: Any) -> Parts:
    shape: dict[str, Any] = {"block_size": 64, "dim": 64, "n_head": 2, "vocab_size": VOCAB}
    method = METHODS["bounded-window"].with_options(**({"k": 10} | options))
    how: dict[str, Any] = {"neighbours": TABLE, "codebook": CODEBOOK, "engine": Engine(fused=True)}
    return build(method, tiny_target(**shape), sampling=sampling, **how)


LAWS = [
    Sampling(guidance=3.0),
    Sampling(guidance=1.0, temperature=0.7),
    Sampling(guidance=7.5, guidance_interval=20, temperature=1.3),
    Sampling(guidance=3.0, top_k=9),
]
WINDOWS: list[dict[str, Any]] = [
    {"window": 2},
    {"window": 5, "init": "random"},
    {"window": 16, "delta": 0.6},
    {"window": 80, "init": "random"},  # wider than the picture
]


@pytest.mark.parametrize("options", WINDOWS, ids=str)
@pytest.mark.parametrize("sampling", LAWS, ids=str)
def test_relaxed_turns_make_the_codes_and_tell_the_price_of_the_loop(
    options: dict[str, Any], sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(sampling, **options)
    with monkeypatch.context() as patch:
        patch.setattr(turns, "fits", lambda *_: False)
        expected = parts.generate(CONDITION, keys=KEYS)
    monkeypatch.setattr(parts.target, "forward", None)  # no pass but those of turns
    found = parts.generate(CONDITION, keys=KEYS)
    for name in ("codes", "passes", "accepted", "reached", "is_finite"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in ("relaxed", "total_variation", "total_variation_max", "latent_distance"):
        assert torch.allclose(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-5), name
    assert found.total_variation.gt(0).all()


def test_callbacks_see_laws_and_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, seen = parts_of(LAWS[0], window=5), list[list[Step]]([[], []])

    def watch(into: list[Step], step: Step) -> None:
        into.append(copy.deepcopy(step))

    with monkeypatch.context() as patch:
        patch.setattr(turns, "fits", lambda *_: False)
        parts.generate(CONDITION, keys=KEYS, callback=lambda step: watch(seen[0], step))
    found = parts.generate(CONDITION, keys=KEYS, callback=lambda step: watch(seen[1], step))
    assert torch.equal(found.codes, parts.generate(CONDITION, keys=KEYS).codes)
    assert len(seen[0]) == len(seen[1])
    for a, b in zip(*seen, strict=True):
        if a.verdict is None or b.verdict is None or a.tree is None or b.tree is None:
            assert a.index == b.index == 0
            continue
        assert a.tree.log_q is not None and b.tree.log_q is not None
        for image, count in enumerate(a.counts.tolist()):
            if count == 0:
                continue  # a finished picture idles
            assert torch.equal(a.tree.tokens[image], b.tree.tokens[image])
            laws_of_drafts = (tree.log_q[image, :-1].exp() for tree in (a.tree, b.tree) if tree.log_q is not None)
            assert torch.allclose(*laws_of_drafts, atol=1e-5)
            accepted = min(int(a.verdict.length[image]), count)
            for name, said in (("relaxed", accepted), ("total_variation", count), ("latent_distance", count)):
                one, other = (getattr(verdict, name)[image, :said] for verdict in (a.verdict, b.verdict))
                assert torch.allclose(one, other, atol=1e-5), name


def test_a_window_that_forgets_its_laws_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(LAWS[0], window=5)
    expected = parts.generate(CONDITION, keys=KEYS)
    monkeypatch.setattr(Relaxing, "begin", lambda *_, **__: None)
    assert not torch.allclose(parts.generate(CONDITION, keys=KEYS).total_variation, expected.total_variation)


@pytest.mark.parametrize("options", [{"delta": 0.0}, {"cap": 1.0}, {"k": 0}], ids=str)
def test_windows_that_are_not_relaxed_are_plain_decoding_code_for_code(options: dict[str, Any]) -> None:
    parts = parts_of(LAWS[0], window=5, **options)
    plain = build("plain", parts.target, sampling=LAWS[0], engine=Engine(fused=True))
    assert torch.equal(parts.generate(CONDITION, keys=KEYS).codes, plain.generate(CONDITION, keys=KEYS).codes)


def test_laws_of_nan_are_noticed() -> None:
    parts = parts_of(LAWS[0], window=5)
    parts.target.layers[1].feed_forward.w2.weight.data[3, 5] = torch.nan  # type: ignore[attr-defined]
    made = parts.generate(CONDITION, keys=KEYS)
    assert made.is_finite is not None and not made.is_finite.any()
