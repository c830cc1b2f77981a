"""Vertical heads: every committed code also guesses the code below it, which waits in a pool (Hawk, NeurIPS 2025).

Horizontal heads guess the next codes of the row as Medusa's do. When the frontier comes to the row below, its places
hold guesses made one row ago; there the laws of both are mixed, and the tree takes the best of the mixture. The target
decides in raster order all the same, so that the pool costs no exactness.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.drafters.chooser import Chooser
from lantern.drafters.examples import Examples, Prediction
from lantern.drafters.heads import FeatureHeads
from lantern.drafters.marginals import Marginals, check_fit
from lantern.drafters.pairs import Pairs
from lantern.methods import Kit, Method
from lantern.models.llamagen.config import TransformerConfig
from lantern.sampling import Sampling
from lantern.trees.static import StaticTree, named
from lantern.types import DraftMode, DraftTree, NoiseSource, Prefill, Step, Target

MAX_DEPTHS = 64


@dataclass(frozen=True)
class VerticalConfig:
    """Shape of the heads: `depths` horizontal ones and one for the code below. `reads_code`: they know the last code.

    `target` is the digest of the weights that they were trained for; None is unknown.
    """

    dim: int
    vocab_size: int
    block_size: int
    depths: int = 4
    reads_code: bool = True
    kind: str = "vertical"
    target: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.depths <= MAX_DEPTHS:
            raise ValueError(f"depths is {self.depths}, wanted from 1 to {MAX_DEPTHS}")
        if self.block_size < 1 or math.isqrt(self.block_size) ** 2 != self.block_size:
            raise ValueError(f"block_size is {self.block_size}, wanted a perfect square (grid x grid codes)")

    @property
    def grid(self) -> int:
        """Codes of a row."""
        return math.isqrt(self.block_size)

    @classmethod
    def for_target(cls, config: TransformerConfig, **changes: Any) -> "VerticalConfig":
        """Heads of its target's width."""
        fields: dict[str, Any] = {"dim": config.dim, "vocab_size": config.vocab_size, "block_size": config.block_size}
        return cls(**(fields | changes))


class Vertical(nn.Module):
    """The heads; the last is the vertical one."""

    def __init__(self, config: VerticalConfig) -> None:
        super().__init__()
        self.config = config
        self.heads = FeatureHeads(
            config.dim, config.depths + 1, vocab_size=config.vocab_size if config.reads_code else None
        )

    @property
    def reads(self) -> frozenset[str]:
        """F* is enough."""
        return frozenset()

    def init_for(self, target: Any, generator: torch.Generator) -> None:
        """Every head begins as "that feature is this one"."""
        self.heads.init_weights(target.tok_embeddings.weight.data)

    def forward(
        self, features: Float[Tensor, "b n c"], tokens: Int[Tensor, "b n"], scales: Float[Tensor, "b n"]
    ) -> Float[Tensor, "b n h c"]:
        """Estimates of the features that predict the next codes of the row, then of the one that predicts below."""
        return self.heads(features, tokens, scales)

    def training_predictions(self, examples: Examples, depths: int) -> list[Prediction]:
        """What the horizontal heads say at every code, and as one depth more what the vertical head says."""
        guided, codes, grid = examples.guided, examples.codes, self.config.grid
        said = self(guided, codes, examples.scales[:, None].expand(codes.shape))
        count, levels = codes.shape[1], min(depths, self.config.depths, codes.shape[1] - 1)
        ahead = [(depth, depth, depth - 1) for depth in range(1, levels + 1)] + [(levels + 1, grid, -1)]
        return [
            Prediction(depth, torch.arange(reach, count, device=codes.device), said[:, :-reach, head])
            for depth, reach, head in ahead
        ]


