"""Walks of random trees by kernels against the verifiers in torch: the same path, token and cost.

Cases are numbered: a number gives the same case again.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
from lantern.core.sampling import HeldSampling, Noise, Sampling
from lantern.core.types import DraftTree, Verdict
from lantern.decoding.loop import LogitRows
from lantern.drafters.trees import StaticTree, grown, named
from lantern.engines.cuda import couple, relax, walk
from lantern.engines.cuda.target import KernelTarget, without_top_p
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.acceptance import Grouped
from lantern.verifiers.relaxations.distributions import Bounded, Mixture
from lantern.verifiers.relaxations.neighbours import Lantern, LanternPP
from lantern.verifiers.relaxed import RelaxedRows, RelaxedVerifier

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMAGES, TOKENS, PLACES = 2, 150, 12
TREES, CHAIN = (grown(8, 2), grown(24, 3), named("naive_extend_57")), named("chain_7")
MODES = ("sampled", "point", "iid")
SAMPLINGS = {
    "guidance": (1.0, 3.0),
    "temperature": (0.5, 0.9, 1.0, 1.3),
    "top_k": (0, 0, 1, 5, 40, 60),
    "top_p": (1.0, 1.0, 0.9, 0.3),
    "guidance_interval": (-1, 3),
}


def picked(choice: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    return {name: choice.choice(values) for name, values in options.items()}


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


def problem(
    seed: int, tree: StaticTree, mode: Any, sampling: Sampling, *, has_ties: bool = False
) -> tuple[DraftTree, LogitRows]:
    """A tree and its rows; with `has_ties` many tokens have the same p and the same q.

    Images have a sampling each, of one form.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(IMAGES, sampling.rows, tree.max_nodes, TOKENS, generator=generator)
    places = (torch.randint(0, 9, (IMAGES, 1), generator=generator) + tree.shape().depths).clamp(max=PLACES - 1)
    if has_ties:
        logits.round_()
    log_p = replace(sampling, top_p=1.0).log_probs(logits, places).clamp(min=-30)
    log_q = log_p + 1.5 * torch.randn(log_p.shape, generator=generator)
    log_q = (log_q.round() if has_ties else log_q).log_softmax(-1)
    keys = [(seed, image) for image in range(IMAGES)]
    sizes: dict[str, Any] = {"positions": PLACES, "vocab_size": TOKENS, "is_silent": sampling.is_greedy}
    made = drafted(tree, mode, log_q, generator)
    log_q = None if made.log_q is None else made.log_q.to(DEVICE)
    tree_on = DraftTree(made.tokens.to(DEVICE), tree.shape(DEVICE), mode, log_q)
    scale, held = 1.5 if sampling.rows == 2 else 1.0, HeldSampling(**vars(sampling))
    changed: dict[str, Any] = {"guidance": scale * sampling.guidance, "temperature": 1.2 * sampling.temperature}
    changed |= {"top_k": sampling.most_kept, "top_p": 1.0 if sampling.top_p == 1 else 0.9 * sampling.top_p}
    other = replace(sampling, **changed)
    assert other.form == sampling.form
    held.hold(torch.cat([one.values(1, DEVICE) for one in (sampling, other)]))
    return tree_on, LogitRows(held, logits.to(DEVICE), places.to(DEVICE), Noise(keys, **sizes, device=DEVICE))


def table() -> dict[str, Any]:
    """A proximity table of 34 neighbours, and distances to them."""
    generator = torch.Generator().manual_seed(0)
    ahead = torch.stack([torch.randperm(TOKENS - 1, generator=generator)[:34] + 1 for _ in range(TOKENS)])
    near = (torch.arange(TOKENS)[:, None] + ahead) % TOKENS
    return {"table": near.int().to(DEVICE), "distances": torch.rand(near.shape, generator=generator).to(DEVICE)}


