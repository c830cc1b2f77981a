"""The engine `cpu`: passes as C++ programs (`target.py`), and whole rounds: fused steps (`steps.cpp`).

Fused are steps of plain decoding, of a window of samples, and of a static tree that a module of EAGLE-1 or ParallelSpec
drafts. Tokens and statistics are those of `decoding.plain` and `decoding.loop`, with rejection up to the rounding of
probabilities.
"""

import ctypes
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from lantern.core.sampling import Purpose, Sampling, probabilities
from lantern.core.types import Cost, Drafter, DraftPlan, DraftTree, Scores, Step, Target, TreeShape, Verdict, Verifier
from lantern.decoding.cache import StaticCache
from lantern.decoding.loop import NO_SCORES, State
from lantern.decoding.plain import Plain
from lantern.decoding.rounds import Rounds, TorchRounds
from lantern.engines.cpu import build
from lantern.engines.cpu.structures import array, cpp
from lantern.engines.cpu.target import (
    CpuTarget,
    PackedDrafterLayer,
    PackedLinear,
    PortableTarget,
    check,
    check_widths,
    kind_of,
    model_args,
    packed_drafter,
    pass_args,
)
from lantern.engines.engine import Engine
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.distributions import Mixture
from lantern.verifiers.relaxations.neighbours import ClaimingRule, Lantern, LanternPP
from lantern.verifiers.relaxations.rule import Acceptance
from lantern.verifiers.relaxed import RelaxedVerifier
from lantern.verifiers.scripted import ScriptedVerifier


@dataclass(frozen=True)
class CpuEngine(Engine):
    """Runs a pass as one C++ program, and whole rounds of plain decoding and windows of samples.

    The bits of a token's logits depend on nothing that is scored with it. Those of a target are the same on all
    processors, but with `amx` in bf16 on one that has AMX, which is faster and adds products in another order.
    """

    amx: bool = True
    name: ClassVar[str] = "cpu"
    fits_windows: ClassVar[bool] = True

    def why_not(self, target: Target, drafter: Drafter | None = None, *, can_wait: bool = True) -> str | None:
        """Return a reason for other layers, devices, dtypes, widths, processors, and a missing library."""
        reason = self.refuses(target.config, can_wait=can_wait)
        if reason is None:
            try:
                check(target)
            except ValueError as error:
                return str(error)
        return reason

    def narrows(self, config: Any, *, can_wait: bool = True) -> bool:
        """Return whether this engine runs such a target: its passes are faster in bf16 than in fp32."""
        return self.refuses(config, can_wait=can_wait) is None

    def refuses(self, config: Any, *, can_wait: bool = True) -> str | None:
        """Return a reason for other layers, widths, processors, and a missing library, given a target's config."""
        if config.family != "llamagen":
            return "the cpu engine runs LlamaGen's layers, not this model's: use --engine eager"
        if self.weights == "int4":
            return "the cpu engine reads weights in full or in int8, int4 was given: use --engine eager"
        if self.is_fp8:
            return "the cpu engine keeps keys and values in fp32, a KV cache in fp8 was given: use --engine eager"
        try:
            check_widths(config)
            build.check_processor()
            missing = build.missing()
            if missing is not None:
                build.find_compiler()
        except ValueError as error:
            return str(error)
        if missing is None or can_wait:
            return None
        return f"{missing}: `lantern doctor --build` or `--engine cpu` builds it"

    def _prepare(self, target: Any) -> Target:
        build.library()  # compiled before steps are timed
        return CpuTarget(target) if self.amx else PortableTarget(target)

    def prepare_part(self, module: Any) -> Any:
        """Return a drafter with packed layers, or LlamaGen's tokenizer with a packed decoder; others as they are."""
        from lantern.engines.cpu.vq import packed_vq

        return packed_vq(packed_drafter(module, int8=self.weights == "int8"))

    def drive(self, states: Sequence[State], earlier: Rounds | None = None) -> Rounds:
        """Return what takes rounds: fused ones if the generations have them."""
        return FusedRounds(states, earlier) if is_fused(states[0]) else TorchRounds(states, earlier)

    def group(self, state: State) -> Hashable:
        """Return what generations have in common: fused rounds, with passes of one size, or none."""
        if not is_fused(state):
            return state.group
        return ("fused", nodes_of(state), state.group)

    def fuses_plain(self, sampling: Sampling) -> bool:
        """Return whether plain decoding runs in C++: not with top-p."""
        return not sampling.needs_torch

    def keeps_bits(self, target: Target, nodes: int, lines: int) -> bool:
        """Return True."""
        return True


