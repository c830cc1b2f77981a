"""Rows of moved distributions by a kernel against the torch form: the same bits, cost and verdicts."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import DraftTree
from lantern.decoding.loop import LogitRows
from lantern.drafters.trees import named
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.distributions import Bounded, Mixture
from lantern.verifiers.relaxed import RelaxedRows, RelaxedVerifier

pytest.importorskip("triton", reason="Triton is not installed")
from lantern.engines.cuda import relax, walk
from lantern.engines.cuda.target import KernelTarget
from tests.engines.cuda.test_walk import IMAGES, TOKENS, TREES, problem, table

CHAIN = named("chain_7")


def rule_of(choice: random.Random) -> Bounded | Mixture:
    if choice.random() < 0.3:
        return Mixture(choice.choice((0, 0.05, 0.15, 1.0)), choice.choice((1, 2.0, 1e6)))
    known = table() if choice.random() < 0.7 else {"table": table()["table"]}
    flow = {"k": (0, 1, 10, 34), "delta": (0, 0.02, 0.2, 1.0), "cap": (1, 1.5, 4.0), "rounds": (1, 2, 3)}
    width = choice.choice((1, 7, 64, TOKENS, 1000))
    return Bounded(**known, **{name: choice.choice(values) for name, values in flow.items()}, width=width)


def drafted(choice: random.Random, seed: int, *trees: Any, mode: str = "iid") -> tuple[DraftTree, LogitRows]:
    """A tree with log q; in half of the cases many tokens have the same p and the same q."""
    scale = {"guidance": choice.choice((1.0, 3.0)), "temperature": choice.choice((0.5, 1.0, 1.3))}
    sampling = Sampling(**scale, top_k=choice.choice((0, 1, 5, 40)), guidance_interval=choice.choice((-1, 3)))
    tree, rows = problem(seed, choice.choice(trees), "iid", sampling)
    assert tree.log_q is not None
    if choice.random() < 0.5:
        rows.logits.round_()
        tree.log_q.copy_(tree.log_q.round().log_softmax(-1))
    return replace(tree, mode=mode), rows


@pytest.mark.parametrize(
    ("seed", "trees"),
    [*((seed, 1) for seed in range(6)), *(pytest.param(seed, 2, marks=pytest.mark.slow) for seed in range(6, 60))],
)
def test_rows_have_the_bits_of_torch(seed: int, trees: int) -> None:
    choice = random.Random(seed)
    rule, (tree, rows) = rule_of(choice), drafted(choice, seed, *TREES[:trees])
    assert walk.takes(RelaxedVerifier(rule, GumbelVerifier()), tree, rows)
    expected = RelaxedRows(rule, tree, rows, rows.noise)
    found = relax.KernelRows(rule, tree, rows, chunk=choice.choice((64, 128, 2048)))
    assert torch.equal(found.log_p(), expected.log_p())
    assert torch.equal(found.before(), expected.before())
    assert torch.equal(found.sample(), expected.sample())
    path = torch.arange(tree.shape.num_nodes, device=tree.tokens.device).expand(IMAGES, -1)
    one, other = found.cost(path), expected.cost(path)
    assert torch.equal(one.total_variation, other.total_variation)
    assert torch.allclose(one.relaxed, other.relaxed, atol=1e-6)
    assert (one.latent_distance is None) == (other.latent_distance is None)
    if one.latent_distance is not None and other.latent_distance is not None:
        assert torch.equal(one.latent_distance, other.latent_distance)


@pytest.mark.parametrize("mode", ["gumbel", "iid", "jacobi", "coupled"])
def test_verdicts_are_those_of_the_verifier(mode: str) -> None:
    inner = {"iid": RejectionVerifier(), "coupled": CouplingVerifier()}.get(mode, GumbelVerifier())
    is_window = mode in ("jacobi", "coupled")
    accepted, target = 0, KernelTarget.__new__(KernelTarget)
    for seed in range(4):
        rule = Bounded(**table(), k=20, delta=0.3) if seed % 2 else Mixture(delta=0.4)
        how = {"mode": "jacobi" if is_window else mode}
        tree, rows = drafted(random.Random(seed), seed, CHAIN if is_window else TREES[0], **how)
        parts: dict[str, Any] = {name: part for name, part in vars(tree.shape).items() if name != "widths"}
        if seed > 1 and not is_window:  # trees of their own
            other = vars(named("chain_8").shape(tree.tokens.device))
            own = {name: torch.stack([part, other[name]]) for name, part in parts.items()}
            tree = replace(tree, shape=replace(tree.shape, **own, widths=(8,) * 8))
        verifier = RelaxedVerifier(rule, inner)
        if mode in ("gumbel", "jacobi"):  # the first draft matches
            tree.tokens[:, 1] = RelaxedRows(rule, tree, rows, rows.noise).sample()[:, 0]
        found, expected = target.walk(verifier, tree, rows), verifier.verify(tree, rows, rows.noise)
        assert found is not None and found.cost is not None and expected.cost is not None
        for name in ("path", "length", "next_token", "samples", "log_q"):
            one, other = getattr(found, name), getattr(expected, name)
            assert (one is None) == (other is None), name
            assert one is None or torch.equal(one, other), name
        assert torch.equal(found.cost.total_variation, expected.cost.total_variation)
        accepted += int(found.length.sum())
    assert accepted > 0


def test_other_relaxations_and_settings_are_left_to_torch() -> None:
    verifier = RelaxedVerifier(Mixture(), GumbelVerifier())
    tree, rows = problem(0, TREES[0], "iid", Sampling())
    assert walk.takes(verifier, tree, rows)
    for sampling in (Sampling(top_p=0.9), Sampling(temperature=0.0)):
        assert not walk.takes(verifier, tree, replace(rows, sampling=sampling))
    assert not walk.takes(verifier, replace(tree, log_q=None), rows)
    own = type("Own", (Mixture,), {})()  # a subclass may move p otherwise
    assert not walk.takes(RelaxedVerifier(own, GumbelVerifier()), tree, rows)
