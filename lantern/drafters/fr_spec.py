"""FR-Spec: EAGLE-1's head over a part of the codes, the frequent ones and those near the neighbours (arXiv:2502.14856).

The paper keeps the rows of the head that belong to the most frequent words. Codes of pictures are used more evenly, but
what follows is often near, in the codebook, to the codes at the left and above, so that S is a union:

    S(context) = the `codes` most frequent codes + the `near` nearest of the left and of the upper one, themselves too

q has its support in S. Verification is over all codes, so that the picture stays that of plain decoding; at most p(S)
of the drafts can be right.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.drafters.eagle_drafter import EagleDrafter
from lantern.methods import Kit, Method
from lantern.trees.static import Level, named
from lantern.types import NoiseSource, Prefill


@dataclass(frozen=True)
class FrequencyConfig:
    """Of how many codes the table is, and the digest of the target whose pictures were counted."""

    vocab_size: int
    kind: str = "fr-spec"
    target: str | None = None

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size is {self.vocab_size}, wanted at least 1")


class FrequencyTable(nn.Module):
    """How often each code was seen: all that FR-Spec has to learn."""

    counts: Tensor

    def __init__(self, config: FrequencyConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("counts", torch.zeros(config.vocab_size, dtype=torch.int32))

    @classmethod
    def of_codes(cls, codes: Int[Tensor, "*b n"], vocab_size: int, target: str | None = None) -> "FrequencyTable":
        """Counts the codes of some pictures."""
        table = cls(FrequencyConfig(vocab_size, target=target))
        table.counts.copy_(torch.bincount(codes.flatten(), minlength=vocab_size))
        return table

    @property
    def ranking(self) -> Int[Tensor, " v"]:
        """All codes, the most frequent first, the lower among equals."""
        return self.counts.sort(descending=True, stable=True).indices


def nearest(table: Int[Tensor, "v k"], near: int) -> Int[Tensor, "v near"]:
    """Each code and those nearest to it, `near` in all."""
    own = torch.arange(len(table), device=table.device)[:, None]
    return torch.cat([own, table[:, : near - 1].long()], 1) if near else own[:, :0]


def repeated(codes: Int[Tensor, "*b n"], known: Bool[Tensor, " v"]) -> Bool[Tensor, "*b n"]:
    """Which entries name a code that is among the known ones, or stands before them."""
    same = codes[..., :, None] == codes[..., None, :]
    before = torch.ones(same.shape[-2:], dtype=torch.bool, device=codes.device).tril(-1)
    return known[codes] | (same & before).any(-1)


class FrSpecDrafter(EagleDrafter):
    """An `EagleDrafter` that computes the head's rows in S alone; `frequent` are the codes that are always in it.

    `around` gives the codes near each code, itself among them, none for the paper's form. ValueError for an S that is
    narrower than the tree.
    """

    def __init__(
        self, *given: Any, frequent: Int[Tensor, " f"], around: Int[Tensor, "v near"], **settings: Any
    ) -> None:
        super().__init__(*given, **settings)
        widest = max(level.width for level in self.tree.levels())
        if len(frequent) < widest:
            raise ValueError(f"the draft vocabulary has {len(frequent)} codes, the tree wants at least {widest}")
        weight = self.target.output.weight  # type: ignore[attr-defined]
        self.frequent, self.around = frequent, around
        self._weight, self._head = weight, weight[frequent].contiguous()
        self._is_frequent = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        self._is_frequent[frequent] = True
        self.grid = math.isqrt(self.target.config.block_size)

    def begin(self, prefill: Prefill, noise: NoiseSource) -> None:
        """Reads the prompt; no code is above the first row, which is its own upper neighbour."""
        images, device = len(prefill.first), prefill.first.device
        room = self.target.config.block_size + max(self.most_committed, self.tree.depth + 1)
        self._grid = torch.zeros(images, room, dtype=torch.long, device=device)
        super().begin(prefill, noise)

    def _take(self, features: Float[Tensor, "b r m k"], codes: Int[Tensor, "b m"], counts: Int[Tensor, " b"]) -> None:
        super()._take(features, codes, counts)
        steps = torch.arange(codes.shape[1], device=codes.device)
        self._grid = self._grid.scatter(1, self.known[:, None] + steps, codes)
        self._left = codes.gather(1, self._last_pending)

    def _extend(
        self, features: Float[Tensor, "b r f c"], tokens: Int[Tensor, "b f"], level: Level, depth: int
    ) -> Float[Tensor, "b r f c"]:
        self._left = tokens
        return super()._extend(features, tokens, level, depth)

    def _draws(self) -> None:
        """Laws are of the codes of S alone."""
        return None

    def _law(self, features: Float[Tensor, "b r f c"], depth: int) -> Float[Tensor, "b f s"]:
        """log q over the codes of S, which `_drafted` names."""
        features = features.to(self._head.dtype)
        logits = F.linear(features, self._head).float()
        self._drafted = self.frequent.expand(*logits.shape[:1], *logits.shape[2:]).contiguous()
        if self.around.shape[1]:
            near = self._near(depth)
            rows = torch.einsum("brfc,bfsc->brfs", features, self._weight[near]).float()
            rows = rows.masked_fill(repeated(near, self._is_frequent)[:, None], -torch.inf)
            logits, self._drafted = torch.cat([logits, rows], -1), torch.cat([self._drafted, near], -1)
        if self.module.config.form == "guided":
            return self.law.filtered(logits[:, 0])
        places = (self.known[:, None] + depth).clamp(max=self.count - 1).expand(-1, features.shape[2])
        # Rows of -inf in both guidance rows would make their difference no number.
        guided = self.law.guide(logits.clamp(min=-1e30), places)
        return self.law.filtered(guided.masked_fill(logits[:, 0] == -torch.inf, -torch.inf))

    def _near(self, depth: int) -> Int[Tensor, "b f s"]:
        """The codes near the left and the upper neighbour of what follows nodes of a depth."""
        above = (self.known + depth - self.grid)[:, None]
        upper = self._grid.gather(1, above.clamp(min=0)).expand_as(self._left)
        upper = torch.where(above < 0, self._left, upper)
        return torch.cat([self.around[self._left], self.around[upper]], -1)

    def _rank(self, log_q: Float[Tensor, "b f s"], level: Level, depth: int) -> Int[Tensor, "b f k"]:
        """The children of each node in draw order, by the target's own noise of their codes."""
        places = (self.known[:, None] + depth).clamp(max=self.count - 1)
        noise = self.noise.gumbel(places).expand(-1, log_q.shape[1], -1)
        best = (log_q + noise.gather(-1, self._drafted)).topk(level.width, dim=-1).indices
        return self._drafted.gather(-1, best)