RESIDUALS = {"cool": 0, "paper": 1, "released": 2}  # `Residual` of rejection.h; COOL-SD's is that of exact rejection


def is_fused(state: State) -> bool:
    """Return whether the rounds of a generation are one C++ program: plain decoding, windows of samples, which
    `Mixture` may relax, and trees of packed drafters, matched with the target's samples or tested by rejection, which
    LANTERN and LANTERN++ may relax.

    Not with top-p, with given tokens, for targets whose passes do not run in C++, and for subclasses of a verifier or
    relaxation, which may decide otherwise.
    """
    is_plain = isinstance(state, Plain)
    window = state.drafter.window
    is_window = window is not None and (
        rule_of(state) is not None if window.keeps_distributions else type(state.verifier) is GumbelVerifier
    )
    has_all = not state.sampling.needs_torch and state.forced is None and isinstance(state.target, CpuTarget)
    return has_all and (is_plain or is_window or plan_of(state) is not None)


def plan_of(state: State) -> DraftPlan | None:
    """Return what drafts the trees of a generation if `lantern_steps` can run it, and verify what it drafts."""
    plan = state.drafter.plan
    if plan is None or (type(inner_of(state)) is not GumbelVerifier and rejection_of(state) is None):
        return None
    module, weight = plan.module, state.target.tok_embeddings.weight
    parts = (isinstance(module.fc, PackedLinear), *(isinstance(layer, PackedDrafterLayer) for layer in module.layers))
    return plan if all(parts) and module.dtype == weight.dtype else None


def inner_of(state: State) -> Verifier:
    """Return the verifier, or the one whose verdicts a measurement replaces."""
    return state.verifier.inner if isinstance(state.verifier, ScriptedVerifier) else state.verifier


def rejection_of(state: State) -> RejectionVerifier | None:
    """Return the rejection that `lantern_steps` runs, of drafts that were sampled, None where there is none."""
    verifier = inner_of(state)
    if type(verifier) is not RejectionVerifier or state.drafter.mode != "sampled":
        return None
    return verifier if type(verifier.relaxation) in (type(None), Lantern, LanternPP) else None


def rule_of(state: State) -> Mixture | None:
    """Return the relaxation of a window's distributions that `lantern_steps` computes, None where there is none."""
    window, verifier = state.drafter.window, state.verifier
    if type(verifier) is not RelaxedVerifier or type(verifier.inner) is not GumbelVerifier:
        return None
    has_q, rule = window is not None and window.keeps_distributions, verifier.relaxation
    return rule if has_q and type(rule) is Mixture and not state.sampling.is_greedy else None


def nodes_of(state: State) -> int:
    """Return the nodes of a generation's passes now: one in plain decoding, and where a window was given up."""
    return state.drafter.max_nodes if state.drafter.window is None else state.drafter.window.nodes


