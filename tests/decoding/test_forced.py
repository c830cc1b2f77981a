"""Forced tokens: every method keeps them, and samples the others as plain decoding does."""

import shutil
from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.decoding.forced import ForcedTokens
from lantern.engines.engine import engine
from tests.methods.test_contracts import SAMPLINGS, SPECS, parts
from tests.proof.pictures import DISTRIBUTION, SMALL, p_value, pictures
from tests.tiny import select, tiny_condition, tiny_target
from tests.tiny_decoder import CONDITION, KEYS, tiny_decoder

# rows that are kept, an inner hole, scattered tokens with the last one
FORCED = torch.full((3, 16), -1)
FORCED[0, :8] = torch.arange(8)
FORCED[1] = torch.tensor([5, 6, 7, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, 14, 15, 16])
FORCED[2, ::3] = 23
IS_FORCED = FORCED >= 0
# all tokens but the first: nothing is kept from the start, so that all of them are drafts
GIVEN = torch.arange(48).view(3, 16) % 24
GIVEN[:, 0] = -1


def forced_by(name: str, sampling: Sampling) -> torch.Tensor:
    return parts(name, sampling).generate(CONDITION, keys=KEYS, forced=FORCED).tokens


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["sampled", "filtered", "greedy"])
def test_every_method_keeps_forced_tokens(name: str, sampling: Sampling) -> None:
    found = forced_by(name, sampling)
    assert torch.equal(found[IS_FORCED], FORCED[IS_FORCED])
    assert (found >= 0).all() and (found < 24).all()
    if SPECS[name].promise == "tokens":
        assert torch.equal(found, forced_by("plain", sampling))


@pytest.mark.parametrize("name", [name for name, method in SPECS.items() if not method.exact])
def test_nothing_is_relaxed_at_forced_tokens(name: str) -> None:
    made = parts(name, SAMPLINGS[0]).generate(CONDITION, keys=KEYS, forced=GIVEN)
    assert torch.equal(made.tokens[:, 1:], GIVEN[:, 1:])
    assert made.total_variation.abs().max() < 1e-6 and made.relaxed.abs().max() < 1e-6


@pytest.mark.parametrize("forced", [(-1, -1, 3, -1), (3, 1, -1, -1)], ids=["inner", "kept"])
@pytest.mark.parametrize("name", ["sjd", "scd", "eagle2-rejection"])
def test_tokens_beside_forced_ones_have_the_distribution_of_the_target(name: str, forced: tuple[int, ...]) -> None:
    """Pictures of 4 tokens out of 5. A given third token has no effect on the first two; kept ones are read at once."""
    method = SPECS[name].with_options(tree="chain_2") if SPECS[name].tree else SPECS[name]
    built = tiny_decoder(method, SMALL, DISTRIBUTION)
    given = torch.tensor(forced).expand(5000, -1)
    tokens = [pictures(built, 5000, seed, forced=given).tokens for seed in range(4)]
    assert p_value(torch.cat(tokens), forced) > 1e-4
    assert p_value(torch.cat(tokens)) < 1e-9  # without the given token the distribution is another


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, with which the engine is built")
@pytest.mark.parametrize("name", ["gumbel-jacobi", "sjd-pac", "eagle1"])
def test_the_cpu_engine_forces_tokens_in_its_passes(name: str) -> None:
    target = tiny_target(block_size=64, dim=64, vocab_size=32)
    forced = torch.full((3, 64), -1)
    forced[:, :16], forced[1, 40:50] = torch.arange(16), 31
    plain, built = (tiny_decoder(method, target, engine=engine("cpu")) for method in ("plain", name))
    expected = plain.generate(CONDITION, keys=KEYS, forced=forced).tokens
    assert torch.equal(built.generate(CONDITION, keys=KEYS, forced=forced).tokens, expected)
    assert torch.equal(expected[forced >= 0], forced[forced >= 0])
    free = plain.generate(CONDITION, keys=KEYS).tokens  # by steps of the engine itself
    assert not torch.equal(free, expected)


