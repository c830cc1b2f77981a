"""Toy distributions with exactly known results, small enough for hundreds of thousands of trees."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lantern.core.noise import Noise, Purpose
from lantern.core.types import DraftMode, DraftTree, TreeShape, Verdict, Verifier
from lantern.drafters.trees.static import StaticTree
from tests.proof.worlds import GivenRows

TOKENS = 5
GUMBEL_ROWS = 3  # depths 0, 1 and 2
UNIFORM_ROWS = 12  # rows 2 + node are for the samples of "iid" trees
TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (2, 1)))


@dataclass(frozen=True)
class Toy:
    """p and q of the first token `(v)`, and of the second given the first `(v v)`."""

    p: Tensor
    p_next: Tensor
    q: Tensor
    q_next: Tensor


def toy(seed: int = 0) -> Toy:
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.randn(*size, generator=generator) * 1.3 for size in ((TOKENS,), (TOKENS, TOKENS))]
    drafts = [table + torch.randn(table.shape, generator=generator) for table in tables]
    p, p_next, q, q_next = (table.softmax(-1) for table in (*tables, *drafts))
    p_next = p_next.clone()
    p_next[0, 1] = 0.0  # a token that the target never samples
    return Toy(p, p_next / p_next.sum(-1, keepdim=True), q, q_next)


def draw_tree(toy: Toy, mode: DraftMode, noise: Noise, runs: int, tree: StaticTree = TREE) -> DraftTree:
    """Return trees drafted from q: children in sampling order, with the drafter's noise (for "gumbel" the target's)."""
    purpose = Purpose.TARGET if mode == "gumbel" else Purpose.DRAFT
    shape = tree.shape()
    tokens = torch.zeros(runs, shape.num_nodes, dtype=torch.long)
    distributions = torch.zeros(runs, shape.num_nodes, TOKENS)
    for node in range(shape.num_nodes):
        depth = int(shape.depths[node])
        distributions[:, node] = (toy.q.expand(runs, -1) if depth == 0 else toy.q_next[tokens[:, node]]).log()
        children = (shape.parents == node).nonzero()[:, 0].tolist()
        children = [child for child in children if child != 0]
        if not children:
            continue
        if mode == "iid":
            flat = noise.uniform(torch.full((runs, 1), 2 + node), len(children))[:, 0]
            sums = distributions[:, node].exp().double().cumsum(-1)
            order = torch.searchsorted(sums, flat.clamp(max=float(sums.min(0).values[-1]) - 1e-9))
        else:
            scores = distributions[:, node]
            if mode != "point":
                scores = scores + noise.gumbel(torch.full((runs, 1), depth), purpose)[:, 0]
            order = scores.argsort(-1, descending=True)
        for rank, child in enumerate(children):
            tokens[:, child] = order[:, rank]
    return DraftTree(tokens, shape, mode, distributions)


def target_distribution(toy: Toy, tree: DraftTree) -> Tensor:
    """Return log p of what follows each node."""
    rows = toy.p_next[tree.tokens]
    rows = torch.where((tree.shape.depths == 0)[:, None], toy.p, rows)
    return rows.log()


def outcome(
    toy: Toy,
    verifier: Verifier,
    mode: DraftMode,
    runs: int = 100_000,
    *,
    seed: int = 0,
    shape: StaticTree = TREE,
    spoil: Callable[[DraftTree], DraftTree] | None = None,
) -> Tensor:
    """Return the distribution `(v v)` of the first two tokens that a verifier commits, estimated over many runs.

    Where a run commits only one token, the second is sampled in a second step whose tree is below the first.
    """
    noise = spread_noise(runs, seed)
    tree = draw_tree(toy, mode, noise, runs, shape)
    tree = spoil(tree) if spoil else tree
    positions = tree.shape.depths.expand(runs, -1)
    verdict = verifier.verify(tree, GivenRows(target_distribution(toy, tree), positions, noise), noise)
    first, second = committed(tree, verdict)
    needs_more = verdict.length == 0
    rest = GivenRows(toy.p_next[first].log()[:, None], torch.ones(runs, 1, dtype=torch.long), noise)
    root = DraftTree(first[:, None], TreeShape.chain(0, first.device), mode)
    redrawn = verifier.verify(root, rest, noise).next_token
    second = torch.where(needs_more, redrawn, second)
    counts = torch.bincount(first * TOKENS + second, minlength=TOKENS * TOKENS)
    return counts.view(TOKENS, TOKENS) / runs


def committed(tree: DraftTree, verdict: Verdict) -> tuple[Tensor, Tensor]:
    """Return the first two tokens of each run; the second is undefined where only one was committed."""
    tokens = torch.cat([tree.tokens.gather(1, verdict.path), torch.zeros_like(verdict.next_token[:, None])], 1)
    tokens = tokens.scatter(1, verdict.length[:, None], verdict.next_token[:, None])
    return tokens[:, 0], tokens[:, 1]


def expected(toy: Toy) -> Tensor:
    """Return the distribution `(v v)` of the first two tokens of plain decoding."""
    return toy.p[:, None] * toy.p_next


def distance(one: Tensor, other: Tensor) -> float:
    """Return the total variation."""
    return float((one - other).abs().sum() / 2)


class SpreadNoise(Noise):
    """Long streams cut into runs, so that a hundred thousand images need one table."""

    def __init__(self, runs: int, seed: int) -> None:
        self._gumbels = Noise([(seed, 0)], positions=runs * GUMBEL_ROWS, vocab_size=TOKENS)
        self._lanes = Noise([(seed, 0)], positions=runs * UNIFORM_ROWS, vocab_size=TOKENS)
        self._runs = torch.arange(runs)[:, None]

    def gumbel(self, positions: Tensor, purpose: int = Purpose.TARGET) -> Tensor:
        """Return the Gumbel noise of each run."""
        flat = (positions.clamp(max=GUMBEL_ROWS - 1) + self._runs * GUMBEL_ROWS).flatten()[None]
        return self._gumbels.gumbel(flat, purpose).view(*positions.shape, -1)

    def uniform(
        self, positions: Tensor, lanes: int, *, purpose: int = Purpose.TEST, iterations: Tensor | None = None
    ) -> Tensor:
        """Return the uniforms of each run, all of one step."""
        assert purpose == Purpose.TEST and iterations is None
        flat = (positions + self._runs * UNIFORM_ROWS).flatten()[None]
        return self._lanes.uniform(flat, lanes).view(*positions.shape, -1)


spread_noise = lru_cache(maxsize=2)(SpreadNoise)