class FusedImages:
    """The tensors of one generation that `lantern_steps` reads and writes, as in `steps.cpp`."""

    def __init__(self, state: State) -> None:
        self.state, self.window = state, state.drafter.window
        self.plan, target = plan_of(state), state.target
        images, sums, held = len(state.known), state.statistics, state.held
        self.most = state.drafter.max_nodes
        self.start, self.counts, scratch = torch.zeros(3, images, dtype=torch.long).unbind()
        self.sampled, self.path = torch.zeros(2, images, self.most, dtype=torch.long).unbind()
        self.rule, random, log_q, pairs, steps = rule_of(state), None, None, None, sums.steps
        if self.window is not None:
            window = self.window.held
            self.tokens, random = window.tokens, window.random if self.window.init == "random" else None
            log_q = None if self.rule is None else window.log_q
        elif self.plan is not None:
            self.tokens = self._propose(self.plan)
            pairs = torch.zeros(images, state.drafter.depth + 1, target.config.dim, dtype=torch.float32)
        else:
            self.tokens, steps = state.tokens.gather(1, state.known[:, None] - 1), scratch
        self.rejection = None if self.plan is None else rejection_of(state)
        lengths = None  # drafts to accept by token number, where a measurement scripts them
        if self.plan is not None and isinstance(state.verifier, ScriptedVerifier):
            lengths = state.verifier.lengths.expand(images, -1)
        self.claims = None if self.rejection is None or lengths is not None else self.rejection.relaxation
        self.costs = torch.zeros(images, self.most, 3, dtype=torch.float32)
        sampling, shape = state.sampling, self.tree
        rows: dict[str, Any] = {
            "noise": None if self.rejection is not None else state.noise.gumbel_table(),
            **{"random": random, "known": state.known, "tree": self.tokens, "grid": held.tokens},
            **{"parents": shape.parents.expand(images, -1), "depths": shape.depths.expand(images, -1)},
            **{"start": self.start, "counts": self.counts, "sampled": self.sampled, "path": self.path},
            **{"passes": steps, "accepted": sums.accepted, "reached": sums.reached, "total": held.total},
            **{"relaxed": sums.relaxed, "variation": sums.variation, "largest": sums.largest, "costs": self.costs},
            **{"log_q": log_q, "pairs": pairs, "lengths": lengths},
        }
        own: dict[str, Any] = {
            **{"top_k": min(sampling.top_k, target.config.vocab_size), "temperature": sampling.temperature},
            **{"interval": min(sampling.guidance_interval, state.count), "guidance": sampling.guidance},
            **({} if self.rule is None else {"delta": self.rule.delta, "cap": self.rule.cap}),
        }
        if self.rejection is not None and self.plan is not None:
            rows["test"] = self._tests(self.rejection.relaxation, self.plan)
        self.args = [cpp.ImageArgs(**own, **row_of(rows, i)) for i in range(images)]

    def _propose(self, plan: DraftPlan) -> Int[Tensor, "b n"]:
        """Return the next tree's tokens; the first tree is drafted here, with the distributions it was sampled from."""
        if plan.tokens is None:
            tree = self.state.drafter.propose()
            plan.tokens = tree.tokens
            if tree.log_q is not None:
                rows = int(plan.log_q_rows.max()) + 1
                plan.q = tree.log_q.new_zeros(len(tree.tokens), rows, tree.log_q.shape[-1])
                plan.q[:, plan.log_q_rows] = probabilities(tree.log_q)
        return plan.tokens

    def _tests(self, rule: Acceptance | None, plan: DraftPlan) -> list[Any]:
        """Return how the drafts of each image are tested."""
        assert plan.q is not None, "rejection tests sampled drafts"
        lanes, sums, noise = max(plan.shape.widths), self.state.statistics, self.state.noise
        own = {"lanes": lanes, "rows": plan.log_q_rows, "residual": RESIDUALS["cool"], "bound": torch.inf}
        if isinstance(rule, ClaimingRule):
            own |= {"table": rule.table, "columns": rule.table.stride(0), "near": rule.k, "is_shared": rule.shared}
            own |= {"residual": RESIDUALS[rule.residual], "constant": rule.constant, "factor": rule.factor}
            if rule.distances is not None:
                own |= {"distances": rule.distances, "far_columns": rule.distances.stride(0)}
            if rule.bound is not None:
                own["bound"] = rule.bound
            sums.has_distance, sums.is_bounded = rule.distances is not None, rule.bound is not None
        rows: dict[str, Any] = {"uniforms": noise.uniform_table(lanes), "q": plan.q}
        rows |= {"distance": sums.distance, "excess": sums.excess}
        for name, purpose in (("drafts", Purpose.DRAFT), ("samples", Purpose.RESIDUAL)):
            keys = noise.streams(purpose)
            rows[name] = [cpp.Stream(low=low, high=high, image=image) for low, high, image in keys]
        return [cpp.TestArgs(**own, **row_of(rows, i)) for i in range(len(self.start))]

    @property
    def nodes(self) -> int:
        """Nodes of a pass."""
        return nodes_of(self.state)

    @property
    def tree(self) -> TreeShape:
        """The shape of what a pass scores."""
        return TreeShape.chain(self.nodes - 1, self.path.device) if self.plan is None else self.plan.shape

    @property
    def new(self) -> Int[Tensor, "b d1"]:
        """The tokens of the last step, of which `counts` are valid."""
        return self.sampled.gather(1, torch.nn.functional.pad(self.path[:, :-1], (1, 0)))

    @property
    def last(self) -> Step:
        """The last step, without scores, tree and verdict."""
        return Step(self.state.index, self.start.clone(), self.counts.clone(), self.new, NO_SCORES)

    def step(self, scored: Int[Tensor, "b n"], logits: Tensor, features: Tensor) -> Step:
        """Return the last step, whose window was `scored`; its scores are overwritten by the next."""
        images, nodes = len(self.start), scored.shape[1]
        dtype = self.state.target.tok_embeddings.weight.dtype
        scores = Scores(logits.unflatten(0, (images, -1)), features.to(dtype).unflatten(0, (images, -1)))
        shape = self.tree
        tokens, path = self.new[:, : shape.depth + 1], self.path[:, : shape.depth].clone()
        start, counts = self.start.clone(), self.counts.clone()
        if nodes == 1:
            return Step(self.state.index, start, counts, tokens, scores)
        length, cost = (path > 0).sum(1), None
        if self.rule is not None or self.claims is not None:
            is_visited = torch.arange(shape.depth + 1) <= length[:, None]
            costs = torch.where(is_visited[..., None], self.costs[:, : shape.depth + 1], 0.0)
            relaxed, spent, moved = costs.unbind(-1)
            bound, has_distance = None if self.claims is None else self.claims.bound, self.state.statistics.has_distance
            cost = Cost(relaxed[:, :-1], spent, moved if has_distance else None, bound)
        verdict = Verdict(path, length, tokens.gather(1, length[:, None])[:, 0], cost=cost)
        tree = DraftTree(scored, shape, self.state.drafter.mode)
        return Step(self.state.index, start, counts, tokens, scores, tree, verdict)


