"""Walks of trees by kernels against the verifiers in torch: the same path, token and cost."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from lantern.core.sampling import Sampling
from lantern.core.types import DraftTree
from lantern.engines.cuda import walk
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.acceptance import Grouped
from lantern.verifiers.relaxations.distributions import Mixture
from lantern.verifiers.relaxations.neighbours import Lantern, LanternPP
from lantern.verifiers.relaxed import RelaxedVerifier
from tests.engines.cuda.walks import DEVICE, IMAGES, KINDS, TOKENS, TREES, check, couples, problem, table, walked

RULES: tuple[Any, ...] = ((Lantern, {"delta": 0.2}), (LanternPP, {"lambda_": 5.0}))


RARE = (40, 44, 155, 187, 8739)  # COOL residuals, more surplus than is moved, takers that lack as much


@pytest.mark.parametrize(
    "seeds",
    [(*range(24), *RARE), *(pytest.param(range(n, n + 40), marks=pytest.mark.slow) for n in range(40, 400, 40))],
)
def test_kernels_decide_as_the_verifiers_do(seeds: Sequence[int]) -> None:
    accepted = dict.fromkeys((kind.__name__ for kind in KINDS), 0)
    for seed in seeds:
        kind, count = check(seed)
        accepted[kind] += count
    assert min(accepted.values()) > 0


@pytest.mark.parametrize(
    "seeds", [range(16), *(pytest.param(range(n, n + 40), marks=pytest.mark.slow) for n in range(40, 200, 40))]
)
def test_a_kernel_couples_windows_as_the_verifier_does(seeds: Sequence[int]) -> None:
    assert sum(couples(seed, random.Random(seed)) for seed in seeds) > len(seeds)


def test_images_may_have_trees_of_their_own_with_gaps() -> None:
    drafted, rows = problem(7, TREES[0], "sampled", Sampling(guidance=2.0, guidance_interval=3))
    parents, ranks = (part.expand(IMAGES, -1).clone() for part in (drafted.shape.parents, drafted.shape.ranks))
    ranks[1] += ranks[1] > 0  # rank 1 has no child
    parents[1, 8] = 3  # not 2
    shape = drafted.shape
    widths = tuple(width + 1 for width in shape.widths)
    own = replace(shape, parents=parents, ranks=ranks, depths=shape.depths.expand(IMAGES, -1), widths=widths)
    tree = DraftTree(drafted.tokens, own, "sampled", drafted.log_q)
    walked(RejectionVerifier(LanternPP(**table(), k=5)), tree, rows)


def test_a_residual_without_mass_is_that_of_the_verifier() -> None:
    for mode in ("sampled", "point"):
        drafted, rows = problem(3, TREES[0], mode, Sampling(guidance=1.0, top_k=2))
        near = torch.arange(TOKENS)[:, None] + torch.arange(1, 35)
        likely = rows.logits[0, 0, 0].topk(3).indices
        full = (near % TOKENS).int().to(DEVICE)
        for token in likely.tolist():
            others = [other for other in likely.tolist() if other != token]
            rest = [other for other in full[token].tolist() if other not in others]
            full[token] = torch.tensor((others + rest)[:34], dtype=torch.int32)
        for residual in ("paper", "released"):
            rule = Lantern(table=full, k=20, delta=1.0, residual=residual)
            walked(RejectionVerifier(rule), drafted, rows)


def test_other_verifiers_and_settings_are_left_to_torch() -> None:
    tree, rows = problem(0, TREES[0], "sampled", Sampling())
    verifier, moved = RejectionVerifier(), RelaxedVerifier(Mixture(), GumbelVerifier())
    assert walk.takes(verifier, tree, rows) and walk.takes(moved, tree, rows)
    assert not walk.takes(object(), tree, rows)
    for rule, setting in RULES:
        assert walk.takes(RejectionVerifier(rule(**table(), k=5, **setting)), tree, rows)
        own = type("Own", (rule,), {})  # a subclass may judge otherwise
        assert not walk.takes(RejectionVerifier(own(**table(), k=5, **setting)), tree, rows)
    groups = Grouped(torch.zeros(TOKENS, 1))
    assert walk.takes(RejectionVerifier(groups), tree, rows)
    assert not walk.takes(RejectionVerifier(groups), replace(tree, mode="point"), rows)
    assert walk.takes(CouplingVerifier(), tree, rows)
    assert not walk.takes(CouplingVerifier(), replace(tree, log_q=None), rows)
    assert not walk.takes(moved, tree, replace(rows, sampling=Sampling(temperature=0.0)))
    assert not walk.takes(moved, replace(tree, log_q=None), rows)
    own = type("Own", (Mixture,), {})()  # may move p otherwise
    assert not walk.takes(RelaxedVerifier(own, GumbelVerifier()), tree, rows)
