"""Multi-round rejection: children are tested one after the other, each against what the last refusal left."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.noise import Purpose
from lantern.types import Acceptance, DraftTree, NoiseSource, Verdict


@dataclass(frozen=True)
class Outcome:
    """What came of a node's children: the one `taken` where `is_accepted`, and the law `left` by the refusals."""

    is_accepted: Bool[Tensor, " b"]
    taken: Int[Tensor, " b"]
    left: Float[Tensor, "b v"]
    is_relaxed: Bool[Tensor, " b"]
    moved: Float[Tensor, " b"]


@dataclass(frozen=True)
class RejectionVerifier:
    """Accepts a child x with probability min(1, p(x) / q(x)); after a refusal p becomes norm(max(p - q, 0)).

    Leviathan et al., arXiv:2211.17192, for one child; in rounds over siblings arXiv:2305.09781, with draws without
    replacement as EAGLE tests them, arXiv:2401.15077. Siblings are tested in draw order, one only after the one
    before it was refused. With q a point mass ("point") a refusal zeroes p(x); draws without replacement
    ("sampled") take x out of q, independent draws ("iid") leave q as it is. If all are refused the next code is
    drawn from what is left, by noise that no drafting has touched.

    `relaxation` (LANTERN, LANTERN++) raises p(x) in the test and says what a refusal leaves. Its price is reported:
    the mass moved at each test made, which is p's total variation to the law that the test is exact for.
    """

    relaxation: Acceptance | None = None
    modes: frozenset[str] = frozenset({"point", "sampled", "iid"})
    reads_soft_law: bool = False

    def __post_init__(self) -> None:
        if self.relaxation is not None and not hasattr(self.relaxation, "refuse"):
            name = type(self.relaxation).__name__
            raise ValueError(f"{name} changes the law itself: give it to Gumbel match, not to the rejection verifier")

    @property
    def is_exact(self) -> bool:
        """Whether codes follow the target's own law."""
        return self.relaxation is None

    def draw(
        self, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Int[Tensor, "b n"]:
        """Draws by noise of its own."""
        return (log_p + noise.gumbel(positions, Purpose.RESIDUAL)).argmax(-1)

    def walk(
        self, tree: DraftTree, log_p: Float[Tensor, "b n v"], positions: Int[Tensor, "b n"], noise: NoiseSource
    ) -> Verdict:
        """Descends while a child is accepted, then draws from what is left (below a leaf: from p)."""
        images = torch.arange(len(tree.tokens), device=tree.tokens.device)
        node, last = torch.zeros_like(images), torch.zeros_like(images)
        is_alive = torch.ones_like(node, dtype=torch.bool)
        final = log_p[:, 0].exp()
        outcomes: list[Outcome] = []
        uniforms = noise.uniform(positions, max(tree.shape.widths))
        for width in tree.shape.widths:
            p = log_p[images, node].exp()
            q = None if tree.log_q is None or tree.mode == "point" else tree.log_q[images, node].exp()
            outcome = self.test_children(tree, node, p, q, uniforms[images, node, :width], is_alive)
            final = torch.where(is_alive[:, None], outcome.left, final)
            is_alive = outcome.is_accepted
            node = torch.where(is_alive, outcome.taken, 0)
            last = torch.where(is_alive, outcome.taken, last)
            outcomes.append(outcome)
        final = torch.where(is_alive[:, None], log_p[images, node].exp(), final)
        next_token = self.draw(final.log()[:, None], positions.gather(1, last[:, None]), noise)[:, 0]
        accepted = torch.stack([outcome.is_accepted for outcome in outcomes], 1)
        path = torch.stack([outcome.taken for outcome in outcomes], 1)
        if self.relaxation is None:
            return Verdict(path, accepted.sum(1), next_token)
        relaxed = torch.stack([outcome.is_relaxed for outcome in outcomes], 1)
        moved = torch.stack([outcome.moved for outcome in outcomes], 1)
        return Verdict(path, accepted.sum(1), next_token, relaxed, torch.nn.functional.pad(moved, (0, 1)))

    def test_children(
        self,
        tree: DraftTree,
        node: Int[Tensor, " b"],
        p: Float[Tensor, "b v"],
        q: Float[Tensor, "b v"] | None,
        uniforms: Float[Tensor, "b w"],
        is_alive: Bool[Tensor, " b"],
    ) -> Outcome:
        """Tests the children of `node` in draw order, in the images that are still alive."""
        zeros = torch.zeros_like(node)
        outcome = Outcome(zeros.bool(), zeros, p, zeros.bool(), torch.zeros_like(p[:, 0]))
        of_node = tree.shape.parents == node[:, None]
        of_node[:, 0] = False
        for rank in range(uniforms.shape[1]):
            is_child = of_node & (tree.shape.ranks == rank)
            child = is_child.long().argmax(1)
            code = tree.tokens.gather(1, child[:, None])
            law = torch.zeros_like(p).scatter_(1, code, 1.0) if q is None else q
            own_q = law.gather(1, code)[:, 0]
            # A code that q cannot draw stands for "no child": its law said nothing, so it is passed over.
            is_tested = is_alive & ~outcome.is_accepted & is_child.any(1) & (own_q > 0)
            outcome = self._test(outcome, child, code[:, 0], law, uniforms[:, rank] * own_q, is_tested, tree.mode)
            if tree.mode == "sampled":
                q = normalised(law.scatter(1, code, 0.0), law)
        return outcome

    def _test(
        self,
        before: Outcome,
        child: Int[Tensor, " b"],
        code: Int[Tensor, " b"],
        q: Float[Tensor, "b v"],
        threshold: Float[Tensor, " b"],
        is_tested: Bool[Tensor, " b"],
        mode: str,
    ) -> Outcome:
        """Accepts where the threshold u q(x) is below the mass of x; elsewhere computes what is left."""
        p = before.left
        own = p.gather(1, code[:, None])[:, 0]
        if self.relaxation is None:
            mass, spent = own, before.moved
            left = (p - q).clamp(min=0.0)
        else:
            moved = self.relaxation.move(p, code)
            mass = own + moved.mass
            spent = before.moved + torch.where(is_tested, moved.mass, 0.0)
            left = self.relaxation.refuse(p, q, code, moved, is_point=mode == "point")
        is_accepted = is_tested & (threshold < mass)
        is_refused = is_tested & ~is_accepted
        return Outcome(
            is_accepted=before.is_accepted | is_accepted,
            taken=torch.where(is_accepted, child, before.taken),
            left=torch.where(is_refused[:, None], normalised(left, p), p),
            is_relaxed=before.is_relaxed | (is_accepted & ~(threshold < own)),
            moved=spent,
        )


def normalised(law: Float[Tensor, "b v"], otherwise: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
    """The law scaled to sum 1; `otherwise` where nothing is left, which only rounding can bring about."""
    total = law.sum(1, keepdim=True)
    return torch.where(total > 0, law / total, otherwise)
