"""Rows of a pass: logits become log-probabilities, or samples, when a walk reads them."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import NoiseSource, Rows, Sampler, Verifier


@dataclass(frozen=True)
class LazyRows(Rows):
    """The rows of `logits` under a sampling; row i is for code number `places[i]`. `sampler`: the target's, if any."""

    sampling: Sampling
    logits: Float[Tensor, "b r n v"]
    places: Int[Tensor, "b n"]
    sampler: Sampler | None = None
    is_lazy: bool = True

    def at(self, nodes: Int[Tensor, "b m"]) -> Float[Tensor, "b m v"]:
        """Return the log-probabilities of what follows these nodes of each image."""
        return self.sampling.log_probs(logits_at(self.logits, nodes), self.places.gather(1, nodes))

    def sample(self, verifier: Verifier, nodes: Int[Tensor, "b m"], noise: NoiseSource) -> Int[Tensor, "b m"]:
        """Return what a verifier's `draw` samples after these nodes, by the target's sampler if there is one."""
        logits, places = logits_at(self.logits, nodes), self.places.gather(1, nodes)
        if self.sampler is not None:
            return self.sampler(logits, places)[..., 0]
        return verifier.draw(self.sampling.scores(logits, places), places, noise)


def logits_at(logits: Float[Tensor, "b r n v"], nodes: Int[Tensor, "b m"]) -> Float[Tensor, "b r m v"]:
    """Return the logits of these nodes of each image."""
    if len(nodes) == 1:
        return logits.index_select(2, nodes[0])
    return logits[torch.arange(len(nodes), device=nodes.device)[:, None], :, nodes].transpose(1, 2)
