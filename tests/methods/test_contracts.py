"""What every method of the catalogue promises: a matrix of methods and cases. A method is checked by being listed."""

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Callback, Generation, Step
from lantern.decoding.loop import ForcedTokens
from lantern.engines.engine import EAGER, engine
from lantern.methods import METHODS, Method
from lantern.models.llamagen.transformer import Transformer
from tests.proof.pictures import DISTRIBUTION, PICTURES, SMALL, distance, p_value, pictures
from tests.tiny import tiny_target, wide_target
from tests.tiny_decoder import BLIND, CONDITION, KEYS, TARGET, shrunk, tiny_decoder


def variants() -> Iterator[tuple[str, Method]]:
    """Yield methods with trees and windows past the end of a small grid, and with other first drafts."""
    for name, small in METHODS.items():
        if small.tree:
            yield f"{name} chain_12", small.with_options(tree="chain_12")
        if "window" in small.options:
            for window in (4, 64):
                yield f"{name} {window}", small.with_options(window=window)
            for init in ("random", "repeat-left") if "init" in small.options else ():
                yield f"{name} {init}", small.with_options(window=5, init=init)


VARIANTS = dict(variants())
SPECS: dict[str, Method] = dict(METHODS) | VARIANTS
SAMPLED = Sampling(guidance=3)
GREEDY = Sampling(guidance=3, temperature=0)
TOP_K = Sampling(guidance=1, temperature=0.7, top_k=6)
TOP_P = Sampling(guidance=4, top_p=0.8, guidance_interval=5)
# given tokens: kept rows, an inner hole, and scattered ones with the last; the same beginning in all images; all but
# the first, so that all of them are drafts
HOLES, KEPT = torch.full((2, 3, 16), -1).unbind()
HOLES[0, :8] = torch.arange(8)
HOLES[1] = torch.tensor([5, 6, 7, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, 14, 15, 16])
HOLES[2, ::3] = 23
KEPT[:, :9] = torch.arange(27).view(3, 9) % 24
KEPT[1, 9:11], KEPT[2, 14] = 3, 20
ALL = torch.arange(48).view(3, 16) % 24
ALL[:, 0] = -1
STATISTICS = ["tokens", "steps", "accepted", "reached", "relaxed", "total_variation", "latent_distance", "excess"]
FORCED = {"holes": HOLES, "kept": KEPT, "all": ALL}


@dataclass(frozen=True)
class Case:
    """The sampling, images, given tokens, side of the grid, form of the drafter and engine of a generation."""

    sampling: Sampling = SAMPLED
    images: tuple[int, ...] = (0, 1, 2)
    forced: str = ""
    side: int = 4
    form: str = "guided"
    engine: str = "eager"

    @property
    def target(self) -> Transformer:
        return TARGET if (self.side, self.engine) == (4, "eager") else target_of(self.side, self.engine == "cpu")


@cache
def target_of(side: int, is_wide: bool) -> Transformer:
    return (wide_target if is_wide else tiny_target)(block_size=side**2)


CASES = {
    "sampled": Case(),
    "greedy": Case(GREEDY, form="rows"),
    "top-k": Case(TOP_K, (2, 0)),
    "top-p": Case(TOP_P, form="rows"),
    "alone": Case(images=(1,)),
    "holes": Case(forced="holes"),
    "kept": Case(TOP_K, forced="kept"),
    "greedy kept": Case(GREEDY, forced="kept", form="rows"),
    "all forced": Case(forced="all"),
    "one token": Case(side=1),
    "one token, rows": Case(side=1, form="rows"),
    "small greedy grid": Case(Sampling(guidance=1, temperature=0), side=2),
    "small grid": Case(TOP_P, side=2),
    "blind": Case(TOP_P, engine="blind"),
    "cpu": Case(TOP_K, (1, 2), engine="cpu"),
    "cpu holes": Case(forced="holes", engine="cpu"),
}


def decode(name: str, case: Case, callback: Callback | None = None) -> Generation:
    """Decode a case; given tokens that all images keep are read four in a pass, or decoded where all are given."""
    chosen = {"eager": EAGER, "blind": BLIND}.get(case.engine) or engine(case.engine)
    decoder = tiny_decoder(SPECS[name], case.target, case.sampling, form=case.form, engine=chosen)
    forced = FORCED[case.forced][list(case.images)] if case.forced else None
    keys = [KEYS[i] for i in case.images]
    decodes_rest = patch.object(ForcedTokens, "end", 16) if case.forced == "all" else nullcontext()
    with patch("lantern.decoding.cache.READ_TOKENS", 4), decodes_rest:
        condition, how = CONDITION.select(case.images), {"keys": keys, "forced": forced, "callback": callback}
        return decoder.generate(condition, **how)


@cache
def plainly(case: Case) -> Tensor:
    """Return the tokens of plain decoding, token by token also where tokens are given."""
    with patch.object(ForcedTokens, "common_prefix", 1):
        return decode("plain", replace(case, engine="cpu" if case.engine == "cpu" else "eager")).tokens


# By default a method runs a fifth of the cases, and its neighbours in the catalogue, mostly its likes, the others.
QUICK = ("one token", "one token, rows", "small greedy grid")  # these it runs always
MATRIX = [
    pytest.param(name, case, marks=[pytest.mark.slow] if (i + j) % 5 and case not in QUICK else [])
    for i, name in enumerate(sorted(METHODS, key=lambda name: "-paper" in name))
    for j, case in enumerate(CASES)
]
MATRIX += [pytest.param(name, "small greedy grid") for name in VARIANTS]


