"""The rows of a pass as verifiers read them."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.sampling import Noise, Sampling, largest, rounded_log_softmax
from lantern.core.types import Rows, Sampler, rows_at
from lantern.decoding.statistics import commit


@dataclass(frozen=True)
class LogitRows(Rows):
    """The rows of `logits` under a sampling. `sampler` is the target's for this sampling and noise, if it has one."""

    sampling: Sampling
    logits: Float[Tensor, "b r n v"]
    places: Int[Tensor, "b n"]
    noise: Noise
    sampler: Sampler | None = None
    may_stop: bool = False

    def log_p(self, nodes: Int[Tensor, "b m"] | None = None) -> Float[Tensor, "b m v"]:
        """Return the log-probabilities of what follows these nodes of each image (None: all)."""
        if nodes is None:
            return self._every
        if not self.may_stop:
            return rows_at(self._every, nodes)
        logits, places = self._at(nodes)
        return self.sampling.log_probs(logits, places, may_look=True)

    def rounded_log_p(self, nodes: Int[Tensor, "b m"] | None = None) -> Float[Tensor, "b m v"]:
        """Return `log_p` with bits that depend on the logits only."""
        logits, places = (self.logits, self.places) if nodes is None else self._at(nodes)
        return rounded_log_softmax(self.sampling.scores(logits, places, self.may_stop))

    def sample(self, nodes: Int[Tensor, "b m"] | None = None) -> Int[Tensor, "b m"]:
        """Return what plain decoding samples after these nodes (None: all)."""
        logits, places = (self.logits, self.places) if nodes is None else self._at(nodes)
        if self.sampler is not None:
            return self.sampler(logits, places)[..., 0]
        return largest(self.sampling.scores(logits, places, self.may_stop) + self.noise.gumbel(places), self.may_stop)

    def commit(self, grid: Int[Tensor, "b t"], total: Float[Tensor, " b"]) -> Int[Tensor, "b n"]:
        """Return `sample` of all nodes, which is written to its places of the grids; `statistics.commit` of both."""
        if self.sampler is not None:
            return self.sampler(self.logits, self.places, grid=grid, total=total)[..., 0]
        tokens = self.sample()
        commit(grid, total, self.logits, self.places, tokens)
        return tokens

    def untruncated(self) -> Rows:
        """Return the rows at temperature 1 without filters."""
        return replace(self, sampling=self.sampling.untruncated(), sampler=None)

    @cached_property
    def _every(self) -> Float[Tensor, "b n v"]:
        return self.sampling.log_probs(self.logits, self.places, self.may_stop)

    def _at(self, nodes: Int[Tensor, "b m"]) -> tuple[Float[Tensor, "b r m v"], Int[Tensor, "b m"]]:
        """Return the logits and places of these nodes of each image, of a single one without a copy."""
        is_one = self.may_stop and nodes.numel() == 1
        logits = self.logits.narrow(2, int(nodes), 1) if is_one else logits_at(self.logits, nodes)
        return logits, self.places.gather(1, nodes)


def logits_at(logits: Float[Tensor, "b r n v"], nodes: Int[Tensor, "b m"]) -> Float[Tensor, "b r m v"]:
    """Return the logits of these nodes of each image."""
    if len(nodes) == 1:
        return logits.index_select(2, nodes[0])
    return logits[torch.arange(len(nodes), device=nodes.device)[:, None], :, nodes].transpose(1, 2)