def row_of(given: Mapping[str, Any], image: int) -> dict[str, Any]:
    """Return what belongs to an image of each tensor or list."""
    return {name: None if one is None else one[image] for name, one in given.items()}


def draft_args(images: FusedImages, first: int) -> Any:
    """Return how `lantern_steps` drafts the trees of one generation, whose images begin at `first`."""
    plan, sampling = images.plan, images.state.sampling
    assert plan is not None
    module, cache = plan.module, plan.cache
    layers = [layer.weights for layer in module.layers]
    scales = sampling.scales(torch.zeros(1, dtype=torch.long))  # those of guided tokens
    masks = plan.masks.float().contiguous() if plan.masks is not None and len(plan.masks) else None
    levels = [
        cpp.LevelArgs(
            **{"nodes": len(level.parents), "width": level.width, "first": level.first},
            **{"staged": level.ancestors.shape[1], "pairs": level.pairs, "parents": level.parents},
            ancestors=level.ancestors,
        )
        for level in plan.levels
    ]
    shape = (module.config.dim, module.config.n_head, module.config.norm_eps)
    return cpp.DraftArgs(
        **{"first": first, "images": len(images.start), "tokens": cache.tokens, "slots": cache.slots},
        **{"depth": images.state.drafter.depth, "masks": 0 if masks is None else len(masks), "mask_inputs": masks},
        **{"levels": len(levels), "level": array(levels), "order": plan.order, "nodes": len(plan.order)},
        **{
            "kind": kind_of(module.fc.panels),
            "is_half": module.dtype == torch.bfloat16,
            "threads": torch.get_num_threads(),
        },
        **{"join": module.fc.panels, "bias": module.fc.wide_bias, "embeddings": module.embed_tokens.weight},
        guidance=None if sampling.rows == 1 else (scales.log() * module.guidance).to(module.dtype).float(),
        model=model_args(layers, *shape, module.rotary.table),
        **{"cache": cache.buffer, "plane": cache.buffer.stride(0)},
    )