def test_an_exact_method_takes_forced_tokens_for_nothing() -> None:
    made = parts("gumbel-jacobi", SAMPLINGS[0]).generate(CONDITION, keys=KEYS, forced=GIVEN)
    assert (made.steps < 8).all()


@pytest.mark.parametrize("name", SPECS)
def test_kept_tokens_are_read_in_few_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 150 kept tokens 149 are read in three passes; the others are those of the slow way, in which all are
    drafts.
    """
    target = tiny_target(block_size=169)
    forced = torch.full((2, 169), -1)
    forced[:, :150] = torch.randint(24, (2, 150), generator=torch.Generator().manual_seed(3))  # nothing to look up
    forced[1, 150:155] = 3
    built = tiny_decoder(SPECS[name], target)
    condition, steps, slow_steps = tiny_condition((4, 1)), list[Step](), list[Step]()
    made = built.generate(condition, keys=KEYS[:2], forced=forced, callback=steps.append)
    assert torch.equal(made.tokens[forced >= 0], forced[forced >= 0])
    # the prompt, three passes, and at most one for each of the other tokens
    assert (made.steps <= 1 + 3 + 19).all()
    assert steps[0].counts.tolist() == [150, 150] and torch.equal(steps[0].tokens[:, :150], forced[:, :150])
    assert all((step.start >= 150).all() for step in steps[1:])
    with monkeypatch.context() as patch:
        patch.setattr(ForcedTokens, "kept", 1)
        slow = built.generate(condition, keys=KEYS[:2], forced=forced, callback=slow_steps.append)
    assert (slow_steps[0].counts < 150).all()
    if SPECS[name].promise == "tokens":
        assert torch.equal(made.tokens, slow.tokens)


READERS = (
    "eagle1",
    "eagle2",
    "eagle3",
    "fr-spec",
    "medusa",
    "parallelspec",
    "poss",
    "sam",
    "self-cascade",
    "sam-eagle1",
)


@pytest.mark.parametrize("name", [*READERS, "specmquant", "vertical", "vispec"])
@pytest.mark.parametrize("form", ["guided", "rows"])
def test_a_drafter_reads_kept_tokens_as_it_reads_committed_ones(name: str, form: str) -> None:
    """The tree below kept tokens is the one of a generation in which these tokens were sampled."""
    steps, built = list[Step](), parts(name, SAMPLINGS[0], form)
    how: dict[str, Any] = {"keys": KEYS[:1], "callback": steps.append}
    condition = select(CONDITION, [0])
    tokens = built.generate(condition, **how).tokens
    trees = {int(step.start): step.tree for step in steps[1:] if 2 <= step.start < 15}
    assert len(trees) > 2
    for known, tree in trees.items():
        steps.clear()
        forced = torch.where(torch.arange(16) < known, tokens, -1)
        assert torch.equal(built.generate(condition, forced=forced, **how).tokens, tokens)
        found = steps[1].tree
        assert int(steps[1].start) == known and tree is not None and found is not None
        assert torch.equal(found.tokens, tree.tokens)


def test_drafts_that_are_not_replaced_would_be_relaxed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: with the drafter's own drafts a relaxed method accepts neighbours of forced tokens."""
    monkeypatch.setattr(ForcedTokens, "tree", lambda self, tree, known: tree)
    found = parts("lantern-released", SAMPLINGS[0]).generate(CONDITION, keys=KEYS, forced=GIVEN).tokens
    assert not torch.equal(found[:, 1:], GIVEN[:, 1:])


def test_forced_tokens_are_checked() -> None:
    for wrong, message in (
        (torch.zeros(3, 15, dtype=torch.long), r"shape \[3, 15\], wanted \[3, 16\]"),
        (torch.full((3, 16), 24), r"from 24 to 24, wanted -1 \(free\) to 23"),
        (torch.full((3, 16), -2), "from -2 to -2"),
    ):
        with pytest.raises(ValueError, match=message):
            parts("plain", SAMPLINGS[0]).generate(CONDITION, keys=KEYS, forced=wrong)
