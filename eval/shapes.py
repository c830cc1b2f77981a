"""LlamaGen's sizes with random weights: what a pass over n nodes costs, and the speedup at a scripted acceptance."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from lantern.catalog import METHODS, Parts
from lantern.drafters.eagle import Eagle, EagleConfig
from lantern.drafters.eagle_drafter import EagleDrafter
from lantern.drafters.parallelspec import ParallelSpec, ParallelSpecConfig
from lantern.drafters.parallelspec_drafter import ParallelDrafter
from lantern.eval.bandwidth import copy_bandwidth
from lantern.eval.contenders import PLAIN, Contender, DoneError, Job, Lineup, until_done, variants, warm_up
from lantern.eval.pass_curve import NODES, PassCurve
from lantern.eval.phases import describe, layer_seconds, time_phases
from lantern.eval.ratios import Spread, compare, rounded
from lantern.eval.rounds import now, take_turns
from lantern.eval.scripted import ScriptedVerifier, deepest, script
from lantern.eval.surroundings import load_average, surroundings
from lantern.eval.variants import Stable, kinds_of
from lantern.kernels.drafter import fused_drafter
from lantern.model_folder import DTYPES, Model, pick_device, place_module
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.sampling import Sampling
from lantern.trees.static import StaticTree, named
from lantern.types import Condition, Step, Verifier
from lantern.verifiers.gumbel import GumbelVerifier

CAPTION_WORDS = 24
# drafters that a size can be measured with: one pass for each depth of the tree, or one for all
DRAFTERS: dict[str, tuple[Any, Any]] = {
    "eagle1": (Eagle, EagleConfig),
    "parallelspec": (ParallelSpec, ParallelSpecConfig),
}


@dataclass(frozen=True)
class ShapeOptions:
    """What is measured at a size: `codes` of the canvas are decoded a round, with caches of its full length."""

    shape: str = "L"
    taus: Sequence[float] = (2.0, 3.0, 3.5, 4.0)
    codes: int = 48
    tree: str = "grown_15_4"
    drafter: str = "eagle1"
    images: int = 10
    batch: int = 1
    dtypes: Sequence[str] = ("bf16",)
    kinds: Sequence[str] = ()
    nodes: Sequence[int] = NODES
    changes: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    is_quiet: bool = False

    @property
    def config(self) -> TransformerConfig:
        """The text-conditional transformer of this size, 256 codes of 16,384, with `changes`."""
        return TransformerConfig.named(self.shape, **({"model_type": "t2i", "cls_token_num": 120} | dict(self.changes)))


def measure(options: ShapeOptions) -> dict[str, Any]:
    """All figures of one size as JSON has them."""
    before, device = load_average(), pick_device(options.device)
    bench = ShapeBench(options, device)
    copy_gbps = copy_bandwidth(device)
    lineup = bench.line_up()
    seconds = bench.race(lineup)
    curves = bench.curves(lineup, copy_gbps)
    return {
        "what": "shape",
        "shape": options.shape,
        "tree": {"name": options.tree, "nodes": bench.tree.max_nodes, "depth": bench.tree.depth},
        "batch": options.batch,
        "drafter": options.drafter,
        "codes": options.codes,
        "surroundings": surroundings(device),
        "copy_gbps": rounded(copy_gbps),
        "verify": curves,
        "bounds": bench.bounds(curves),
        "contenders": bench.figures(lineup, seconds),
        "results": bench.results(lineup, seconds),
        "phases": bench.phases(lineup, seconds, copy_gbps),
        "failed": lineup.failed,
        "load_average": {"begin": before, "end": load_average()},
    }


def random_model(config: TransformerConfig, drafter: str, device: torch.device, dtype: torch.dtype) -> Model:
    """A target and a drafter of one layer of a size, with the random weights that modules begin with."""
    module, made = DRAFTERS[drafter]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target, draft = Transformer(config), module(made.for_target(config, layers=1))
    for network in (target, draft):
        place_module(network, device, dtype)
        network.eval().requires_grad_(False)
    return Model(name="random", target=target, drafter=draft)


class ShapeBench:
    """The measurements of one size; contenders are plain decoding and one scripted method for each tau."""

    def __init__(self, options: ShapeOptions, device: torch.device) -> None:
        self.options, self.device = options, device
        self.sampling = Sampling(guidance=7.5, top_k=1000 if options.config.vocab_size > 1000 else 0)
        self.tree: StaticTree = named(options.tree)
        self.codes = min(options.codes, options.config.block_size - 1)
        deep = math.ceil(max(options.taus)) - 1
        if deep > self.tree.depth:
            raise ValueError(
                f"tau {max(options.taus):g} keeps {deep} drafted codes of a step, tree {options.tree} is "
                f"{self.tree.depth} deep: choose a deeper --tree"
            )
        self.stable = Stable(random_model(options.config, options.drafter, device, DTYPES[options.dtypes[0]]))
        self.job = Job(self._condition(), [(0, number) for number in range(options.batch)])

    def line_up(self) -> Lineup:
        """Plain decoding and the scripted methods, each in its variants."""
        kinds = self.options.kinds or kinds_of(self.device)
        lineup, names = Lineup(), variants(kinds, self.options.dtypes)
        for label in (PLAIN, *map(tau_label, self.options.taus)):
            for variant in names[PLAIN if label == PLAIN else "others"]:
                try:
                    model = self.stable.model(variant)
                except Exception as error:  # whatever a compiler or quantiser raises is the reason that is told
                    lineup.note(label, variant, error)
                    continue
                method = METHODS[PLAIN if label == PLAIN else self.options.drafter]
                lineup.contenders.append(Contender(label, method, variant, self._parts(label, model)))
        return lineup

    def race(self, lineup: Lineup) -> list[list[float]]:
        """Seconds a code of each contender, round by round; the pass over the prompt is not timed."""
        tell: Callable[[str], object] = print_error if not self.options.is_quiet else lambda text: None
        tell(f"{self.options.shape}: warming up {len(lineup.contenders)} contenders")
        warm_up(lineup, self.seconds_per_code)
        runs = [lambda _, one=one: self.seconds_per_code(one) for one in lineup.contenders]
        rounds = self.options.images
        _, found = take_turns(
            runs, rounds, device=self.device, after_round=lambda number: tell(f"round {number + 1} of {rounds}")
        )
        return found

    def seconds_per_code(self, contender: Contender) -> float:
        """Seconds of the steps that commit the wanted codes after the first, over how many they commit."""
        counts = [1] * self.codes if contender.is_plain else self._counts(contender.label)
        begin = 0.0

        def watch(step: Step) -> None:
            nonlocal begin
            if step.index == 0:
                begin = now(self.device)
            if step.index == len(counts):
                raise DoneError(now(self.device) - begin)

        return until_done(contender, self.job, watch) / sum(counts)

    def figures(self, lineup: Lineup, seconds: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
        """Milliseconds a code of every contender."""
        found = []
        for contender, of_one in zip(lineup.contenders, seconds, strict=True):
            spread = Spread.of([1e3 * value for value in of_one])
            variant = {"variant": contender.variant.kind, "dtype": contender.variant.dtype}
            rate = {"codes_per_second": rounded(1e3 * self.options.batch / spread.median)}
            found.append({"method": contender.label} | variant | {"ms_per_code": spread.as_dict()} | rate)
        return found

    def results(self, lineup: Lineup, seconds: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
        """The fastest variant of every tau against the fastest plain decoding."""
        pairs = list(zip(lineup.contenders, seconds, strict=True))
        best, base = self._best(pairs), self._best(pairs)[PLAIN]
        found = []
        for label, (contender, mine) in best.items():
            if label != PLAIN:
                sides = {"method": label, "variant": str(contender.variant), "baseline": str(base[0].variant)}
                ratio = compare(base[1], mine, images=len(mine) * self.options.batch)
                found.append(sides | ratio.as_dict())
        return found

    def phases(self, lineup: Lineup, seconds: Sequence[Sequence[float]], copy_gbps: float) -> list[dict[str, Any]]:
        """Where the time of a whole canvas goes, plain and at the first tau, each in its fastest variant."""
        best = self._best(list(zip(lineup.contenders, seconds, strict=True)))
        found, layer = [], None
        for label in list(best)[:2]:
            contender = best[label][0]
            timed = time_phases(contender, self.job)
            if contender.is_plain:
                layer = layer_seconds(timed)
            rows = self.options.batch * self.sampling.rows
            figures = describe(timed, layer=layer, copy_gbps=copy_gbps, rows=rows)
            found.append({"method": label, "variant": str(contender.variant), "batch": self.options.batch} | figures)
        return found

    def curves(self, lineup: Lineup, copy_gbps: float) -> list[dict[str, Any]]:
        """T(n) in the variants in which trees can be scored here."""
        ran = [one.variant for one in lineup.contenders if not one.is_plain]
        # a graph's passes cannot be timed one by one
        timed = [variant for variant in dict.fromkeys(ran) if not variant.is_graphed]
        curve = PassCurve(self.stable, self.sampling, self.job)
        nodes = (*self.options.nodes, self.tree.max_nodes)
        return [curve.measure(variant, nodes, copy_gbps=copy_gbps) for variant in timed]

    def bounds(self, curves: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The speedup at each tau if all but the target's passes were free: tau T(1) / T(nodes of the tree)."""
        if not curves:
            return {}
        one = min(curve["ms"][0] for curve in curves)
        many = min(curve["ms"][curve["nodes"].index(self.tree.max_nodes)] for curve in curves)
        return {tau_label(tau): rounded(tau * one / many) for tau in self.options.taus}

    def _parts(self, label: str, model: Model) -> Parts:
        if label == PLAIN:
            return Parts(METHODS[PLAIN], model.target, self.sampling, None, None, engine=model.engine)
        assert model.drafter is not None
        kind: Any = ParallelDrafter if isinstance(model.drafter, ParallelSpec) else EagleDrafter
        engine = model.engine
        module = fused_drafter(model.drafter, int8=engine.int8) if engine.fused else model.drafter
        drafter = kind(module, model.target, tree=self.tree, mode="gumbel", sampling=self.sampling)
        verifier = self._scripted(GumbelVerifier(), self._counts(label), deepest(self.tree.shape()))
        return Parts(METHODS[self.options.drafter], model.target, self.sampling, drafter, verifier, engine=engine)

    def _scripted(self, inner: Verifier, counts: Sequence[int], path: Sequence[int]) -> ScriptedVerifier:
        return ScriptedVerifier(inner, tuple(counts), tuple(path), self.options.config.block_size)

    def _counts(self, label: str) -> list[int]:
        return script(float(label.removeprefix("tau ")), self.codes)

    def _best(self, pairs: Sequence[tuple[Contender, Sequence[float]]]) -> dict[str, tuple[Contender, Sequence[float]]]:
        """Label -> the variant of the least median."""
        found: dict[str, tuple[Contender, Sequence[float]]] = {}
        for contender, seconds in sorted(pairs, key=lambda pair: median(pair[1])):
            found.setdefault(contender.label, (contender, seconds))
        return {label: found[label] for label in (PLAIN, *map(tau_label, self.options.taus)) if label in found}

    def _condition(self) -> Condition:
        config, generator = self.options.config, torch.Generator().manual_seed(0)
        words = min(CAPTION_WORDS, config.cls_token_num)
        captions = torch.randn(self.options.batch, words, config.caption_dim, generator=generator)
        mask = torch.ones(self.options.batch, words, dtype=torch.bool)
        return Condition(embeddings=captions, mask=mask).to(self.device)


def tau_label(tau: float) -> str:
    """What a scripted method is called."""
    return f"tau {tau:g}"


def print_error(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr)