@pytest.mark.parametrize(("name", "case"), MATRIX)
def test_every_method_keeps_its_promise(name: str, case: str) -> None:
    if CASES[case].engine == "cpu" and shutil.which("g++") is None:
        pytest.skip("needs g++")
    method, given = SPECS[name], CASES[case]
    together = replace(given, images=(0, 1, 2), engine="eager")
    seen = list[tuple[Step, dict[str, Tensor]]]()
    made = decode(name, given, lambda step: seen.append((step, {key: x.clone() for key, x in reported(step)})))
    check_account(method, given, made, [step for step, _ in seen])
    for step, before in seen:  # rounds write in place, but what a step reported stays as it was
        assert [key for key, x in reported(step) if not torch.equal(x, before[key])] == []
    if given.forced:
        forced = FORCED[given.forced]
        assert torch.equal(made.tokens[forced >= 0], forced[forced >= 0])
    if given.forced == "all" and method.made.front is None:
        assert torch.equal(made.accepted, made.reached)
    if given.forced == "kept":  # read at once: the prompt, two passes, and at most one for each of the other tokens
        assert seen[0][0].counts.tolist() == [9, 9, 9] and (made.steps <= 1 + 2 + 7).all()
    if method.promise == "tokens" or (method.exact and given.sampling.is_greedy):
        assert torch.equal(made.tokens, plainly(given))
    # images depend on their keys alone, unless a policy chooses sizes of trees for the whole batch
    elif given.engine != "cpu" and given != together and not method.made.needs_host:
        whole = decode(name, together)
        for field in STATISTICS:
            one, other = getattr(made, field), getattr(whole, field)
            exact = 0.0 if given.engine == "blind" else 1e-4  # else products of other sizes round in other ways
            assert one is other is None or torch.allclose(one, other[list(given.images)], atol=exact, rtol=0), field


def reported(step: Step) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a step with their names."""
    for owner in (step, step.tree, step.tree and step.tree.shape, step.verdict):
        for name, entry in vars(owner).items() if owner is not None else ():
            if isinstance(entry, Tensor):
                yield f"{type(owner).__name__}.{name}", entry


def check_account(method: Method, case: Case, made: Generation, steps: list[Step]) -> None:
    tokens, config = made.tokens.shape[1], case.target.config
    assert made.tokens.shape == (len(case.images), config.block_size) and made.tokens.dtype == torch.int64
    assert (made.tokens >= 0).all() and (made.tokens < config.vocab_size).all() and made.is_finite.all()
    assert (made.steps >= 1).all() and (made.steps <= tokens).all() and (made.accepted <= made.reached).all()
    written = torch.full_like(made.tokens, -1)
    for step in steps:
        for image, (start, count) in enumerate(zip(step.start.tolist(), step.counts.tolist(), strict=True)):
            assert (written[image, start : start + count] == -1).all()
            written[image, start : start + count] = step.tokens[image, :count]
            if step.tree is not None and step.verdict is not None:
                path = step.verdict.path[image, : min(int(step.verdict.length[image]), count)]
                assert torch.equal(step.tree.tokens[image, path], step.tokens[image, : len(path)])
    assert torch.equal(written, made.tokens)
    if case.forced != "kept" and method.made.front is None:  # a path may end one token past the image
        total = made.steps + made.accepted.sum(1)
        assert (total >= tokens).all() and (total <= tokens + 1).all()
    if method.exact:
        assert made.relaxed.sum() == 0 and made.total_variation.sum() == 0
        return
    assert made.total_variation_max is not None and (made.total_variation_max <= 1 + 1e-6).all()
    assert (made.total_variation <= tokens * made.total_variation_max + 1e-6).all()
    assert (made.relaxed >= 0).all() and (made.relaxed <= made.accepted.sum(1) + 1e-6).all()
    if case.forced == "all" and method.made.front is None:  # nothing is relaxed at given tokens
        assert made.total_variation.abs().max() < 1e-6 and made.relaxed.abs().max() < 1e-6


@pytest.mark.parametrize("name", [name for name, m in METHODS.items() if m.promise == "distribution"])
def test_other_exact_methods_have_the_distribution_of_the_target(name: str) -> None:
    """Whole images of 4 tokens out of 5, against the enumerated distribution."""
    built = tiny_decoder(shrunk(SPECS[name]), SMALL, DISTRIBUTION)  # large trees cover all pictures and take minutes
    assert p_value(pictures(built, PICTURES).tokens) > 1e-4


@pytest.mark.parametrize(
    ("name", "forced"),
    [("scd", (3, 1, -1, -1)), *((name, (-1, -1, 3, -1)) for name in ("sjd", "eagle1-rejection", "eagle1-traversal"))],
)
def test_tokens_beside_given_ones_have_the_distribution_of_the_target(name: str, forced: tuple[int, ...]) -> None:
    """A given third token has no effect on the first two; kept ones are read at once."""
    built = tiny_decoder(shrunk(SPECS[name]), SMALL, DISTRIBUTION)
    tokens = pictures(built, PICTURES, forced=torch.tensor(forced).expand(PICTURES, -1)).tokens
    assert p_value(tokens, forced) > 1e-4
    assert p_value(tokens) < 1e-9  # without the given token the distribution is another


@pytest.mark.parametrize(("name", "settings"), [("zipar", {"lead": 1}), ("vvs", {"tree": "spine_1_2_1"})])
def test_the_reported_cost_is_that_of_the_distribution_of_pictures(name: str, settings: dict[str, Any]) -> None:
    """Pictures of 2 x 2 tokens out of 5 are farther from the target's distribution than chance, within the cost."""
    made = pictures(tiny_decoder(name, SMALL, DISTRIBUTION, **settings), 10_000, seed=3)
    found, chance = distance(made.tokens)
    assert chance * 1.5 < found < float(made.total_variation.mean()) + chance
