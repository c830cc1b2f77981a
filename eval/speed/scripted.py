"""Scripted acceptance: verdicts of a given tokens per step, to measure an engine apart from a drafter's quality.

tau = 2.5, a tree of depth 3: tokens kept of each step, its bonus token included
2 3 2 3 2 3 ...      after k steps floor(2.5 k) tokens are known, besides the one of the prefill
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from lantern.core.noise import Noise
from lantern.core.types import DraftTree, Rows, TreeShape, Verdict, Verifier


def script(tau: float, tokens: int) -> list[int]:
    """Return the tokens that each step commits: `tokens` in total, with mean `tau` up to less than one token.

    The token of the prefill is not counted. ValueError for a tau below 1.
    """
    if tau < 1:
        raise ValueError(f"tau is {tau}, expected at least 1: every step commits a token")
    counts: list[int] = []
    while sum(counts) < tokens:
        done = len(counts)
        # the small term corrects for values such as 2.3 that floats round down
        counts.append(math.floor(tau * (done + 1) + 1e-9) - math.floor(tau * done + 1e-9))
    return counts


def deepest(shape: TreeShape) -> list[int]:
    """Return the path from below the root to the first of the deepest nodes."""
    depths, parents = shape.depths.tolist(), shape.parents.tolist()
    node = max(range(len(depths)), key=lambda i: (depths[i], -i))
    path: list[int] = []
    while node != 0:
        path.insert(0, node)
        node = parents[node]
    return path


@dataclass(frozen=True)
class ScriptedVerifier:
    """Runs another verifier, then replaces its verdict by the scripted length of the deepest path.

    The length is looked up by token position, on the device, for all images. `walk` is that of a prepared target, which
    may verify by a kernel. ValueError for a tree that is too shallow.
    """

    inner: Verifier
    counts: tuple[int, ...]
    path: tuple[int, ...]
    positions: int
    walk: Callable[[Verifier, DraftTree, Rows], Verdict | None] = lambda *_: None
    is_exact: bool = False
    _made: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if max(self.counts) - 1 > len(self.path):
            deep = max(self.counts) - 1
            raise ValueError(f"the script accepts {deep} drafted tokens in a step, the tree has depth {len(self.path)}")

    @property
    def modes(self) -> frozenset[str]:
        """Modes of the inner verifier."""
        return self.inner.modes

    def verify(self, tree: DraftTree, rows: Rows, noise: Noise) -> Verdict:
        """Return the scripted path with the bonus token of the inner verifier."""
        verdict = self.walk(self.inner, tree, rows) or self.inner.verify(tree, rows, noise)
        accepted, path = self._script(tree.tokens.device)
        lengths = accepted[rows.places[:, 0]]
        steps = torch.arange(len(path), device=path.device)
        nodes = torch.where(steps < lengths[:, None], path, 0)
        return Verdict(nodes, lengths, verdict.next_token)

    def _script(self, device: torch.device) -> tuple[Int[Tensor, " p"], Int[Tensor, " d"]]:
        """Return the accepted drafted tokens of a step, by the position of its first new token, and the path.

        Past the script no token is accepted.
        """
        if device not in self._made:
            table, place = [0] * self.positions, 1
            for count in self.counts:
                if place < self.positions:
                    table[place] = count - 1
                place += count
            self._made[device] = torch.tensor(table, device=device), torch.tensor(self.path, device=device)
        return self._made[device]
