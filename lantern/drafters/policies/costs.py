"""Assumed time of a step where it was not measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AssumedCosts:
    """Time of a step in units of a plain step: `node` for each further node of the pass, `level` for each draft pass.

    The values were measured with the embedded model on two slow cores, compiled: 2.8 ms for a step of plain decoding,
    8.7 ms for a pass of 16 codes, 1 ms for a draft pass. On a GPU both are near 0; `lantern tune` measures them.
    """

    node: float = 0.15
    level: float = 0.35

    def step(self, *, nodes: int, depth: int, inner: int) -> float:
        """Return the time of a step with a tree of `nodes`, root included."""
        return 1.0 + self.node * (nodes - 1) + self.level * depth
