"""Walks that read only the rows they visit, compared bit for bit with walks over all rows."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import DraftMode, DraftTree, Verdict, Verifier
from lantern.decoding.rows import LogitRows
from lantern.drafters.trees.static import named
from lantern.verifiers.greedy import GreedyVerifier
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.bounded import Bounded
from lantern.verifiers.relaxations.cool import Cool
from lantern.verifiers.relaxations.grouped import Grouped
from lantern.verifiers.relaxations.lantern import Lantern
from lantern.verifiers.relaxations.lantern_pp import LanternPP
from lantern.verifiers.relaxations.neighbours import proximity_distances, proximity_table
from lantern.verifiers.relaxations.tolerance import Tolerance
from lantern.verifiers.relaxed import RelaxedVerifier

TOKENS, IMAGES, STEPS = 48, 3, 12
TREE = named("0 1 2 0.0 0.1 1.0 0.0.0 0.0.1 0.0.0.0")
VECTORS = torch.randn(TOKENS, 4, generator=torch.Generator().manual_seed(1))
TABLE = proximity_table(VECTORS, 12)
DISTANCES = proximity_distances(VECTORS, TABLE)
BOUNDED = Bounded(TABLE, k=8, delta=0.3, distances=DISTANCES)
VERIFIERS: dict[str, tuple[Verifier, DraftMode]] = {
    "gumbel": (GumbelVerifier(), "gumbel"),
    "rejection": (RejectionVerifier(), "sampled"),
    "rejection-point": (RejectionVerifier(), "point"),
    "rejection-iid": (RejectionVerifier(), "iid"),
    "lantern": (RejectionVerifier(Lantern(TABLE, k=8, delta=0.2, distances=DISTANCES)), "sampled"),
    "lantern++": (RejectionVerifier(LanternPP(TABLE, k=8, lambda_=3.0, residual="released")), "sampled"),
    "grouped": (RejectionVerifier(Grouped(VECTORS, d_radius=5.0)), "sampled"),
    "tolerance": (RejectionVerifier(Tolerance(3)), "point"),
    "greedy": (GreedyVerifier(Lantern(TABLE, k=8, delta=0.2, distances=DISTANCES)), "point"),
    "bounded": (RelaxedVerifier(BOUNDED, GumbelVerifier()), "gumbel"),
    "bounded-rejection": (RelaxedVerifier(BOUNDED, RejectionVerifier()), "sampled"),
    "cool": (RelaxedVerifier(Cool(), RejectionVerifier()), "sampled"),
}


class CountedRows(LogitRows):
    """Rows that count how many were read."""

    @cached_property
    def read(self) -> list[int]:
        return []

    def _at(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        self.read.append(nodes.shape[1])
        return super()._at(nodes)


def step(mode: DraftMode, images: int, seed: int, sampling: Sampling) -> tuple[DraftTree, Tensor, Tensor, Noise]:
    """Return a tree near the target, logits, token numbers and noise."""
    generator = torch.Generator().manual_seed(seed)
    shape = TREE.shape()
    if mode == "point":  # ranks with gaps, as a dynamic tree leaves them
        shape = replace(shape, ranks=2 * shape.ranks, widths=tuple(2 * width for width in shape.widths))
    logits = torch.randn(images, 2, shape.num_nodes, TOKENS, generator=generator) * 0.8
    places = (3 + shape.depths).expand(images, -1)
    near = sampling.log_probs(logits, places) * 0.9
    log_q = (near.nan_to_num(neginf=-30.0) + torch.randn(near.shape, generator=generator)).log_softmax(-1)
    noise = Noise([(seed, i) for i in range(images)], positions=16, vocab_size=TOKENS)
    scores = log_q if mode == "point" else log_q + noise.gumbel(places, 1 if mode == "gumbel" else 2)
    order = scores.argsort(-1, descending=True)
    tokens = order[:, shape.parents, shape.ranks]
    return DraftTree(tokens, shape, mode, log_q, TREE.inner()), logits, places, noise


def kept(verdict: Verdict, image: int) -> list[Any]:
    """Return what a verdict says of an image, without what lies past the accepted path."""
    length, cost = int(verdict.length[image]), verdict.cost
    found: list[Any] = [verdict.path[image, :length].tolist(), int(verdict.next_token[image])]
    if cost is None:
        return found
    found += [cost.relaxed[image, :length].tolist(), cost.total_variation[image, : length + 1].tolist()]
    return found if cost.latent_distance is None else [*found, cost.latent_distance[image, : length + 1].tolist()]


@pytest.mark.parametrize("images", [1, IMAGES])
@pytest.mark.parametrize("name", VERIFIERS)
def test_lazy_walks_have_the_bits_of_full_walks(name: str, images: int) -> None:
    verifier, mode = VERIFIERS[name]
    sampling = Sampling(guidance=2.0, temperature=0.9, top_k=20, top_p=0.98)
    lengths: list[int] = []
    for seed in range(STEPS):
        tree, logits, places, noise = step(mode, images, seed, sampling)
        full = verifier.verify(tree, LogitRows(sampling, logits, places, noise), noise)
        rows = CountedRows(sampling, logits, places, noise, may_stop=True)
        lazy = verifier.verify(tree, rows, noise)
        assert [kept(lazy, i) for i in range(images)] == [kept(full, i) for i in range(images)]
        assert torch.equal(lazy.length, full.length) and lazy.path.shape == full.path.shape
        if images == 1 and name != "greedy":  # there siblings may match, and all of them are visited
            assert rows.read == [1] * (int(lazy.length) + 1)
        lengths += lazy.length.tolist()
    assert min(lengths) < max(lengths) and max(lengths) >= 2
