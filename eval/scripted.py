"""Acceptance by script: verdicts of a wanted step compression, so that an engine is seen apart from a drafter's skill.

tau = 2.5, a tree of depth 3: codes kept of each step, its bonus code included
2 3 2 3 2 3 ...      after k steps floor(2.5 k) codes are known, beside the one that the prompt gave
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.types import DraftMode, DraftTree, NoiseSource, Prefill, Step, TreeShape, Verdict, Verifier


def script(tau: float, codes: int) -> list[int]:
    """How many codes each step commits, whose mean is `tau` and never strays from it by a whole code, up to `codes`.

    The code that the prompt gives is not among them. ValueError for a tau below 1.
    """
    if tau < 1:
        raise ValueError(f"tau is {tau}, wanted at least 1: every step commits a code")
    counts: list[int] = []
    while sum(counts) < codes:
        done = len(counts)
        # a hair above, for a tau such as 2.3 that floats hold from below
        counts.append(math.floor(tau * (done + 1) + 1e-9) - math.floor(tau * done + 1e-9))
    return counts


def deepest(shape: TreeShape) -> list[int]:
    """The nodes from below the root to the first of the deepest nodes."""
    depths, parents = shape.depths.tolist(), shape.parents.tolist()
    node = max(range(len(depths)), key=lambda i: (depths[i], -i))
    path: list[int] = []
    while node != 0:
        path.insert(0, node)
        node = parents[node]
    return path


@dataclass(frozen=True)
class ScriptedVerifier:
    """Lets another verifier do all its work, then keeps as much of the deepest path as the script says.

    How much is looked up by code number, on the device: all images keep step with the script. ValueError for a tree
    that is too shallow for it.
    """

    inner: Verifier
    counts: tuple[int, ...]
    path: tuple[int, ...]
    positions: int
    reads_soft_law: bool = False
    is_exact: bool = False
    _lengths: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if max(self.counts) - 1 > len(self.path):
            deep = max(self.counts) - 1
            raise ValueError(f"the script keeps {deep} drafted codes of a step, the tree is {len(self.path)} deep")

    @property
    def modes(self) -> frozenset[str]:
        """Those of the verifier within."""
        return self.inner.modes

    @property
    def reads_draws(self) -> bool:
        """As the verifier within."""
        return getattr(self.inner, "reads_draws", False)

    def draw(
        self, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Int[Tensor, "b n"]:
        """As the verifier within."""
        return self.inner.draw(log_p, positions, noise)

    def walk(
        self, tree: DraftTree, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Verdict:
        """The scripted path, with the bonus code that the verifier within drew."""
        return self._cut(self.inner.walk(tree, log_p, positions, noise), positions)

    def match(self, tree: DraftTree, drawn: Int[Tensor, "b n"], positions: Int[Tensor, "b n"]) -> Verdict:
        """As `walk`, of draws, where the verifier within needs no more."""
        inner: Any = self.inner
        return self._cut(inner.match(tree, drawn, positions), positions)

    def _cut(self, verdict: Verdict, positions: Int[Tensor, "b n"]) -> Verdict:
        lengths = self._table(positions.device)[positions[:, 0]]
        steps = torch.arange(len(self.path), device=positions.device)
        nodes = torch.where(steps < lengths[:, None], self._path(positions.device), 0)
        return Verdict(nodes, lengths, verdict.next_token)

    def _table(self, device: torch.device) -> Int[Tensor, " p"]:
        """Drafted codes to keep in the step whose first new code has each number; past the script, none."""
        key = f"lengths {device}"
        if key not in self._lengths:
            table, place = [0] * self.positions, 1
            for count in self.counts:
                if place < self.positions:
                    table[place] = count - 1
                place += count
            self._lengths[key] = torch.tensor(table, device=device)
        return self._lengths[key]

    def _path(self, device: torch.device) -> Int[Tensor, " d"]:
        key = f"path {device}"
        if key not in self._lengths:
            self._lengths[key] = torch.tensor(self.path, device=device)
        return self._lengths[key]


class FixedDrafter:
    """A drafter that costs nothing: below the last code always the same `nodes` - 1 children of the root.

    With it a step's time is that of scoring `nodes` nodes. It drafts "point".
    """

    mode: DraftMode = "point"
    needs_whole_prefix = False
    depth = 1

    def __init__(self, nodes: int, vocab_size: int) -> None:
        if nodes < 2:
            raise ValueError(f"got a tree of {nodes} nodes, wanted the root and at least one child")
        self.max_nodes = nodes
        self._tokens = torch.arange(nodes) % vocab_size

    def begin(self, prefill: Prefill, noise: NoiseSource) -> None:
        """Places the tree where the pictures are."""
        device = prefill.features.device
        place = torch.arange(self.max_nodes, device=device)
        ancestors = torch.eye(self.max_nodes, dtype=torch.bool, device=device)
        ancestors[:, 0] = True
        shape = TreeShape(
            parents=torch.zeros_like(place),
            ranks=(place - 1).clamp(min=0),
            depths=(place > 0).long(),
            ancestors=ancestors,
            widths=(self.max_nodes - 1,),
        )
        tokens = self._tokens.to(device).expand(len(prefill.first), -1)
        self._tree = DraftTree(tokens, shape, self.mode)

    def propose(self) -> DraftTree:
        """The tree."""
        return self._tree

    def observe(self, step: Step) -> None:
        """Learns nothing."""
