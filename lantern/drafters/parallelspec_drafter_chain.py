"""How a parallel drafter goes on behind a Jacobi window: it reads all of it and guesses what comes behind at once."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.drafters.marginals import check_fit
from lantern.drafters.pairs import Pairs
from lantern.drafters.parallelspec import ParallelSpec
from lantern.drafters.parallelspec_drafter import ParallelContext
from lantern.drafters.target_head import target_logits
from lantern.noise import Purpose
from lantern.sampling import Sampling, pick
from lantern.trees.static import chain
from lantern.types import Leftovers, NoiseSource, Prefill, Target


class ParallelChain:
    """Guesses the codes behind windows of up to `window` codes (a `Continuation` of Jacobi windows).

    One pass, whatever the window and however many codes it guesses: as many as the module knows how to, and at most
    what a window has room for. Mode "gumbel" takes argmax(log q + g) with the target's own noise, otherwise codes are
    drawn from q with noise of the drafter's own and q is handed over. At temperature 0 q is one code.
    """

    needs_whole_prefix = False

    def __init__(
        self, module: ParallelSpec, target: Target, *, window: int, is_gumbel: bool, sampling: Sampling
    ) -> None:
        window = min(window, target.config.block_size)
        self.length = min(module.config.depths, max(window - 1, 1))
        tree = chain(self.length)
        check_fit(module.config, target, tree)
        self.sampling, self.is_gumbel, self.target = sampling, is_gumbel, target
        self.context = ParallelContext(module, sampling, pairs=window, depths=self.length)
        self.count = target.config.block_size

    def begin(self, prefill: Prefill, noise: NoiseSource) -> Leftovers:
        """Goes on behind code 0."""
        self.noise = noise
        self.context.begin(prefill)
        self._ahead = torch.arange(self.length, device=prefill.first.device)
        self.known = torch.zeros_like(prefill.first)
        return self.extend(prefill.features[:, :, -1:], prefill.first[:, None], torch.ones_like(prefill.first))

    def extend(
        self, features: Float[Tensor, "b r n c"], tokens: Int[Tensor, "b n"], counts: Int[Tensor, " b"]
    ) -> Leftovers:
        """Goes on behind n codes, each given with the feature that predicts it; the first `counts` are committed."""
        count = tokens.shape[1]
        places = (self.known[:, None] + torch.arange(count, device=tokens.device)).clamp(max=self.count - 1)
        pairs = Pairs(self.sampling.guide(features, places), tokens, places, self.known, counts)
        guesses = self.context.guess(pairs, torch.full_like(tokens[:, :1], count - 1))
        behind = (self.known[:, None] + count + self._ahead).clamp(max=self.count - 1)
        # In place: all else that outlives a step is the window's, whose holder may want it in fixed memory.
        self.known.add_(counts)
        logits = target_logits(self.target, guesses)
        log_q = self.sampling.filtered(logits)
        if self.is_gumbel:
            return Leftovers((log_q + self.noise.gumbel(behind, Purpose.TARGET)).argmax(-1), log_q)
        # Lane 0 is for random initial codes.
        return Leftovers(pick(log_q.exp(), self.noise.uniform(behind, 2, purpose=Purpose.DRAFT)[..., 1]), log_q)
