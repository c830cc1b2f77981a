"""How an EAGLE-1 module, or one derived from it, drafts: it reads what was committed and grows a static tree."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.decoding.cache import StaticCache
from lantern.decoding.draws import quick_draws
from lantern.decoding.tree_mask import TreeMask
from lantern.drafters.chooser import Chooser
from lantern.drafters.eagle import Eagle
from lantern.methods import Kit, Method
from lantern.noise import Purpose
from lantern.sampling import Sampling
from lantern.trees.static import Level, StaticTree, named
from lantern.types import DraftMode, DraftTree, NoiseSource, Prefill, Scores, Step, Target

PURPOSE_OF_MODE = {"gumbel": Purpose.TARGET, "sampled": Purpose.DRAFT}


class EagleDrafter:
    """Drafts with an `Eagle` module and a target's head, by a static tree.

    Mode "gumbel" takes the top of log q + g with the target's own noise, "sampled" draws without replacement with
    noise of its own (the same top-K trick), "point" takes the most likely codes. The drafter's q is made by the same
    `sampling` as the target's p; at temperature 0 codes are ranked by their logits. Trees carry log q in mode
    "sampled", whose verifiers read it, and with `records_log_q`, for relaxations that do.
    """

    def __init__(
        self,
        module: Eagle,
        target: Target,
        *,
        tree: StaticTree,
        mode: DraftMode,
        sampling: Sampling,
        records_log_q: bool = False,
    ) -> None:
        if mode not in ("gumbel", "sampled", "point"):
            raise ValueError(f'draft mode is "{mode}", wanted gumbel, sampled or point')
        if module.config.dim != target.config.dim or module.config.block_size != target.config.block_size:
            got, wanted = (module.config.dim, module.config.block_size), (target.config.dim, target.config.block_size)
            raise ValueError(
                f"the drafter has (dim, block_size) {got}, its target {wanted}: they do not belong together"
            )
        slots = target.config.cls_token_num - 1 if module.config.form == "rows" else 0
        if module.config.cls_token_num != slots:
            got = module.config.cls_token_num
            raise ValueError(f"the drafter has {got} conditioning slots, wanted {slots} for this target")
        if max(level.width for level in tree.levels()) > target.config.vocab_size:
            raise ValueError("the tree has nodes with more children than there are codes: use a narrower one")
        self.module, self.target, self.tree = module, target, tree
        self.mode: DraftMode = mode
        self.records_log_q = records_log_q or mode == "sampled"
        self.sampling = sampling
        self.law = sampling.soft() if sampling.is_greedy else sampling
        self.rows = sampling.rows if module.config.form == "rows" else 1
        self.needs_whole_prefix = module.config.form == "rows"
        self.taps = module.taps
        self.most_committed = 0  # codes of a step, where its tree is deeper than the one drafted here
        self.chooser: Chooser | None = None

    def weave(self, chooser: Chooser, most_committed: int) -> None:
        """Lets another choose the children, in trees of which a step may commit this many codes."""
        self.chooser, self.most_committed = chooser, most_committed

    @property
    def max_nodes(self) -> int:
        """Nodes of the tree, the root included."""
        return self.tree.max_nodes

    @property
    def depth(self) -> int:
        """Depth of the tree."""
        return self.tree.depth

    def begin(self, prefill: Prefill, noise: NoiseSource) -> None:
        """Reads the prompt's features; the first pair is the last of them with code 0."""
        device = prefill.features.device
        self.noise, self.count = noise, self.module.config.block_size
        self._open(prefill)
        self.known = torch.zeros_like(prefill.first)
        self.shape, self.levels = self.tree.shape(device), self.tree.levels(device)
        self._law_rows = self.tree.law_rows(device)
        self._inner = self.tree.inner(device)
        self._take(self._given(prefill)[:, :, -1:], prefill.first[:, None], torch.ones_like(self.known))

    @property
    def stage(self) -> int:
        """Pairs that a pass reads at most."""
        return max(self.tree.depth + 1, self.most_committed, self.tree.num_inner, 1)

    @property
    def kv_length(self) -> int:
        """Keys and values that a row of a drafter's pass goes over: of the prompt, of codes, and of its own pairs."""
        return self.module.config.cls_token_num + self.module.config.block_size + self.stage

    def _open(self, prefill: Prefill) -> None:
        """Makes room for keys and values, says who sees which, and reads the prompt."""
        config, device = self.module.config, prefill.features.device
        images, prefix, stage = len(prefill.first), config.cls_token_num, self.stage
        self.cache = StaticCache(
            layers=self.module.num_caches,
            images=images,
            rows=self.rows,
            heads=config.n_head,
            head_dim=config.dim // config.n_head,
            prefix=prefix,
            codes=self.count,
            stage=stage,
            dtype=self.module.cache_dtype,
            device=device,
        )
        sees = torch.ones_like(prefill.mask[:, :-1]) if config.sees_padding else prefill.mask[:, :-1]
        self._mask = TreeMask(self.cache, sees[:, :prefix], stage)
        self._stage = torch.arange(stage, device=device) + self.cache.first_stage_slot
        if prefix:
            self._read_prefix(prefill, sees)

    def _sees(self, places: Int[Tensor, "b n"], ancestors: Bool[Tensor, "*b n m"]) -> Tensor:
        """The mask of a pass over pairs at these places, which see `ancestors` among those staged."""
        return self._mask.update(self.known, ancestors)

    def observe(self, step: Step) -> None:
        """Takes in the committed codes, each with the target's feature that predicted it."""
        assert step.scores is not None and step.verdict is not None
        features = self._given(step.scores).unflatten(0, (len(step.counts), -1))
        visited = torch.nn.functional.pad(step.verdict.path, (1, 0))
        index = visited[:, None, :, None].expand(-1, features.shape[1], -1, features.shape[-1])
        self._take(features.gather(2, index), step.codes, step.counts)

    def propose(self) -> DraftTree:
        """The tree, grown."""
        tokens, laws = self._grow()
        log_q = torch.cat(laws, 1)[:, self._law_rows] if self.records_log_q else None
        return DraftTree(torch.cat(tokens, 1), self.shape, self.mode, log_q, self._inner)

    def _grow(self) -> tuple[list[Int[Tensor, "b m"]], list[Float[Tensor, "b f v"]]]:
        """Codes of every depth, and laws below the inner nodes of each: a pass of the drafter for a depth."""
        features = self._read_pending()
        tokens = [self._pending_tokens.gather(1, self._last_pending)]
        laws, draws = list[Tensor](), self._draws()
        for depth, level in enumerate(self.levels):
            if depth > 0:
                features = self._extend(features[:, :, level.parents], tokens[-1][:, level.pairs], level, depth)
            if draws is not None:
                places = self._followed(depth).expand(-1, features.shape[2])
                purpose = PURPOSE_OF_MODE[self.mode]
                best = draws(self._logits(features), places, width=level.width, purpose=purpose)
            else:
                laws.append(self._law(features, depth))
                best = self._rank(laws[-1], level, depth)
            tokens.append(best.flatten(1)[:, level.picks])
        return tokens, laws

    def _draws(self) -> Callable[..., Tensor] | None:
        """What draws children straight from logits, where nobody asks for laws."""
        if self.records_log_q or self.mode == "point" or self.chooser is not None:
            return None
        return quick_draws(self.target, self.law, self.noise)

    def _followed(self, depth: int) -> Int[Tensor, "b 1"]:
        """The number of the code that follows nodes of a depth."""
        return (self.known[:, None] + depth).clamp(max=self.count - 1)

    def _given(self, said: Prefill | Scores) -> Float[Tensor, "*rows n k"]:
        """What the module reads of a pass of the target."""
        given = said.fused if self.taps else said.features
        assert given is not None, "the target was not asked for what enters its layers"
        return given

    def _take(self, features: Float[Tensor, "b r m k"], codes: Int[Tensor, "b m"], counts: Int[Tensor, " b"]) -> None:
        """Remembers pairs that the next proposal reads: pair `known + j` is (features j, code j)."""
        ahead = torch.arange(codes.shape[1], device=codes.device)
        self._places = (self.known[:, None] + ahead).clamp(max=self.count - 1)
        if self.module.config.form == "guided":
            features = self.sampling.guide(features, self._places)[:, None]
        entered = self.module.enter(features.flatten(0, 1).to(self.module.dtype))
        self._pending_features = entered.unflatten(0, features.shape[:2])
        self._pending_tokens, self._counts = codes, counts
        self._last_pending = (counts - 1).clamp(min=0)[:, None]

    def _read_pending(self) -> Float[Tensor, "b r 1 c"]:
        """Feeds the pairs that were committed, keeps their keys, and gives the feature that predicts the next code."""
        pairs = self._places.shape[1]
        causal = torch.ones(pairs, pairs, dtype=torch.bool, device=self.known.device).tril()
        features = self._run(self._pending_features, self._pending_tokens, self._places, causal)
        self.cache.commit(torch.arange(pairs, device=self.known.device).expand_as(self._places), self.known)
        self.known = self.known + self._counts
        last = self._last_pending[:, None, :, None].expand(-1, self.rows, -1, features.shape[-1])
        return features.gather(2, last)

    def _extend(
        self, features: Float[Tensor, "b r f c"], tokens: Int[Tensor, "b f"], level: Level, depth: int
    ) -> Float[Tensor, "b r f c"]:
        """Features below the inner nodes of a depth, from their parents' features and their own codes."""
        places = (self.known[:, None] + (depth - 1)).clamp(max=self.count - 1).expand_as(tokens)
        return self._run(features, tokens, places, level.ancestors, first=level.first, depth=depth)

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
        """One pass over pairs staged from slot `first` on, each below `depth` pairs with drafted features or one."""
        images, rows, pairs, _ = features.shape
        slots = self._stage[first : first + pairs].expand(images * rows, -1)
        out = self.module(
            features.flatten(0, 1),
            tokens.repeat_interleave(rows, 0),
            (places + self.module.config.cls_token_num).repeat_interleave(rows, 0),
            self._sees(places, ancestors),
            scales=self.sampling.scales(places) if rows == 1 else None,
            cache=self.cache,
            slots=slots,
            depth=depth,
        )
        return out.unflatten(0, (images, rows))

    def _law(self, features: Float[Tensor, "b r f c"], depth: int) -> Float[Tensor, "b f v"]:
        """log q of what follows nodes of a depth."""
        logits = self._logits(features)
        if self.module.config.form == "guided":
            return self.law.filtered(logits[:, 0])
        return self.law.log_probs(logits, self._followed(depth).expand(-1, features.shape[2]))

    def _logits(self, features: Float[Tensor, "b r f c"]) -> Float[Tensor, "b r f v"]:
        return self.module.logits(features.flatten(0, 1), self.target).unflatten(0, features.shape[:2])

    def _rank(self, log_q: Float[Tensor, "b f v"], level: Level, depth: int) -> Int[Tensor, "b f k"]:
        """The children of each node in draw order."""
        if self.chooser is not None:
            return self.chooser.children(log_q, depth, level.width)
        if self.mode != "point":
            log_q = log_q + self.noise.gumbel(self._followed(depth), PURPOSE_OF_MODE[self.mode])
        return log_q.topk(level.width, dim=-1).indices

    def _read_prefix(self, prefill: Prefill, sees: Bool[Tensor, "b t"]) -> None:
        """Fills the prompt's slots: each slot's feature is paired with the embedding of code 0."""
        features = prefill.features[:, :, :-1].to(self.module.dtype)
        images, rows, length, _ = features.shape
        slots = torch.arange(length, device=features.device).expand(images * rows, -1)
        mask = torch.zeros(images, length, self.cache.slots, dtype=torch.bool, device=features.device)
        mask[:, :, :length] = torch.tril(sees[:, None] | ~sees[:, :, None])
        self.module(
            features.flatten(0, 1),
            torch.zeros_like(slots),
            slots,
            mask.repeat_interleave(rows, 0),
            cache=self.cache,
            slots=slots,
        )


def build(method: Method, kit: Kit) -> EagleDrafter:
    """Trees of the method's name, drafted by the trained part that it names, or by the model's EAGLE-1 module."""
    assert method.tree is not None
    module = kit.eagle(method) if method.part is None else kit.part(method)
    assert isinstance(module, Eagle)
    # At temperature 0 there is nothing to draw: a drafter proposes its most likely codes.
    mode = "point" if kit.sampling.is_greedy and method.mode == "sampled" else method.mode
    # Recording log q costs a copy, so a drafter does it only for those that read it.
    records = method.relaxation is not None and not kit.sampling.is_greedy
    return EagleDrafter(
        module,
        kit.target,
        tree=named(method.tree),
        mode=mode,
        sampling=kit.sampling,
        records_log_q=records and mode == "gumbel",
    )