class FusedRounds:
    """Rounds of generations with passes of one size in C++; their caches become views of `cache`.

    Generations have settings and numbers of known tokens of their own.
    """

    def __init__(self, states: Sequence[State], earlier: Rounds | None = None) -> None:
        self.states, self.images = states, [FusedImages(state) for state in states]
        caches = [state.cache for state in states]
        is_whole = len(caches) == 1 and caches[0].buffer.is_contiguous()
        used = [state.cache.prefix + int(state.known.max()) for state in states]
        self.cache = (
            caches[0] if is_whole else StaticCache.joined(caches, None if earlier is None else earlier.cache, used)
        )
        self._prepare()

    def _prepare(self) -> None:
        """Make inputs and outputs of a pass, and the arguments of the program."""
        cache, one, self.nodes = self.cache, self.states[0], self.images[0].nodes
        assert isinstance(one.target, CpuTarget)  # as `is_fused` has it
        nodes, config, self._program = self.nodes, one.target.config, one.target.program
        rows, first = cache.images * cache.rows, cache.first_stage_slot
        self._inputs, self._features = torch.empty(2, rows, nodes, config.dim, dtype=torch.float32).unbind()
        self._logits = torch.empty(rows, nodes, config.vocab_size, dtype=torch.float32)
        self._positions = torch.empty(rows, nodes, dtype=torch.long)
        self._places = (torch.arange(nodes) + first).repeat(rows, 1)
        self._mask = torch.full((rows, nodes, cache.slots), -torch.inf, dtype=torch.float32)
        prompts = torch.cat([state.cache.prefix_scores for state in self.states])
        self._mask[..., : cache.prefix] = prompts.flatten(0, 1)[:, None]
        is_staged = any(image.tree.depth + 1 < nodes for image in self.images)
        if is_staged:
            seen = [image.tree.ancestors.expand(len(image.start) * cache.rows, -1, -1) for image in self.images]
            self._mask[..., first : first + nodes].masked_fill_(torch.cat(seen), 0.0)
        taken = (self._inputs, self._positions, self._places, self._mask)
        self._args = pass_args(*taken, cache.buffer, features=self._features, logits=self._logits)
        embeddings = one.target.tok_embeddings.weight
        begins = accumulate((len(image.start) for image in self.images), initial=0)
        drafts = [draft_args(image, first) for image, first in zip(self.images, begins, strict=False) if image.plan]
        self._steps = cpp.StepArgs(
            **{"images": cache.images, "nodes": nodes, "tokens": one.count, "prefix": cache.prefix},
            **{"conditioning": config.cls_token_num, "is_staged": is_staged},
            **{"is_half": embeddings.dtype == torch.bfloat16, "embeddings": embeddings},
            of=array([args for image in self.images for args in image.args]),
            **{"drafts": array(drafts), "drafters": len(drafts)},
        )

    def __call__(self, patience: float = 0.0) -> None:
        """Take rounds for `patience` seconds, at least one, until an image is complete; one round while on trial."""
        if any(image.window is not None and image.window.is_on_trial for image in self.images):
            patience = 0.0
        scored = [image.tokens[:, : self.nodes].clone() for image in self.images] if not patience else []
        before, drafting = self._steps.seconds, self._steps.drafting
        arguments = (self._program.model, self._args, self._steps)
        taken = build.library().lantern_steps(*map(ctypes.byref, arguments), ctypes.c_double(patience))
        at = 0
        for number, image in enumerate(self.images):
            state, rows = image.state, slice(at, at := at + len(image.start) * self.cache.rows)
            state.advance(int(state.known.min()), taken)
            seen = (self._logits[rows], self._features[rows])
            state.step = image.step(scored[number], *seen) if scored else image.last
            if image.window is not None:
                image.window.count_step(state.known)
            state.watch.lap("walk")
            state.watch.move("walk", "score", self._steps.seconds - before)
            if image.plan:
                state.watch.move("walk", "propose", self._steps.drafting - drafting)
        if len(self.states) == 1 and self.images[0].nodes != self.nodes:
            self._prepare()
