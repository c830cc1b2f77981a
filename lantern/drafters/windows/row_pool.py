"""Row pool: the rows below are guessed ahead, the parallel rows of PJD and ZipAR used as drafts.

ZipAR (arXiv:2412.04062) and PJD (arXiv:2606.05703) decode a row before the one above is finished. This needs no
training and changes the distribution. Here each pass of the target scores, next to a Jacobi window, a few scouts in a
row below: codes of a pool that see all committed codes and their own row. The target's samples there, with the noise of
those places, go back to the pool. When the window reaches a place, it starts with the pool's code, which is also a
second candidate next to the window's own sample. Verification is in raster order, so the result is plain decoding's.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import DraftMode, DraftTree, Kept, NoiseSource, Prefill, Step, Target, TreeShape
from lantern.drafters.trees.static import StaticTree, TreeDrafter
from lantern.methods.spec import DrafterContext, Method, MethodSpec, Setting


def two_candidate_chain(window: int, doubled: int) -> StaticTree:
    """Return a chain of `window` - 1 drafts, the first `doubled` of them with a second candidate."""
    chain = [(0,) * depth for depth in range(1, window)]
    second = [(0,) * depth + (1,) for depth in range(min(doubled, window - 1))]
    return StaticTree((*chain, *second))


def with_scouts(shape: TreeShape, scouts: int, offset: int) -> TreeShape:
    """Return the shape with a chain of scouts, the first `offset` codes past the root; scouts also see the root."""
    device, nodes = shape.parents.device, shape.num_nodes
    ancestors = torch.zeros(nodes + scouts, nodes + scouts, dtype=torch.bool, device=device)
    ancestors[:nodes, :nodes] = shape.ancestors
    ancestors[nodes:, 0] = True
    ancestors[nodes:, nodes:] = torch.ones(scouts, scouts, dtype=torch.bool, device=device).tril()
    steps = torch.arange(scouts, device=device)
    parents = torch.cat([shape.parents, nodes + (steps - 1).clamp(min=0)])
    ranks = torch.cat([shape.ranks, torch.zeros_like(steps)])
    return TreeShape(parents, ranks, torch.cat([shape.depths, steps + offset]), ancestors, shape.widths)


class RowPoolDrafter(TreeDrafter):
    """Windows of the target's own samples, with a pool of codes for the rows below that scouts update.

    The first of `scouts` adjacent scouts is `lag` codes to the left of the place below the last committed code. Places
    without a guess start with the code above. `doubled` is the number of the window's first codes that have the pool's
    code as a second candidate. ValueError for a window of less than two and for less than one scout.
    """

    mode: DraftMode = "gumbel"
    reads_leftovers = True
    reads_kept = True
    needs_whole_prefix = False

    def __init__(
        self, target: Target, *, sampling: Sampling, window: int = 16, scouts: int = 12, lag: int = 4, doubled: int = 2
    ) -> None:
        if window < 2:
            raise ValueError(f"the window is {window}, wanted at least 2: the last code and one draft")
        if scouts < 1 or lag < 0 or doubled < 0:
            raise ValueError(f"scouts {scouts}, lag {lag}, doubled {doubled}: wanted at least 1, 0 and 0")
        self.sampling, self.count = sampling, target.config.block_size
        self.grid = target.config.raster.columns
        window = max(min(window, self.count), 2)
        self.tree = two_candidate_chain(window, min(doubled, window - 1) if target.config.vocab_size > 1 else 0)
        self.scouts, self.offset = scouts, max(self.grid - lag, 1)

    @property
    def max_nodes(self) -> int:
        """Nodes scored in a pass, the root and scouts included."""
        return self.tree.max_nodes + self.scouts

    def begin(self, prefill: Prefill, noise: NoiseSource) -> None:
        """Empty the pool and fill the window with the first code."""
        first, device = prefill.first[:, None], prefill.first.device
        self.noise, self._shape = noise, self.tree.shape(device)
        self._scored = with_scouts(self._shape, self.scouts, self.offset)
        choices = ((), *self.tree.choices)
        self._chain = torch.tensor([i for i, choice in enumerate(choices) if not any(choice)], device=device)
        # For each node its column in [root, window, pool codes for the first places of the window].
        sources = [len(c) + (self.depth if any(c) else 0) for c in choices]
        self._sources = torch.tensor(sources, device=device)
        self._steps = torch.arange(self.depth, device=device)
        self._row = torch.arange(self.scouts, device=device)
        self._places = torch.arange(self.count, device=device)
        self._known = torch.ones_like(prefill.first)
        # Samples for places past the end go to one extra place.
        self._pool = first.repeat(1, self.count + 1)
        self._is_sampled = torch.zeros_like(self._pool, dtype=torch.bool)
        self._build(first, first.expand(-1, self.depth))

    def read_kept(self, kept: Kept) -> None:
        """Put these codes into the pool and fill the window with the last of them."""
        count, last = kept.codes.shape[1], kept.codes[:, -1:]
        start, self._known = self._known, self._known + count
        self._keep(kept.codes, start, torch.full_like(start, count))
        self._build(last, last.expand(-1, self.depth))

    def propose(self) -> DraftTree:
        """Return the current window with its scouts."""
        return self._tree

    def observe(self, step: Step) -> None:
        """Shift the window, put the scouts' samples into the pool, and fill the window's end from it."""
        assert step.verdict is not None and step.verdict.leftovers is not None
        counts = step.counts
        self._read_scouts(step)
        start, self._known = self._known, self._known + counts
        self._keep(step.codes, start, counts)
        root = step.codes.gather(1, (counts - 1).clamp(min=0)[:, None])
        sampled = step.verdict.leftovers.tokens[:, self._chain]
        index = counts[:, None] + self._steps
        window = sampled.gather(1, index.clamp(max=self.depth))
        # Behind the samples the window holds the pool's codes, or the code before where the pool has none.
        places = (self._known[:, None] + self._steps).clamp(max=self.count - 1)
        is_pooled = (index > self.depth) & self._is_sampled.gather(1, places)
        self._build(root, torch.where(is_pooled, self._pool.gather(1, places), window))

    def _read_scouts(self, step: Step) -> None:
        """Put the sample behind each scout, with the noise of its place, into the pool."""
        assert step.scores is not None
        logits = step.scores.logits.unflatten(0, (len(self._known), self.sampling.rows))[:, :, -self.scouts :]
        # Scouts start `offset` behind the root, whose number is `known` - 1.
        places = self._known[:, None] + self.offset + self._row
        inside = places.clamp(max=self.count - 1)
        sampled = (self.sampling.log_probs(logits, inside) + self.noise.gumbel(inside)).argmax(-1)
        self._write(places, sampled)

    def _keep(self, codes: Int[Tensor, "b m"], start: Int[Tensor, " b"], counts: Int[Tensor, " b"]) -> None:
        """Put committed codes into the pool: places below them start with them."""
        steps = torch.arange(codes.shape[1], device=codes.device)
        places = torch.where(steps < counts[:, None], start[:, None] + steps, self.count)
        self._write(places, codes)

    def _write(self, places: Int[Tensor, "b m"], codes: Int[Tensor, "b m"]) -> None:
        places = places.clamp(max=self.count)
        self._pool = self._pool.scatter(1, places, codes)
        self._is_sampled = self._is_sampled.scatter(1, places, torch.ones_like(places, dtype=torch.bool))

    def _pooled(self, places: Int[Tensor, "b m"]) -> Int[Tensor, "b m"]:
        """Return the pool's codes, or the code above where the pool has none."""
        places = places.clamp(max=self.count - 1)
        above = (places - self.grid).clamp(min=0)
        return torch.where(
            self._is_sampled.gather(1, places), self._pool.gather(1, places), self._pool.gather(1, above)
        )

    def _build(self, root: Int[Tensor, "b 1"], window: Int[Tensor, "b d"]) -> None:
        ahead = self._known[:, None]
        second = self._pooled(ahead + self._steps)
        codes = torch.cat([root, window, second], 1)[:, self._sources]
        scouts = self._pooled(ahead - 1 + self.offset + self._row)
        self._tree = DraftTree(torch.cat([codes, scouts], 1), self._shape, self.mode, scored=self._scored)


def build(method: Method, context: DrafterContext) -> RowPoolDrafter:
    """Build windows with the method's settings."""
    return RowPoolDrafter(context.target, sampling=context.sampling, **method.settings)


METHODS = (
    MethodSpec(
        "row-pool",
        "no drafter: scouts guess rows below ahead (PJD, ZipAR) and serve as drafts; plain decoding's codes",
        "windows",
        drafter=build,
        settings=(
            Setting("window", 16, "codes scored in one pass", low=2),
            Setting("scouts", 12, "codes of the row below that are guessed ahead", low=1),
            Setting("lag", 4, "columns that the first scout stays behind the window", low=0),
            Setting("doubled", 2, "first places of the window that test the pool's code as well", low=0),
        ),
        paper="2606.05703",
    ),
)
