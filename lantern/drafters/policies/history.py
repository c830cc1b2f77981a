"""The acceptance of drafts at decided tokens, as an estimate of the acceptance at their neighbours.

A map has a cell for each place of an image, and a last one for neighbours outside it.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.types import Step

PRIOR = 0.5  # acceptance at places without neighbours, and of all before the first step


def updated_map(seen: Float[Tensor, "b m"], step: Step, side: int, *, decay: float = 0.5) -> Float[Tensor, "b m"]:
    """Return the map after a step: a tested token gets the weighted mean of its neighbours and its own result.

    A token is tested if the node before it was visited and had children. Others get the mean of their neighbours.
    """
    assert step.tree is not None and step.verdict is not None
    nodes, last = step.verdict.walked, seen.shape[1] - 1
    ahead, length = torch.arange(nodes.shape[1], device=seen.device), step.verdict.length[:, None]
    places, is_visited = step.start[:, None] + ahead, ahead <= length
    has_children = step.tree.shape.has_children.expand(len(nodes), -1).gather(1, nodes)
    predicted = neighbours(seen, places, step.start, side).mean(-1)
    mixed = decay * predicted + (1 - decay) * (ahead < length).to(seen.dtype)
    updated = torch.where(is_visited & has_children, mixed, predicted)
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
