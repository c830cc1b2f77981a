"""Toy worlds: a few tokens out of at most six. Each distribution is a row of a table.

Strings of tokens are numbered as a heap: the empty string is 0, and string s followed by token x is s * v + 1 + x.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from lantern.core.sampling import Noise
from lantern.core.types import Rows, rows_at
from lantern.drafters.trees import StaticTree

# A chain, siblings only, branches of different depth, and a tree deeper than the tokens that are left.
TREES = {
    "chain": StaticTree(((0,), (0, 0))),
    "fan": StaticTree(((0,), (1,), (2,))),
    "unbalanced": StaticTree(((0,), (1,), (0, 0), (0, 1))),
    "too deep": StaticTree(((0,), (1,), (0, 0), (0, 0, 0))),
}
KINDS = ("generic", "zeros", "one-hot", "disjoint", "equal")


@dataclass(frozen=True)
class GivenRows(Rows):
    every: Float[Tensor, "b n v"]
    places: Int[Tensor, "b n"]
    noise: Noise
    may_stop: bool = False

    def log_p(self, nodes: Int[Tensor, "b m"] | None = None) -> Float[Tensor, "b m v"]:
        return self.every if nodes is None else rows_at(self.every, nodes)

    def sample(self, nodes: Int[Tensor, "b m"] | None = None) -> Int[Tensor, "b m"]:
        places = self.places if nodes is None else self.places.gather(1, nodes)
        return (self.log_p(nodes) + self.noise.gumbel(places)).argmax(-1)


@dataclass(frozen=True, eq=False)
class World:
    """p and q of the token that follows each string shorter than `count`; the last row is for strings past the end."""

    p: Float[Tensor, "s v"]
    q: Float[Tensor, "s v"]
    count: int

    @property
    def tokens(self) -> int:
        return self.p.shape[1]

    @property
    def first_whole(self) -> int:
        return len(self.p) - 1

    @cached_property
    def single(self) -> "World":
        return replace(self, p=self.p.float(), q=self.q.float())

    @cached_property
    def logs(self) -> "World":
        return replace(self, p=self.p.log(), q=self.q.log())

    def look_up(self, table: Float[Tensor, "s v"], strings: Int[Tensor, "*n"]) -> Float[Tensor, "*n v"]:
        rows = table.index_select(0, strings.clamp(max=self.first_whole).flatten())
        return rows.view(*strings.shape, self.tokens)

    def log_p(self, strings: Int[Tensor, "*n"]) -> Float[Tensor, "*n v"]:
        return self.look_up(self.logs.p, strings)

    def log_q(self, strings: Int[Tensor, "*n"]) -> Float[Tensor, "*n v"]:
        return self.look_up(self.logs.q, strings)

    def completed(self, mass: Float64[Tensor, " m"]) -> Float64[Tensor, " w"]:
        """Return the distribution of whole strings if the strings under `mass` are continued by p."""
        mass = mass.clone()
        for string in range(self.first_whole):
            below = string * self.tokens + 1
            mass[below : below + self.tokens] += mass[string] * self.p[string]
        return mass[self.first_whole :]

    def distribution(self) -> Float64[Tensor, " w"]:
        mass = torch.zeros(self.first_whole + self.tokens**self.count, dtype=torch.float64)
        mass[0] = 1.0
        return self.completed(mass)


@lru_cache
def world(kind: str, seed: int = 0, *, tokens: int = 4, count: int = 2) -> World:
    """Return random tables of one of `KINDS`."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(tokens**length for length in range(count)) + 1
    scores = torch.randn(rows, tokens, dtype=torch.float64, generator=generator) * 1.3
    p = scores.softmax(-1)
    q = (scores + torch.randn(rows, tokens, dtype=torch.float64, generator=generator)).softmax(-1)
    if kind == "zeros":
        p, q = (
            keep(distribution, 1 + torch.randint(tokens, (rows,), generator=generator), generator)
            for distribution in (p, q)
        )
    if kind == "one-hot":
        lonely = torch.randint(3, (rows,), generator=generator)[:, None]  # of p, of q, of both
        p = torch.where(lonely != 1, keep(p, torch.ones(rows, dtype=torch.long), generator), p)
        q = torch.where(lonely != 0, keep(q, torch.ones(rows, dtype=torch.long), generator), q)
    if kind == "disjoint":
        is_first = torch.arange(tokens) < tokens // 2
        p, q = normal(p * is_first), normal(q * ~is_first)
    if kind == "equal":
        p = torch.where(torch.arange(rows)[:, None] % 2 == 0, p, torch.full_like(p, 1 / tokens))
        q = p.clone()
    return World(p, q, count)


def keep(
    distribution: Float64[Tensor, "r v"], counts: Int[Tensor, " r"], generator: torch.Generator
) -> Float64[Tensor, "r v"]:
    """Each row with that many of its tokens, by lot."""
    order = torch.rand(distribution.shape, generator=generator).argsort(-1).argsort(-1)
    return normal(distribution * (order < counts[:, None]))


def normal(distribution: Float64[Tensor, "r v"]) -> Float64[Tensor, "r v"]:
    return distribution / distribution.sum(-1, keepdim=True)
