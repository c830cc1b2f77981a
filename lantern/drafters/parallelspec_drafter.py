"""How a parallel drafter drafts: one pass over what was committed and its masks, whatever the depth of the tree."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.decoding.cache import StaticCache
from lantern.decoding.tree_mask import TreeMask
from lantern.drafters.chooser import Chooser
from lantern.drafters.marginals import Marginals, check_fit
from lantern.drafters.pairs import Pairs
from lantern.drafters.parallelspec import ParallelSpec
from lantern.methods import Kit, Method
from lantern.sampling import Sampling
from lantern.trees.static import StaticTree, named
from lantern.types import DraftMode, DraftTree, NoiseSource, Prefill, Step, Target


class ParallelContext:
    """The keys and values that a parallel drafter keeps, and its one pass a step.

    `pairs` is how many pairs a pass may take in, `depths` how many codes it guesses.
    """

    def __init__(self, module: ParallelSpec, sampling: Sampling, *, pairs: int, depths: int) -> None:
        self.module, self.sampling, self.depths = module, sampling, depths
        self.stage = pairs + depths - 1

    def begin(self, prefill: Prefill) -> None:
        """An empty cache."""
        config, device, images = self.module.config, prefill.first.device, len(prefill.first)
        self.cache = StaticCache(
            layers=len(self.module.layers),
            images=images,
            rows=1,
            heads=config.n_head,
            head_dim=config.dim // config.n_head,
            prefix=0,
            codes=config.block_size,
            stage=self.stage,
            dtype=self.module.cache_dtype,
            device=device,
        )
        self._mask = TreeMask(self.cache, torch.zeros(images, 0, dtype=torch.bool, device=device), self.stage)
        self._stage = torch.arange(self.stage, device=device) + self.cache.first_stage_slot
        self._steps = torch.arange(self.stage, device=device)

    def guess(self, pairs: Pairs, anchor: Int[Tensor, "b 1"]) -> Float[Tensor, "b d c"]:
        """Features that predict the codes behind pair `anchor`; keeps all pairs, of which the first are committed.

        Masks see the pairs up to their anchor.
        """
        images, count = pairs.codes.shape
        known, size = pairs.start, count + self.depths - 1
        steps = self._steps[:size]
        ahead = anchor + (steps[count:] - count + 1)
        places = known[:, None] + torch.cat([steps[:count].expand(images, -1), ahead], 1)
        # Pairs see pairs before them, masks those up to the anchor and, being causal too, the masks before them.
        limit = torch.cat([steps[:count].expand(images, -1), anchor.expand(-1, self.depths - 1)], 1)
        is_mask = steps >= count
        sees = (steps <= limit[..., None]) | (is_mask & is_mask[:, None] & (steps <= steps[:, None]))
        out = self.module.guess(
            pairs.features.to(self.module.fc.weight.dtype),
            pairs.codes,
            places.clamp(max=self.cache.codes - 1),
            anchor,
            self._mask.update(known, sees),
            scales=self.sampling.scales(pairs.places),
            cache=self.cache,
            slots=self._stage[:size].expand(images, -1),
        )
        self.cache.commit(steps[:count].expand(images, -1), known)
        index = torch.cat([anchor, steps[count:].expand(images, -1)], 1)
        return out.gather(1, index[..., None].expand(-1, -1, out.shape[-1]))


class ParallelDrafter:
    """Drafts trees of a `ParallelSpec` module's independent guesses, by one pass of it a step."""

    needs_whole_prefix = False
    draft_passes = 1  # for all depths of a tree

    def __init__(
        self,
        module: ParallelSpec,
        target: Target,
        *,
        tree: StaticTree,
        mode: DraftMode,
        sampling: Sampling,
        records_log_q: bool = False,
    ) -> None:
        check_fit(module.config, target, tree)
        self.module, self.sampling = module, sampling
        self.mode: DraftMode = mode
        self.context = ParallelContext(module, sampling, pairs=tree.depth + 1, depths=tree.depth)
        self.marginals = Marginals(tree, mode=mode, sampling=sampling, target=target, records_log_q=records_log_q)
        self.records_log_q = self.marginals.records_log_q
        self.max_nodes, self.depth = tree.max_nodes, tree.depth

    def weave(self, chooser: Chooser, most_committed: int) -> None:
        """Lets another choose the children, in trees of which a step may commit this many codes."""
        self.marginals.chooser = chooser
        self.context = ParallelContext(self.module, self.sampling, pairs=most_committed, depths=self.depth)

    def begin(self, prefill: Prefill, noise: NoiseSource) -> None:
        """Takes the prompt's last feature with code 0."""
        self.marginals.begin(noise, prefill.first.device)
        self.context.begin(prefill)
        self._pairs = Pairs.of_prompt(prefill, self.sampling)

    def observe(self, step: Step) -> None:
        """Takes in what was committed."""
        self._pairs = Pairs.of_step(step, self.sampling, self.module.config.block_size)

    def propose(self) -> DraftTree:
        """One pass of the drafter, the target's head over `depth` features, and the tree."""
        guesses = self.context.guess(self._pairs, self._pairs.last)
        return self.marginals.draft(self._pairs.root, guesses, self._pairs.known)


def build(method: Method, kit: Kit) -> ParallelDrafter:
    """Trees of the method's name, drafted by the model's parallel drafter."""
    module = kit.part(method)
    assert isinstance(module, ParallelSpec) and method.tree is not None
    mode = "point" if kit.sampling.is_greedy and method.mode == "sampled" else method.mode
    records = method.relaxation is not None and mode == "gumbel" and not kit.sampling.is_greedy
    return ParallelDrafter(
        module, kit.target, tree=named(method.tree), mode=mode, sampling=kit.sampling, records_log_q=records
    )
