"""The walk of a tree by one kernel against the verifier's own, on random trees: the same path, token and cost."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Noise, Sampling
from lantern.core.types import DraftTree, Verdict
from lantern.decoding.loop import LogitRows
from lantern.drafters.trees import StaticTree, grown, named
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.acceptance import Grouped
from lantern.verifiers.relaxations.neighbours import Lantern, LanternPP

pytest.importorskip("triton", reason="Triton is not installed")
from lantern.engines.cuda import walk
from lantern.engines.cuda.target import KernelTarget

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMAGES, TOKENS, PLACES = 2, 150, 12
TREES = (grown(8, 2), grown(24, 3), named("naive_extend_57"))
MODES = ("sampled", "point", "iid")
RULES: tuple[Any, ...] = (None, (Lantern, {"delta": 0.2}), (LanternPP, {"lambda_": 5.0}))
NAMES = ("path", "length", "next_token")


def drafted(tree: StaticTree, mode: Any, log_q: Tensor, generator: torch.Generator) -> DraftTree:
    shape, q = tree.shape(), log_q.exp()
    tokens = torch.randint(0, q.shape[-1], (len(q), shape.num_nodes), generator=generator)
    for node in range(shape.num_nodes):
        children = [child for child in range(1, shape.num_nodes) if shape.parents[child] == node]
        if mode == "point":
            tokens[:, children] = q[:, node].topk(len(children)).indices
        elif children:
            tokens[:, children] = q[:, node].multinomial(len(children), mode == "iid", generator=generator)
    return DraftTree(tokens, shape, mode, None if mode == "point" else log_q)


def problem(seed: int, tree: StaticTree, mode: Any, sampling: Sampling) -> tuple[DraftTree, LogitRows]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(IMAGES, sampling.rows, tree.max_nodes, TOKENS, generator=generator)
    places = (torch.randint(0, 9, (IMAGES, 1), generator=generator) + tree.shape().depths).clamp(max=PLACES - 1)
    log_p = sampling.log_probs(logits, places).clamp(min=-30)
    log_q = (log_p + 1.5 * torch.randn(log_p.shape, generator=generator)).log_softmax(-1)
    keys = [(seed, image) for image in range(IMAGES)]
    sizes: dict[str, Any] = {"positions": PLACES, "vocab_size": TOKENS, "is_silent": sampling.is_greedy}
    made = drafted(tree, mode, log_q, generator)
    log_q = None if made.log_q is None else made.log_q.to(DEVICE)
    tree_on = DraftTree(made.tokens.to(DEVICE), tree.shape(DEVICE), mode, log_q)
    return tree_on, LogitRows(sampling, logits.to(DEVICE), places.to(DEVICE), Noise(keys, **sizes, device=DEVICE))


def table() -> dict[str, Any]:
    """A proximity table of 34 neighbours, and distances to them."""
    generator = torch.Generator().manual_seed(0)
    ahead = torch.stack([torch.randperm(TOKENS - 1, generator=generator)[:34] + 1 for _ in range(TOKENS)])
    near = (torch.arange(TOKENS)[:, None] + ahead) % TOKENS
    return {"table": near.int().to(DEVICE), "distances": torch.rand(near.shape, generator=generator).to(DEVICE)}


def check(verifier: RejectionVerifier, tree: DraftTree, rows: LogitRows, **how: Any) -> int:
    """Compare the kernel's verdict with the verifier's; return the number of accepted tokens."""
    assert walk.takes(verifier, tree, rows)
    return compare(walk.walk(verifier, tree, rows, **how), verifier.verify(tree, rows, rows.noise))


def compare(found: Any, expected: Verdict) -> int:
    for name in NAMES:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert (found.cost is None) == (expected.cost is None)
    for name in ("relaxed", "total_variation", "latent_distance") if expected.cost is not None else ():
        one, other = getattr(found.cost, name), getattr(expected.cost, name)
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, atol=1e-5, rtol=0.0), name
    return int(found.length.sum())


CASES = [
    pytest.param(tree, mode, residual, id=f"{size} {mode} {name}", marks=pytest.mark.slow if is_slow else ())
    for size, tree in zip((8, 24, 57), TREES, strict=True)
    for i, mode in enumerate(MODES)
    for j, (name, residual) in enumerate({"published": "paper", "released": "released", "cool": "cool"}.items())
    for is_slow in (size == 57 or (size == 24 and (i, j) != (0, 0)),)
]


@pytest.mark.parametrize(("tree", "mode", "residual"), CASES)
def test_one_kernel_walks_as_the_verifier_does(tree: StaticTree, mode: str, residual: str) -> None:
    accepted = 0
    for seed, (temperature, top_k) in enumerate(((0.9, 0), (1.0, 60), (0.8, 5))):
        sampling = Sampling(guidance=(3.0, 1.0)[seed // 2], temperature=temperature, top_k=top_k)
        how: dict[str, Any] = {**table(), "k": (33, 10, 1)[seed], "residual": residual, "shared": seed == 1}
        relaxation = None if RULES[seed] is None else RULES[seed][0](**how, **RULES[seed][1])
        problems = problem(seed, tree, mode, sampling)
        accepted += check(RejectionVerifier(relaxation), *problems, chunk=128)
    assert accepted > 0


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))])
def test_groups_are_those_of_the_verifier(seed: int) -> None:
    choice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sampling = Sampling(temperature=choice.choice((0.5, 1.0, 1.3)), top_k=choice.choice((0, 5, 40)))
    tree, rows = problem(seed, TREES[0], ("sampled", "iid")[seed % 2], sampling)
    if choice.random() < 0.5:
        rows.logits.round_()  # many tokens have the same p
    radii = {"p_radius": choice.choice((0.02, 0.15, 1.0)), "d_radius": choice.choice((0.3, 0.7, 2.0))}
    vectors = torch.rand(TOKENS, choice.choice((1, 3, 8)), generator=generator).to(DEVICE)
    rule = Grouped(vectors, group=choice.choice((0, 2, 14, 20)), **radii)
    check(RejectionVerifier(rule), tree, rows, chunk=128)
    tree, rows = problem(seed, named("chain_7"), "iid", sampling)
    tree, verifier = replace(tree, mode="jacobi"), CouplingVerifier("independent", rule)
    found = KernelTarget.__new__(KernelTarget).walk(verifier, tree, rows)
    expected = verifier.verify(tree, rows, rows.noise)
    compare(found, expected)
    assert found is not None and found.samples is not None and expected.samples is not None
    assert torch.equal(found.samples, expected.samples)


@pytest.mark.parametrize("tree", TREES, ids=["8", "24", "57"])
def test_a_gumbel_match_is_that_of_the_verifier(tree: StaticTree) -> None:
    lengths = set[int]()
    for seed in range(8):
        drafted, rows = problem(seed, tree, "point", Sampling(guidance=3.0, top_k=(0, 20)[seed % 2]))
        parents, sampled = tree.shape().parents, rows.sample()
        generator = torch.Generator().manual_seed(seed)
        for node in range(1, tree.max_nodes):  # a quarter of the nodes match
            is_match = (torch.rand(IMAGES, generator=generator) < 1 / 4).to(DEVICE)
            drafted.tokens[:, node] = torch.where(is_match, sampled[:, parents[node]], drafted.tokens[:, node])
        parts: dict[str, Any] = {name: part for name, part in vars(drafted.shape).items() if name != "widths"}
        own = {name: part.expand(IMAGES, *part.shape) for name, part in parts.items()}
        for shape in (drafted.shape, replace(drafted.shape, **own)):
            made = DraftTree(drafted.tokens, shape, "point")
            found, expected = walk.match(made, rows), GumbelVerifier().verify(made, rows, rows.noise)
            for name in (*NAMES, "samples"):
                assert torch.equal(getattr(found, name), getattr(expected, name)), name
            lengths |= set(found.length.tolist())
    assert len(lengths) > 1


def test_images_may_have_trees_of_their_own_with_gaps() -> None:
    drafted, rows = problem(7, TREES[0], "sampled", Sampling(guidance=2.0, guidance_interval=3))
    parents, ranks = (part.expand(IMAGES, -1).clone() for part in (drafted.shape.parents, drafted.shape.ranks))
    ranks[1] += ranks[1] > 0  # rank 1 has no child
    parents[1, 8] = 3  # not 2
    shape = drafted.shape
    widths = tuple(width + 1 for width in shape.widths)
    own = replace(shape, parents=parents, ranks=ranks, depths=shape.depths.expand(IMAGES, -1), widths=widths)
    tree = DraftTree(drafted.tokens, own, "sampled", drafted.log_q)
    check(RejectionVerifier(LanternPP(**table(), k=5)), tree, rows)


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
            check(RejectionVerifier(rule), drafted, rows)


def test_other_verifiers_and_settings_are_left_to_torch() -> None:
    tree, rows = problem(0, TREES[0], "sampled", Sampling())
    _, nucleus = problem(0, TREES[0], "sampled", Sampling(top_p=0.9))
    verifier = RejectionVerifier()
    assert walk.takes(verifier, tree, rows)
    assert not walk.takes(verifier, tree, nucleus)
    assert not walk.takes(object(), tree, rows)
    for rule, setting in RULES[1:]:
        assert walk.takes(RejectionVerifier(rule(**table(), k=5, **setting)), tree, rows)
        own = type("Own", (rule,), {})  # a subclass may judge otherwise
        assert not walk.takes(RejectionVerifier(own(**table(), k=5, **setting)), tree, rows)
    groups = Grouped(torch.zeros(TOKENS, 1))
    assert walk.takes(RejectionVerifier(groups), tree, rows)
    assert not walk.takes(RejectionVerifier(groups), replace(tree, mode="point"), rows)
    assert not walk.takes(CouplingVerifier(), tree, rows)
