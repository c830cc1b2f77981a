"""How a ViSpec module drafts: trees as EAGLE's, in a context of a few rows and one token for each row before them."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.decoding.cache import StaticCache
from lantern.drafters.eagle_drafter import EagleDrafter
from lantern.drafters.vispec import ViSpec
from lantern.methods import Kit, Method
from lantern.sampling import Sampling
from lantern.trees.static import StaticTree, named
from lantern.types import DraftMode, Prefill, Target


class RingCache(StaticCache):
    """A cache that keeps the last `codes` codes: code i is in slot i modulo that."""

    def commit(self, nodes: Int[Tensor, "b m"], start: Int[Tensor, " b"]) -> None:
        """Copies staged node `nodes[:, j]` to the slot of code `start + j`, over what was there."""
        steps = torch.arange(nodes.shape[1], device=nodes.device)
        slots = (start[:, None] + steps) % self.codes + self.prefix
        rows = torch.arange(self.images * self.rows, device=nodes.device)[:, None]
        source = (nodes + self.first_stage_slot).repeat_interleave(self.rows, 0)
        self.buffer[:, rows, :, slots.repeat_interleave(self.rows, 0)] = self.buffer[:, rows, :, source]

    def held(self, known: Int[Tensor, " b"]) -> Int[Tensor, "b s"]:
        """The code in each slot when codes up to `known` are committed; below 0 where there is none yet."""
        slots = torch.arange(self.codes, device=known.device)
        return known[:, None] - 1 - (known[:, None] - 1 - slots) % self.codes


class ViSpecDrafter(EagleDrafter):
    """Drafts EAGLE's trees with a `ViSpec` module.

    Its keys are those of the caption's tokens, of a token a row, and of the codes of `recent` rows and the one under
    way, whose slots are used again: `kv_length` of them, where EAGLE has one a code.
    """

    module: ViSpec

    def __init__(
        self,
        module: ViSpec,
        target: Target,
        *,
        tree: StaticTree,
        mode: DraftMode,
        sampling: Sampling,
        records_log_q: bool = False,
    ) -> None:
        super().__init__(module, target, tree=tree, mode=mode, sampling=sampling, records_log_q=records_log_q)
        self.needs_whole_prefix = True

    @property
    def kv_length(self) -> int:
        """Keys and values that a row of a pass goes over: compressed ones, of recent codes, and its own pairs'."""
        return self.module.config.summaries + self.module.config.grid + self._ring + self.stage

    @property
    def _ring(self) -> int:
        """Slots for codes: what a pass stages may overwrite none that a pair in the oldest row under way still sees."""
        config = self.module.config
        return min((config.recent + 1) * config.grid, config.block_size) + self.stage

    def _open(self, prefill: Prefill) -> None:
        """Makes room, and puts the caption's tokens in their place."""
        config, device, images = self.module.config, prefill.features.device, len(prefill.first)
        self.cache = RingCache(
            layers=1,
            images=images,
            rows=1,
            heads=config.n_head,
            head_dim=config.dim // config.n_head,
            prefix=config.summaries + config.grid,
            codes=self._ring,
            stage=self.stage,
            dtype=self.module.cache_dtype,
            device=device,
        )
        self._stage = torch.arange(self.stage, device=device) + self.cache.first_stage_slot
        places = torch.zeros(prefill.mask.shape, dtype=torch.long, device=device)
        caption = self.module.read_caption(self.sampling.guide(prefill.features, places), prefill.mask)
        self._caption, self._globe = caption.tokens, caption.globe
        # One row past the picture takes in what was not committed.
        self._sums = torch.zeros(images, config.grid + 1, config.dim, device=device)
        self._weights = torch.zeros(images, config.grid + 1, 1, device=device)
        self._grid = torch.arange(config.grid, device=device)

    def _read_pending(self) -> Float[Tensor, "b r 1 c"]:
        """As EAGLE does, once the pairs that were committed are in their rows' tokens."""
        self._summarise()
        return super()._read_pending()

    def _run(
        self,
        features: Float[Tensor, "b r n c"],
        tokens: Int[Tensor, "b n"],
        places: Int[Tensor, "b n"],
        ancestors: Bool[Tensor, "*b n m"],
        *,
        first: int = 0,
        depth: int = 0,
    ) -> Float[Tensor, "b r n c"]:
        """A pass over pairs whose features the caption has been added to."""
        return super()._run(features + self._globe[:, None], tokens, places, ancestors, first=first, depth=depth)

    def _sees(self, places: Int[Tensor, "b n"], ancestors: Bool[Tensor, "*b n m"]) -> Bool[Tensor, "b n s"]:
        """All of the caption, tokens of old rows, codes of recent ones, and staged ancestors."""
        grid, (images, pairs) = self.module.config.grid, places.shape
        oldest = (places // grid - self.module.config.recent)[..., None]
        held = self.cache.held(self.known)[:, None]
        staged = torch.nn.functional.pad(ancestors, (0, self.cache.stage - ancestors.shape[-1]))
        caption = torch.ones(images, pairs, self.module.config.summaries, dtype=torch.bool, device=places.device)
        seen = (held >= 0) & (held // grid >= oldest)
        return torch.cat([caption, self._grid < oldest, seen, staged.expand(images, pairs, -1)], -1)

    def _summarise(self) -> None:
        """Adds the committed pairs to their rows, and gives all rows their keys and values."""
        module, grid = self.module, self.module.config.grid
        features = self._pending_features[:, 0] + self._globe
        inputs = module.pair_inputs(features, self._pending_tokens, self.sampling.scales(self._places))
        weights = module.row_weights(inputs)
        steps = torch.arange(inputs.shape[1], device=inputs.device)
        rows = torch.where(steps < self._counts[:, None], self._places // grid, grid)[..., None]
        self._weights.scatter_add_(1, rows, weights)
        self._sums.scatter_add_(1, rows.expand(-1, -1, inputs.shape[-1]), weights * inputs.float())
        tokens = module.row_tokens(self._sums[:, :-1], self._weights[:, :-1])
        keys = module.context_keys(self._caption, tokens)
        self.cache.write(0, torch.arange(self.cache.prefix, device=keys.device)[None], keys)


def build(method: Method, kit: Kit) -> ViSpecDrafter:
    """Trees of the method's name, drafted by the model's ViSpec drafter."""
    module = kit.part(method)
    assert isinstance(module, ViSpec) and method.tree is not None
    mode = "point" if kit.sampling.is_greedy and method.mode == "sampled" else method.mode
    records = method.relaxation is not None and mode == "gumbel" and not kit.sampling.is_greedy
    return ViSpecDrafter(
        module, kit.target, tree=named(method.tree), mode=mode, sampling=kit.sampling, records_log_q=records
    )
