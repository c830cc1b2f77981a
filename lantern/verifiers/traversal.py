"""Traversal verification: a tree is tested from its leaves up, so that whole paths are accepted or refused at once.

Weng et al., arXiv:2505.12398; on a chain it is block verification, Sun et al., arXiv:2403.10444. A token that is less
probable than drafted can be saved by more probable ones below it. They prove that of a chain no exact verifier keeps
more tokens on average.
"""

from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.sampling import Noise, logs, probabilities
from lantern.core.types import DraftTree, Rows, TreeShape, Verdict
from lantern.verifiers.rejection import RejectionVerifier, normalised


@dataclass(frozen=True)
class LeafOrder:
    """The order in which a static tree is tested: its nodes without the root, children before parents, by rank.

    `parents` are those of all nodes, `paths[i, :depth]` the nodes from the root's child down to node i, then zeros.
    """

    order: tuple[int, ...]
    parents: tuple[int, ...]
    paths: Int[Tensor, "n d"]


@cache
def leaf_order(shape: TreeShape) -> LeafOrder:
    """Return the order of a static tree; ValueError for trees that differ between images."""
    if shape.parents.ndim != 1:
        raise ValueError("the shapes of the trees differ between images, wanted one static tree: use rejection")
    parents, order, paths = shape.parents.tolist(), list[int](), [list[int]()]
    for node in range(1, len(parents)):
        paths.append([*paths[parents[node]], node])

    def append(node: int) -> None:
        for child in range(1, len(parents)):
            if parents[child] == node:
                append(child)
                order.append(child)

    append(0)
    padded = [path + [0] * (shape.depth - len(path)) for path in paths]
    return LeafOrder(tuple(order), tuple(parents), shape.parents.new_tensor(padded).view(len(paths), -1))


@dataclass(frozen=True)
class TraversalVerifier:
    """Accept the path to a leaf with its rate r, else remove the leaf and go on (arXiv:2505.12398, algorithm 1).

    The rate of child x below a node of rate r is min(1, r p(x) / q(x)), where p, q and r are the node's when the walk
    enters x; the root has rate 1. When x is refused, its parent's become

        p' = norm(max(r p - q, 0)),   r' = s / (s + 1 - r),   s = sum of max(r p - q, 0),

    and x is removed from q ("sampled") or q is the next child's ("point"). The next token is sampled from p of the node
    where the walk ends.

    Unlike rejection, a decision reads tokens of other branches and of later places. The draft must therefore be
    independent between nodes and between steps: drafters sample it with `Noise.fresh`. Static trees only.
    """

    modes = frozenset({"point", "sampled"})
    is_exact = True
    draw = staticmethod(RejectionVerifier.draw)

    def verify(self, tree: DraftTree, rows: Rows, noise: Noise) -> Verdict:
        """Keep the path to the first accepted node, leaves before their parents; ValueError for dynamic trees."""
        plan, tokens = leaf_order(tree.shape), tree.tokens
        taken, is_open = torch.zeros_like(tokens[:, 0]), torch.ones_like(tokens[:, 0], dtype=torch.bool)
        uniforms = noise.uniform(rows.places[:, :1], tree.shape.num_nodes)[:, 0]
        p, q, rates = {0: row_of(rows, tokens, 0)}, dict[int, Tensor](), {0: torch.ones_like(uniforms[:, 0])}
        left = p[0]

        def enter(node: int) -> None:
            """Give a node its rate and its p, after those above it."""
            missing = list[int]()
            while node not in rates:
                missing.append(node)
                node = plan.parents[node]
            for below in reversed(missing):
                parent, token = plan.parents[below], tokens[:, below : below + 1]
                if tree.mode == "point" or tree.log_q is None:
                    q[parent] = torch.zeros_like(p[parent]).scatter_(1, token, 1.0)
                elif parent not in q:
                    q[parent] = probabilities(tree.log_q[:, parent])
                own_p, own_q = p[parent].gather(1, token)[:, 0], q[parent].gather(1, token)[:, 0]
                rate = (rates[parent] * own_p / own_q.clamp(min=torch.finfo(own_q.dtype).tiny)).clamp(max=1.0)
                rates[below] = torch.where(own_q > 0, rate, 0.0)  # q = 0 marks "no child"
                p[below] = row_of(rows, tokens, below)

        for node in plan.order:
            enter(node)
            is_accepted = is_open & (uniforms[:, node] < rates[node])
            taken = torch.where(is_accepted, node, taken)
            left = torch.where(is_accepted[:, None], p[node], left)
            is_open = is_open & ~is_accepted
            if rows.may_stop and not bool(is_open.any()):
                break
            self._refuse(plan.parents[node], tokens[:, node : node + 1], p, q, rates)
        left = torch.where(is_open[:, None], p[0], left)
        places = rows.places.gather(1, taken[:, None])
        next_token = self.draw(logs(left)[:, None], places, noise, rows.may_stop)[:, 0]
        return Verdict(plan.paths[taken], tree.shape.depths[taken], next_token)

    def _refuse(
        self, node: int, child: Int[Tensor, "b 1"], p: dict[int, Tensor], q: dict[int, Tensor], rates: dict[int, Tensor]
    ) -> None:
        """Change a node's p, q and rate after one of its children was refused."""
        is_child, rate = q[node].gather(1, child) > 0, rates[node][:, None]
        rest = (rate * p[node] - q[node]).clamp(min=0.0)
        total = rest.sum(1, keepdim=True)
        base = total + (1.0 - rate)  # 0 only where p = q, whose children are never refused
        rates[node] = torch.where(is_child & (base > 0), total / base.clamp(min=1e-300), rate)[:, 0]
        p[node] = torch.where(is_child, normalised(rest, p[node]), p[node]).to(p[node].dtype)
        q[node] = torch.where(is_child, normalised(q[node].scatter(1, child, 0.0), q[node]), q[node])


def row_of(rows: Rows, tokens: Int[Tensor, "b n"], node: int) -> Float[Tensor, "b v"]:
    """Return p of what follows a node."""
    return probabilities(rows.log_p(torch.full_like(tokens[:, :1], node))[:, 0])