def compare(found: Verdict | None, expected: Verdict) -> int:
    """Check that a kernel's verdict is the verifier's; return the number of accepted tokens."""
    assert found is not None
    for name in ("path", "length", "next_token", "samples", "log_q"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        is_coupled = name == "log_q" and expected.cost is None
        close: Any = dict.fromkeys(("atol", "rtol"), 1e-5 if is_coupled else 0.0)
        assert one is None or other is None or torch.allclose(one, other, **close), name
    assert (found.cost is None) == (expected.cost is None)
    for name in ("relaxed", "total_variation", "latent_distance") if expected.cost is not None else ():
        one, other = getattr(found.cost, name), getattr(expected.cost, name)
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.allclose(one, other, atol=1e-5, rtol=0.0), name
    return int(found.length.sum())


def walked(verifier: Any, tree: DraftTree, rows: LogitRows, *, chunk: int | None = None) -> int:
    """Compare what a target with kernels decides with the verifier; `chunk` are the tokens of a part of a row."""
    assert walk.takes(verifier, tree, rows)
    if chunk is None:
        found = KernelTarget.__new__(KernelTarget).walk(verifier, tree, rows)
    else:
        logits, sampling = without_top_p(rows.sampling, rows.logits, rows.places)
        by: Any = couple.couple if isinstance(verifier, CouplingVerifier) else walk.walk
        found = by(verifier, tree, replace(rows, logits=logits, sampling=sampling), chunk=chunk)
    return compare(found, verifier.verify(tree, rows, rows.noise))


def rejects(seed: int, choice: random.Random) -> int:
    """Rejection, exact or by LANTERN or LANTERN++."""
    how = picked(choice, {"k": (1, 10, 33), "residual": ("paper", "released", "cool"), "shared": (False, True)})
    rules = [None, Lantern(**table(), **how, delta=0.2), LanternPP(**table(), **how, lambda_=5.0)]
    sampling = Sampling(**picked(choice, SAMPLINGS | {"temperature": (0.0, 0.5, 0.9, 1.0, 1.3)}))
    tree, rows = problem(seed, choice.choice(TREES), choice.choice(MODES), sampling)
    return walked(RejectionVerifier(choice.choice(rules)), tree, rows, chunk=choice.choice((None, 64, 128)))


def groups(seed: int, choice: random.Random) -> int:
    """Rejection by GSD's groups, in a tree or in a window."""
    how = picked(choice, {"group": (0, 2, 14, 20), "p_radius": (0.02, 0.15, 2.0), "d_radius": (0.3, 0.7, 2.0)})
    vectors = torch.rand(TOKENS, choice.choice((1, 3, 8)), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    rule, has_ties, is_window = Grouped(vectors, **how), choice.random() < 0.5, choice.random() < 0.5
    mode = "iid" if is_window else choice.choice(("sampled", "iid"))
    sampling = Sampling(**picked(choice, SAMPLINGS))
    tree, rows = problem(seed, CHAIN if is_window else TREES[0], mode, sampling, has_ties=has_ties)
    if is_window:
        return walked(CouplingVerifier("independent", rule), replace(tree, mode="jacobi"), rows)
    return walked(RejectionVerifier(rule), tree, rows, chunk=choice.choice((None, 64, 128)))


def matches(seed: int, choice: random.Random) -> int:
    """Gumbel match, where a quarter of the nodes match, of one tree or one for each image."""
    tree, rows = problem(seed, choice.choice(TREES), "point", Sampling(**picked(choice, SAMPLINGS)))
    parents, sampled = tree.shape.parents, rows.sample()
    for node in range(1, tree.shape.num_nodes):
        is_match = (torch.rand(IMAGES, generator=torch.Generator().manual_seed(seed + node)) < 1 / 4).to(DEVICE)
        tree.tokens[:, node] = torch.where(is_match, sampled[:, parents[node]], tree.tokens[:, node])
    if choice.random() < 0.5:
        parts = {name: part.expand(IMAGES, *part.shape) for name, part in vars(tree.shape).items() if name != "widths"}
        tree = replace(tree, shape=replace(tree.shape, **parts))
    return walked(GumbelVerifier(), tree, rows)


def moves(seed: int, choice: random.Random) -> int:
    """Rows of `Bounded` and `Mixture`, bit by bit, and what verifiers decide by them."""
    rule: Bounded | Mixture = Mixture(choice.choice((0, 0.05, 0.15, 1.0)), choice.choice((1, 2.0, 1e6)))
    if choice.random() < 0.7:
        known = table() if choice.random() < 0.7 else {"table": table()["table"]}
        flow = picked(choice, {"k": (0, 1, 10, 34), "delta": (0, 0.02, 0.2, 1.0), "cap": (1, 1.5, 4.0)})
        rule = Bounded(**known, **flow, rounds=choice.choice((1, 2, 3)), width=choice.choice((1, 7, 64, TOKENS, 1000)))
    mode = choice.choice(("gumbel", "iid", "jacobi", "coupled"))
    is_window, sampling = mode in ("jacobi", "coupled"), Sampling(**picked(choice, SAMPLINGS))
    shape = CHAIN if is_window else choice.choice((*TREES[:1] * 4, *TREES[1:]))
    tree, rows = problem(seed, shape, "iid", sampling, has_ties=choice.random() < 0.5)
    if shape is TREES[0] and choice.random() < 0.5:  # trees of their own
        other, parts = vars(named("chain_8").shape(DEVICE)), vars(tree.shape)
        own = {name: torch.stack([part, other[name]]) for name, part in parts.items() if name != "widths"}
        tree = replace(tree, shape=replace(tree.shape, **own, widths=(8,) * 8))
    tree = replace(tree, mode="jacobi" if is_window else mode)
    logits, rest = without_top_p(rows.sampling, rows.logits, rows.places)
    plain, chunk = replace(rows, logits=logits, sampling=rest), choice.choice((64, 128, 2048))
    expected, found = RelaxedRows(rule, tree, rows, rows.noise), relax.KernelRows(rule, tree, plain, chunk=chunk)
    assert torch.equal(found.log_p(), expected.log_p()) and torch.equal(found.before(), expected.before())
    samples = expected.sample()
    assert torch.equal(found.sample(), samples)
    path = torch.arange(tree.shape.num_nodes, device=DEVICE).expand(IMAGES, -1)
    one, other = found.cost(path), expected.cost(path)
    assert torch.equal(one.total_variation, other.total_variation)
    assert torch.allclose(one.relaxed, other.relaxed, atol=1e-6)
    assert (one.latent_distance is None) == (other.latent_distance is None)
    if one.latent_distance is not None and other.latent_distance is not None:
        assert torch.equal(one.latent_distance, other.latent_distance)
    if mode in ("gumbel", "jacobi"):  # the first draft matches
        tree.tokens[:, 1] = samples[:, 0]
    inner = {"iid": RejectionVerifier(), "coupled": CouplingVerifier()}.get(mode, GumbelVerifier())
    return walked(RelaxedVerifier(rule, inner), tree, rows)


def couples(seed: int, choice: random.Random) -> int:
    """Coupling in a window. Some rows of q are p's, or twice as much, so that a rejection leaves nothing."""
    sampling = Sampling(**picked(choice, SAMPLINGS | {"temperature": (0.0, 0.5, 0.9, 1.0, 1.3)}))
    tree, rows = problem(seed, named(choice.choice(("chain_1", "chain_4", "chain_7"))), "iid", sampling)
    verifier = CouplingVerifier(choice.choice(("coupled", "independent", "reuse")), reuse=choice.choice((0, 0.5, 2.0)))
    log_p, generator = rows.log_p(), torch.Generator().manual_seed(seed)
    assert tree.log_q is not None
    is_own = (torch.rand(tree.tokens.shape, generator=generator) < 0.3).to(DEVICE)
    log_q = torch.where(is_own[..., None], log_p + choice.choice((0.0, 0.7)), tree.log_q)
    drafts = log_q.flatten(0, 1).cpu().exp().multinomial(1, generator=generator).view(tree.tokens.shape).to(DEVICE)
    tokens = torch.cat([tree.tokens[:, :1], drafts[:, :-1]], 1)
    tree = replace(tree, mode="jacobi", tokens=tokens, log_q=log_q)
    return walked(verifier, tree, rows, chunk=choice.choice((None, 64, 128)))


KINDS: tuple[Callable[[int, random.Random], int], ...] = (rejects, groups, matches, moves)


RARE = (40, 44, 155, 187, 383, 8739)  # COOL residuals, more surplus than is moved, takers that lack as much


@pytest.mark.parametrize(
    "seeds",
    [(*range(24), *RARE), *(pytest.param(range(n, n + 40), marks=pytest.mark.slow) for n in range(40, 400, 40))],
)
def test_kernels_decide_as_the_verifiers_do(seeds: Sequence[int]) -> None:
    accepted = dict.fromkeys(KINDS, 0)
    for seed in seeds:
        kind = KINDS[seed % len(KINDS)]
        accepted[kind] += kind(seed, random.Random(seed))
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
    rules: tuple[Any, ...] = (Lantern, LanternPP)
    for rule in rules:
        assert walk.takes(RejectionVerifier(rule(**table(), k=5)), tree, rows)
        own = type("Own", (rule,), {})  # a subclass may judge otherwise
        assert not walk.takes(RejectionVerifier(own(**table(), k=5)), tree, rows)
    groups = Grouped(torch.zeros(TOKENS, 1))
    assert walk.takes(RejectionVerifier(groups), tree, rows)
    assert not walk.takes(RejectionVerifier(groups), replace(tree, mode="point"), rows)
    assert walk.takes(CouplingVerifier(), tree, rows)
    assert not walk.takes(CouplingVerifier(), replace(tree, log_q=None), rows)
    assert not walk.takes(moved, tree, replace(rows, sampling=Sampling(temperature=0.0)))
    assert not walk.takes(moved, replace(tree, log_q=None), rows)
    own = type("Own", (Mixture,), {})()  # may move p otherwise
    assert not walk.takes(RelaxedVerifier(own, GumbelVerifier()), tree, rows)