class VerticalDrafter:
    """Drafts trees of the mixture (1 - share) q_horizontal + share q_vertical, the latter where the pool has a guess.

    The pool holds a feature for each place of the picture, guessed when the code above it was committed. ValueError
    for a share that is no probability.
    """

    needs_whole_prefix = False
    draft_passes = 1  # for all depths of a tree

    def __init__(
        self,
        module: Vertical,
        target: Target,
        *,
        tree: StaticTree,
        mode: DraftMode,
        sampling: Sampling,
        share: float = 0.25,
        records_log_q: bool = False,
    ) -> None:
        check_fit(module.config, target, tree)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError(f"share is {share}, wanted the weight of the pool's guesses, from 0 to 1")
        self.module, self.sampling, self.share = module, sampling, float(share)
        self.mode: DraftMode = mode
        self.marginals = Marginals(tree, mode=mode, sampling=sampling, target=target, records_log_q=records_log_q)
        self.records_log_q = self.marginals.records_log_q
        self.max_nodes, self.depth = tree.max_nodes, tree.depth

    def weave(self, chooser: Chooser, most_committed: int) -> None:
        """Lets another choose the children, in trees of which a step may commit this many codes."""
        self.marginals.chooser = chooser

    def begin(self, prefill: Prefill, noise: NoiseSource) -> None:
        """Empties the pool and takes the prompt's last feature with code 0."""
        config, device, images = self.module.config, prefill.first.device, len(prefill.first)
        self.marginals.begin(noise, device)
        # One place past the picture takes in what is said of codes that were not committed, or below the last row.
        dtype = self.module.heads.fc.weight.dtype
        self._pool = torch.zeros(images, config.block_size + 1, config.dim, dtype=dtype, device=device)
        self._is_filled = torch.zeros(images, config.block_size + 1, dtype=torch.bool, device=device)
        self._take(Pairs.of_prompt(prefill, self.sampling))

    def observe(self, step: Step) -> None:
        """Takes in what was committed."""
        self._take(Pairs.of_step(step, self.sampling, self.module.config.block_size))

    def propose(self) -> DraftTree:
        """The target's head over the last horizontal guesses and what the pool holds for their places."""
        places = self.marginals.places(self._pairs.known)
        index = places[..., None].expand(-1, -1, self._pool.shape[-1])
        both = self.marginals.log_q(torch.cat([self._ahead, self._pool.gather(1, index)], 1))
        horizontal, vertical = both.chunk(2, dim=1)
        share = self._is_filled.gather(1, places)[..., None].float() * self.share
        log_q = torch.logaddexp(horizontal + torch.log1p(-share), vertical + share.log())
        return self.marginals.grow(self._pairs.root, log_q, self._pairs.known)

    def _take(self, pairs: Pairs) -> None:
        """Runs all heads on what was committed; puts the vertical guesses into the pool."""
        said, outside = (
            self.module(pairs.features, pairs.codes, self.sampling.scales(pairs.places)),
            self._pool.shape[1],
        )
        steps = torch.arange(pairs.codes.shape[1], device=pairs.codes.device)
        below = pairs.places + self.module.config.grid
        below = torch.where(steps < pairs.counts[:, None], below, outside).clamp(max=outside - 1)
        self._pool.scatter_(1, below[..., None].expand(-1, -1, said.shape[-1]), said[:, :, -1])
        self._is_filled.scatter_(1, below, True)
        last = pairs.last[..., None, None].expand(-1, -1, *said.shape[2:])
        self._ahead = said.gather(1, last)[:, 0, : self.depth]
        self._pairs = pairs


def build(method: Method, kit: Kit) -> VerticalDrafter:
    """Trees of the method's name, drafted by the model's horizontal and vertical heads."""
    module = kit.part(method)
    assert isinstance(module, Vertical) and method.tree is not None
    mode = "point" if kit.sampling.is_greedy and method.mode == "sampled" else method.mode
    return VerticalDrafter(
        module,
        kit.target,
        tree=named(method.tree),
        mode=mode,
        sampling=kit.sampling,
        share=method.settings["share"],
        records_log_q=method.relaxation is not None and mode == "gumbel" and not kit.sampling.is_greedy,
    )
