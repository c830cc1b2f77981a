"""LlamaGen's sizes with random weights: time of a pass over n nodes, and speedup at a scripted acceptance."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Step, Verifier
from lantern.decoding.loop import now
from lantern.drafters.trees.static import StaticTree, named
from lantern.eval.speed.contenders import (
    PLAIN,
    Contender,
    DoneError,
    Job,
    Lineup,
    Stable,
    kinds_of,
    until_done,
    variants,
    warm_up,
)
from lantern.eval.speed.pass_curve import NODES, PassCurve
from lantern.eval.speed.phases import copy_bandwidth, describe, layer_seconds, roofline, time_phases
from lantern.eval.speed.race import Spread, compare, interleave, rounded
from lantern.eval.speed.scripted import ScriptedVerifier, deepest, script
from lantern.eval.speed.surroundings import load_average, surroundings
from lantern.methods.registry import METHODS, Decoder, find
from lantern.methods.spec import AddOn, DrafterContext, resolved
from lantern.models.folder import DTYPES, Model, pick_device
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.verifiers.gumbel import GumbelVerifier

CAPTION_WORDS = 24


@dataclass(frozen=True)
class ShapeOptions:
    """Options of a size: each round decodes `codes` codes, with caches of the full length."""

    shape: str = "L"
    taus: Sequence[float] = (2.0, 3.0, 3.5, 4.0)
    codes: int = 48
    tree: str = "grown_15_4"
    drafter: str = "eagle1"
    images: int = 10
    batch: int = 1
    dtypes: Sequence[str] = ("bf16",)
    kinds: Sequence[str] = ()
    baselines: Sequence[str] = ()
    nodes: Sequence[int] = NODES
    changes: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    is_quiet: bool = False

    @property
    def config(self) -> TransformerConfig:
        """The text-conditional transformer of this size: 256 codes, codebook of 16,384, with `changes`."""
        return TransformerConfig.named(self.shape, **({"model_type": "t2i", "cls_token_num": 120} | dict(self.changes)))


def measure(options: ShapeOptions) -> dict[str, Any]:
    """Return all figures of one size for JSON."""
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
        "contenders": bench.figures(lineup, seconds, copy_gbps),
        "results": bench.results(lineup, seconds),
        "phases": bench.phases(lineup, seconds, copy_gbps),
        "failed": lineup.failed,
        "load_average": {"begin": before, "end": load_average()},
    }


def random_model(config: TransformerConfig, drafter: str, device: torch.device, dtype: torch.dtype) -> Model:
    """Return a target and a one-layer drafter of a size, with their initial random weights."""
    entry = network_of(drafter)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target, draft = Transformer(config), entry.module(entry.config.for_target(config, layers=1))
    for network in (target, draft):
        network.to(device=device, dtype=dtype)
        network.eval().requires_grad_(False)
    return Model(name="random", target=target, drafter=draft)


def network_of(drafter: str) -> AddOn:
    """Return the network of a method that drafts static trees by one; ValueError for other methods."""
    spec = find(drafter).spec
    found = [entry for entry in spec.add_ons if isinstance(entry, AddOn) and entry.training == "drafter"]
    if spec.tree is None or len(found) != 1 or "layers" not in {entry.name for entry in fields(found[0].config)}:
        raise ValueError(f'drafter is "{drafter}", wanted a method with a tree and layers of its own, such as "eagle1"')
    return found[0]


class ShapeBench:
    """The measurements of one size: plain decoding and one scripted method per tau.

    ValueError for a tree that is too shallow for the scripted acceptance.
    """

    def __init__(self, options: ShapeOptions, device: torch.device) -> None:
        self.options, self.device = options, device
        self.sampling = Sampling(guidance=7.5, top_k=1000 if options.config.vocab_size > 1000 else 0)
        self.tree: StaticTree = named(options.tree)
        self.codes = min(options.codes, options.config.block_size - 1)
        deep = math.ceil(max(options.taus)) - 1
        if deep > self.tree.depth:
            raise ValueError(
                f"tau {max(options.taus):g} needs {deep} accepted codes in a step, tree {options.tree} has depth "
                f"{self.tree.depth}: choose a deeper --tree"
            )
        self.stable = Stable(random_model(options.config, options.drafter, device, DTYPES[options.dtypes[0]]))
        self.job = Job(self._condition(), [(0, number) for number in range(options.batch)])

    def line_up(self) -> Lineup:
        """Return plain decoding and the scripted methods, each in its variants."""
        kinds = self.options.kinds or kinds_of(self.device)
        lineup, names = Lineup(), variants(kinds, self.options.dtypes, self.options.baselines)
        for label in (PLAIN, *map(tau_label, self.options.taus)):
            for variant in names[PLAIN if label == PLAIN else "others"]:
                try:
                    model = self.stable.model(variant)
                except Exception as error:  # compilers and quantisers raise errors of any kind
                    lineup.note(label, variant, error)
                    continue
                method = METHODS[PLAIN if label == PLAIN else self.options.drafter]
                lineup.contenders.append(Contender(label, method, variant, self._parts(label, model)))
        return lineup

    def race(self, lineup: Lineup) -> list[list[float]]:
        """Return seconds per code of each contender by round, without prefill."""
        report: Callable[[str], object] = print_error if not self.options.is_quiet else lambda text: None
        report(f"{self.options.shape}: warming up {len(lineup.contenders)} contenders")
        warm_up(lineup, self.seconds_per_code)
        runs = [lambda _, one=one: self.seconds_per_code(one) for one in lineup.contenders]
        rounds = self.options.images
        _, found = interleave(
            runs, rounds, device=self.device, after_round=lambda number: report(f"round {number + 1} of {rounds}")
        )
        return found

    def seconds_per_code(self, contender: Contender) -> float:
        """Return the seconds of the steps that commit the codes after the first, divided by their number."""
        counts = [1] * self.codes if contender.is_plain else self._counts(contender.label)
        begin = 0.0

        def watch(step: Step) -> None:
            nonlocal begin
            if step.index == 0:
                begin = now(self.device)
            if step.index == len(counts):
                raise DoneError(now(self.device) - begin)

        return until_done(contender, self.job, watch) / sum(counts)

    def figures(self, lineup: Lineup, seconds: Sequence[Sequence[float]], copy_gbps: float) -> list[dict[str, Any]]:
        """Return milliseconds per code of every contender, and the roofline."""
        found, rows = [], self.options.batch * self.sampling.rows
        for contender, of_one in zip(lineup.contenders, seconds, strict=True):
            spread = Spread.of([1e3 * value for value in of_one])
            variant = {"variant": contender.variant.kind, "dtype": contender.variant.dtype}
            rate = {"codes_per_second": rounded(1e3 * self.options.batch / spread.median)}
            counts = [1] if contender.is_plain else self._counts(contender.label)
            step = spread.median / 1e3 * sum(counts) / len(counts)
            rate |= roofline(contender, rows=rows, copy_gbps=copy_gbps, step_seconds=step)
            found.append({"method": contender.label} | variant | {"ms_per_code": spread.as_dict()} | rate)
        return found

    def results(self, lineup: Lineup, seconds: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
        """Compare the fastest variant of every tau with the fastest plain decoding."""
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
        """Return the time by phase of a whole grid, plain and at the first tau, each in its fastest variant."""
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
        """Return T(n) in the variants that can score trees on this machine."""
        ran = [one.variant for one in lineup.contenders if not one.is_plain]
        # passes inside a CUDA graph cannot be timed one by one
        timed = [variant for variant in dict.fromkeys(ran) if not variant.is_graphed]
        curve = PassCurve(self.stable, self.sampling, self.job)
        nodes = (*self.options.nodes, self.tree.max_nodes)
        return [curve.measure(variant, nodes, copy_gbps=copy_gbps) for variant in timed]

    def bounds(self, curves: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the upper bound on speedup at each tau: tau T(1) / T(nodes of the tree)."""
        if not curves:
            return {}
        one = min(curve["ms"][0] for curve in curves)
        many = min(curve["ms"][curve["nodes"].index(self.tree.max_nodes)] for curve in curves)
        return {tau_label(tau): rounded(tau * one / many) for tau in self.options.taus}

    def _parts(self, label: str, model: Model) -> Decoder:
        if label == PLAIN:
            target = model.engine.prepare(model.target)
            return Decoder(METHODS[PLAIN], target, self.sampling, None, None, engine=model.engine)
        assert model.drafter is not None
        engine, method = model.engine, METHODS[self.options.drafter].with_options(tree=self.options.tree)
        module, target = engine.prepare_drafter(model.drafter), engine.prepare(model.target)
        read = {network_of(method.name).name: module}
        context = DrafterContext(target, self.sampling, module, read)
        drafter = resolved(method.spec.drafter)(method, context)
        verifier = self._scripted(GumbelVerifier(), self._counts(label), deepest(self.tree.shape()))
        return Decoder(method, target, self.sampling, drafter, verifier, engine=engine)

    def _scripted(self, inner: Verifier, counts: Sequence[int], path: Sequence[int]) -> ScriptedVerifier:
        return ScriptedVerifier(inner, tuple(counts), tuple(path), self.options.config.block_size)

    def _counts(self, label: str) -> list[int]:
        return script(float(label.removeprefix("tau ")), self.codes)

    def _best(self, pairs: Sequence[tuple[Contender, Sequence[float]]]) -> dict[str, tuple[Contender, Sequence[float]]]:
        """Return the variant with the smallest median by label."""
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
    """Return the label of a scripted method."""
    return f"tau {tau:g}"


def print_error(text: str) -> None:
    """Print one line to stderr."""
    print(text, file=sys.stderr)
