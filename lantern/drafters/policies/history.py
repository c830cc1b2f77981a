"""The acceptance of drafts at decided tokens, as an estimate of the acceptance at their neighbours."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.types import Step

PRIOR = 0.5  # acceptance at places without neighbours


@dataclass(frozen=True)
class Tested:
    """The nodes on the path of a step, one per column: the root and `d` nodes below it.

    `is_tested`: the node was visited within the image and had children; `is_taken`: one of its children was accepted.
    """

    nodes: Int[Tensor, "b m"]
    is_tested: Bool[Tensor, "b m"]
    is_taken: Bool[Tensor, "b m"]


def outcome(step: Step) -> Tested:
    """Return what a step tested; nothing where an image is finished."""
    assert step.tree is not None and step.verdict is not None
    nodes = torch.nn.functional.pad(step.verdict.path, (1, 0))
    depth = torch.arange(nodes.shape[1], device=nodes.device)
    is_visited = (depth <= step.verdict.length[:, None]) & (depth < step.counts[:, None])
    has_children = step.tree.shape.has_children.expand(len(nodes), -1).gather(1, nodes)
    return Tested(nodes, is_visited & has_children, depth < step.verdict.length[:, None])


def empty_map(images: int, tokens: int, device: torch.device) -> Float[Tensor, "b m"]:
    """Return the map before the first step; the last cell is for neighbours outside the image."""
    return torch.full((images, tokens + 1), PRIOR, device=device)


def updated_map(seen: Float[Tensor, "b m"], step: Step, side: int, *, decay: float = 0.5) -> Float[Tensor, "b m"]:
    """Return the map after a step: a tested token gets the weighted mean of its neighbours and its own result.

    Tokens without drafts get the mean of their neighbours.
    """
    made, last = outcome(step), seen.shape[1] - 1
    ahead = torch.arange(made.nodes.shape[1], device=seen.device)
    places = step.start[:, None] + ahead
    predicted = neighbours(seen, places, step.start, side).mean(-1)
    updated = torch.where(made.is_tested, decay * predicted + (1 - decay) * made.is_taken, predicted)
    is_new = (places < last) & (ahead < step.counts[:, None])
    # Other entries are written to the last cell, which keeps the value PRIOR.
    return seen.scatter(1, torch.where(is_new, places, last), torch.where(is_new, updated, PRIOR))


def neighbours(
    seen: Float[Tensor, "b m"], places: Int[Tensor, "b n"], known: Int[Tensor, " b"], side: int
) -> Float[Tensor, "b n 3"]:
    """Return the acceptance at the left, upper and upper right neighbours; at the left the last known token."""
    none = seen.shape[1] - 1
    column = places % side
    left = torch.where(column > 0, torch.minimum(places, known[:, None]) - 1, none)
    above = torch.where(places >= side, places - side, none)
    right = torch.where((places >= side) & (column < side - 1), places - side + 1, none)
    cells = torch.stack([left, above, right], -1).clamp(0, none)
    return seen.gather(1, cells.flatten(1)).view(cells.shape)
