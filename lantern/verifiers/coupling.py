"""Jacobi coupling: all codes of a window are drawn anew, each so that it seldom changes."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.sampling import pick
from lantern.types import DraftTree, Leftovers, NoiseSource, Verdict


@dataclass(frozen=True)
class CouplingVerifier:
    """Keeps code x with probability min(1, p(x) / q(x)), else draws from norm(max(p - q, 0)), at all places at once.

    What comes of this is drawn from p, and differs from x as seldom as it can (maximal coupling). The codes up to the
    first change are committed; those behind are drafts for the next step, whose law is now p, kept or not. With
    `redraw` "coupled" they come from the same test, arXiv:2510.24211; with "independent" they are drawn from p afresh,
    as in speculative Jacobi decoding, arXiv:2410.01699.

        window  a b c d        p of what follows each, at the root and at a, b, c, d
        kept    a b . d        the root's and a's tests pass, b's fails: x comes in place of c
        drawn   a b x d e      committed: a b x; leftovers d (or its redraw) and e, drawn from the row of d

    The test at a place reads no code behind it and its uniforms are used once, in one turn, so that given all codes
    before it and their history, a code follows its recorded law: that is what the next test needs. A tree must be a
    chain in node order with laws.
    """

    redraw: Literal["coupled", "independent"] = "coupled"
    modes: frozenset[str] = frozenset({"jacobi"})
    is_exact: bool = True
    reads_soft_law: bool = False

    def __post_init__(self) -> None:
        if self.redraw not in ("coupled", "independent"):
            raise ValueError(f'redraw is "{self.redraw}", wanted "coupled" or "independent"')

    def draw(
        self, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Int[Tensor, "b n"]:
        """Draws by uniforms of no turn."""
        return pick(log_p.exp(), noise.uniform(positions, 2)[..., 1])

    def walk(
        self, tree: DraftTree, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Verdict:
        """Draws what follows every node and commits up to the first draw that is not the node's child."""
        if tree.log_q is None:
            raise ValueError("the window has no laws, without which nothing can be coupled: keep them in its drafter")
        # Every turn decides a code, so the first undecided one names the turn.
        uniforms = noise.uniform(positions, 2, turns=positions[:, 0])
        p, q, codes = log_p.exp(), tree.log_q.exp(), tree.tokens[:, 1:]
        own_p, own_q = (law[:, :-1].gather(-1, codes[..., None])[..., 0] for law in (p, q))
        is_kept = uniforms[:, :-1, 0] * own_q < own_p
        is_before = is_kept.cumprod(1).bool()
        length = is_before.sum(1)
        steps = torch.arange(p.shape[1], device=length.device)
        is_fresh = (steps == steps[-1]) | ((steps > length[:, None]) & (self.redraw == "independent"))
        drawn = pick(self.left(p, q, is_fresh), uniforms[..., 1])
        is_kept = is_kept if self.redraw == "coupled" else is_before
        drawn[:, :-1] = torch.where(is_kept, codes, drawn[:, :-1])
        path = torch.where(is_before, steps[1:], 0)
        next_token = drawn.gather(1, length[:, None])[:, 0]
        return Verdict(path, length, next_token, leftovers=Leftovers(drawn, log_p))

    def left(
        self, p: Float[Tensor, "b n v"], q: Float[Tensor, "b n v"], is_fresh: Bool[Tensor, "b n"]
    ) -> Float[Tensor, "b n v"]:
        """The part of p above q; p where the draw is fresh, or where rounding leaves nothing."""
        above = (p - q).clamp_(min=0.0)
        return torch.where((is_fresh | ~(above.sum(-1) > 0))[..., None], p, above)
