"""A verifier for measurements: a scripted number of drafts is accepted, whatever a drafter's quality."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Int
from torch import Tensor

from lantern.core.sampling import Noise
from lantern.core.types import DraftTree, Rows, Verdict, Verifier


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
    is_exact = False

    def __post_init__(self) -> None:
        if max(self.counts) - 1 > len(self.path):
            deep = max(self.counts) - 1
            raise ValueError(f"the script accepts {deep} drafted tokens in a step, the tree has depth {len(self.path)}")

    @property
    def modes(self) -> frozenset[str]:
        """Modes of the inner verifier."""
        return self.inner.modes

    @property
    def lengths(self) -> Int[Tensor, " p"]:
        """The accepted drafts of a step by the number of its first new token, for engines that run whole rounds."""
        return _script(self.counts, self.path, self.positions, torch.device("cpu"))[0]

    def verify(self, tree: DraftTree, rows: Rows, noise: Noise) -> Verdict:
        """Return the scripted path with the bonus token of the inner verifier."""
        verdict = self.walk(self.inner, tree, rows) or self.inner.verify(tree, rows, noise)
        accepted, path = _script(self.counts, self.path, self.positions, tree.tokens.device)
        lengths = accepted[rows.places[:, 0]]
        steps = torch.arange(len(path), device=path.device)
        nodes = torch.where(steps < lengths[:, None], path, 0)
        return Verdict(nodes, lengths, verdict.next_token)


@cache
def _script(
    counts: tuple[int, ...], path: tuple[int, ...], positions: int, device: torch.device
) -> tuple[Int[Tensor, " p"], Int[Tensor, " d"]]:
    """Return the accepted drafted tokens of a step, by the position of its first new token, and the path.

    Past the script no token is accepted.
    """
    table, place = [0] * positions, 1
    for count in counts:
        if place < positions:
            table[place] = count - 1
        place += count
    return torch.tensor(table, device=device), torch.tensor(path, device=device)