def build(method: Method, kit: Kit) -> FrSpecDrafter:
    """EAGLE-1 trees over the `codes` most frequent codes of the part's table and `near` ones around each neighbour."""
    table, codes, near = kit.part(method), method.settings["codes"], method.settings["near"]
    assert method.tree is not None and isinstance(table, FrequencyTable)
    device = kit.target.tok_embeddings.weight.device
    total = kit.target.config.vocab_size
    if table.config.vocab_size != total:
        raise ValueError(f"the frequency table is of {table.config.vocab_size} codes, the model has {total}")
    if codes < 1:
        raise ValueError(f"codes is {codes}, wanted at least 1")
    if near and kit.neighbours is None:
        raise ValueError(f'method "{method.name}" needs the proximity table of the codebook, or near=0')
    columns = 0 if kit.neighbours is None else kit.neighbours.shape[1]
    if not 0 <= near <= columns + 1:
        raise ValueError(f"near is {near}, wanted from 0 to {columns + 1}, the columns of the proximity table and one")
    own = torch.zeros(total, 0, dtype=torch.long, device=device)
    return FrSpecDrafter(
        kit.eagle(method),
        kit.target,
        tree=named(method.tree),
        mode="gumbel",
        sampling=kit.sampling,
        frequent=table.ranking[: min(codes, total)].to(device),
        around=own if not near or kit.neighbours is None else nearest(kit.neighbours.to(device), near),
    )
