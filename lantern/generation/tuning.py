"""One tuning run: every candidate makes a batch, the best ones race plain decoding, and a profile holds the winner.

Candidates are methods at settings, within bounds on their cost in quality.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from lantern.core.io import write_json
from lantern.core.sampling import Sampling
from lantern.decoding.statistics import now
from lantern.drafters.trees.static import grown
from lantern.generation.choice import VERSION, describe_machine, has_parts, place_of
from lantern.generation.generator import Generator
from lantern.generation.requests import Request, as_requests, check_requests
from lantern.methods import METHODS, Method
from lantern.methods.parts import ADD_ONS
from lantern.models.folder import Model, record_tokens_per_step

WINDOWS = (2, 4, 8, 16, 32, 64)
NODES = (4, 8, 16, 32, 64, 128, 256)  # of a tree, the root included
CHANCES = (0.3, 0.7)  # that a drafted token is accepted: trees are wide for the first, deep for the second
WIDEST = 16
MARGIN = 1.03  # a method must beat plain decoding by this factor; less is noise
HOPEFUL = 1 / 1.15  # least speedup in the first batch of a candidate that races
FINALISTS, OF_A_METHOD = 5, 3
ROUNDS = 3  # least number of a race
PROMPTS = (
    "a red apple",
    "a cat face",
    "a house",
    "a green tree",
    "a yellow banana",
    "a blue car",
    "a dog",
    "a smiling sun",
)
Batch = Sequence[Request]


@dataclass(frozen=True)
class Bounds:
    """Bounds on the cost in quality of relaxed methods: mean total variation per token, or loss in KID.

    `quality` holds the KID losses of an evaluation, {method: {value of its knob: loss}}; `max_kid` excludes everything
    that is not in it. Without a bound only exact methods are candidates. ValueError for `max_kid` without `quality`.
    """

    max_tv: float | None = None
    max_kid: float | None = None
    quality: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_kid is not None and not self.quality:
            raise ValueError(
                "a bound on KID needs the figures of an evaluation: give them with --quality FILE,"
                ' {"lantern++": {"2.0": 0.0004}}, or bound the total variation with --max-tv'
            )
        for name, drops in self.quality.items():
            if name not in METHODS or not isinstance(drops, Mapping):
                raise ValueError(f"quality figures name {name!r}, wanted a method with {{knob: KID drop}}")
            for knob, drop in drops.items():
                if not _is_number(knob) or not isinstance(drop, int | float) or isinstance(drop, bool):
                    raise ValueError(f"quality figures of {name} hold {knob!r}: {drop!r}, wanted a knob and a KID drop")

    @property
    def admits_relaxed(self) -> bool:
        """Whether any bound is given, which admits relaxed methods."""
        return self.max_tv is not None or self.max_kid is not None

    def admits_variation(self, total_variation: float) -> bool:
        """Return whether `max_tv` admits this mean total variation per token."""
        return self.max_tv is None or total_variation <= self.max_tv

    def knobs(self, method: Method) -> list[dict[str, Any]]:
        """Return the admitted settings of the option of a relaxed method that trades quality for speed."""
        name, values = swept(method)
        if self.max_kid is not None:
            drops = {float(value): drop for value, drop in self.quality.get(method.name, {}).items()}
            values = tuple(value for value in sorted(drops) if drops[value] <= self.max_kid)
        return [{name: value} for value in values]


def swept(method: Method) -> tuple[str, tuple[float, ...]]:
    """Return the setting of a relaxed method that trades quality for speed, and the values that are tried of it."""
    return next((option.name, option.sweep) for option in method.options.values() if option.sweep)


def candidates(
    model: Model, bounds: Bounds, *, max_nodes: int = 32, max_depth: int = 8, names: Sequence[str] = ()
) -> list[Method]:
    """Return the methods with the settings to measure, exact ones first; `names` restricts them.

    Methods with dynamic trees, or without tree and window, have nothing to tune and are left out, as are methods whose
    networks or codebook the model lacks. ValueError for an unknown name and for one that the bounds exclude.
    """
    for name in names:
        if name not in METHODS or name == "auto":
            known = ", ".join(known for known in METHODS if known != "auto")
            raise ValueError(f"method {name!r} cannot be tuned, wanted some of {known}")
        if not METHODS[name].exact and not bounds.admits_relaxed:
            raise ValueError(f'method "{name}" is relaxed: give a bound on its cost with --max-tv')
    found, has_table = [], bounds.admits_relaxed and model.codebook is not None
    for method in METHODS.values():
        is_admitted = method.exact or (bounds.admits_relaxed and (has_table or "k" not in method.options))
        if is_admitted and has_parts(model, method) and (not names or method.name in names):
            knobs = [{}] if method.exact else bounds.knobs(method)
            shapes = list(shapes_of(method, model, max_nodes, max_depth))
            # the codebook may have fewer neighbours than the default; a method may read one more than it uses
            most = model.target.config.vocab_size - 2
            own = {"k": most} if method.settings.get("k", 0) > most else {}
            found += [method.with_options(**own, **knob, **one) for knob in knobs for one in shapes]
    return sorted(found, key=lambda one: not one.exact)


def shapes_of(method: Method, model: Model, max_nodes: int, max_depth: int) -> Iterator[dict[str, Any]]:
    """Yield the windows or the trees to try, as settings; some add-ons draft a limited number of tokens."""
    if "window" in method.options:
        yield from ({"window": size} for size in WINDOWS if size <= model.target.config.block_size)
    elif method.tree is not None:
        deep: list[Any] = [model.add_ons[name] for name in method.made.parts if ADD_ONS[name].limits_depth]
        depth = min([max_depth, *(part.config.depths for part in deep)])
        ranks = range(min(WIDEST, model.target.config.vocab_size))
        sizes = [nodes for nodes in NODES if nodes < max_nodes] + [max_nodes]
        likely = [[chance * (1 - chance) ** rank for rank in ranks] for chance in CHANCES]
        trees = dict.fromkeys(grown(nodes - 1, depth, rates) for nodes in sizes for rates in likely)
        yield from ({"tree": tree.spelling} for tree in trees)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Timing:
    """One batch of whole images: seconds per token, tokens per step, total variation per token."""

    seconds: float
    tokens_per_step: float
    total_variation: float


def race(model: Model, methods: Sequence[Method], sampling: Sampling, batches: Sequence[Batch]) -> list[list[Timing]]:
    """Make all batches by each method, interleaved, after a warm-up of each; return the runs by method."""
    generators = [Generator(model, method, sampling) for method in methods]
    for generator in generators:
        generator.warm_up(batches[0])
    found: list[list[Timing]] = [[] for _ in methods]
    for requested, (generator, runs) in product(batches, zip(generators, found, strict=True)):
        condition, begin = generator.condition(requested), now(model.device)
        made = generator.decode(condition, requested)
        seconds, tokens = now(model.device) - begin, made.tokens.numel()
        runs.append(
            Timing(seconds / tokens, tokens / int(made.steps.sum()), float(made.total_variation.sum()) / tokens)
        )
    return found


def figures(method: Method, runs: Sequence[Timing], plain: Sequence[Timing]) -> dict[str, Any]:
    """Return a method's figures as JSON values; its speedup has an interval if it raced against plain decoding."""
    ratios = [before.seconds / after.seconds for before, after in zip(plain, runs, strict=True)]
    return {
        "method": method.name,
        "settings": dict(method.chosen),
        "rounds": len(runs),
        "tokens_per_step": round(fmean(run.tokens_per_step for run in runs), 4),
        "milliseconds_per_token": round(1000 * median(run.seconds for run in runs), 5),
        "speedup": round(median(ratios), 4),
        "interval_95": interval(ratios) if len(ratios) >= ROUNDS else None,
        "total_variation": round(fmean(run.total_variation for run in runs), 6),
    }


def interval(values: Sequence[float]) -> list[float]:
    """Return a 95 % bootstrap interval of the median; deterministic."""
    drawn = np.random.default_rng(0).choice(values, (1000, len(values)))
    return [round(float(end), 4) for end in np.quantile(np.median(drawn, axis=1), (0.025, 0.975))]


def finalists(screened: Sequence[Mapping[str, Any]], bounds: Bounds) -> list[int]:
    """Return the numbers of the candidates that race: the fastest within the bounds, few of each method."""
    taken: list[int] = []
    for number in sorted(range(len(screened)), key=lambda number: -screened[number]["speedup"]):
        one = screened[number]
        alike = sum(screened[other]["method"] == one["method"] for other in taken)
        is_good = one["speedup"] > HOPEFUL and bounds.admits_variation(one["total_variation"])
        if is_good and alike < OF_A_METHOD and len(taken) < FINALISTS:
            taken.append(number)
    return taken


def choose(plain: Mapping[str, Any], raced: Sequence[Mapping[str, Any]], bounds: Bounds) -> Mapping[str, Any]:
    """Return the fastest of those that raced within the bounds, if it beats plain decoding by MARGIN in its interval
    and its median; else plain decoding.
    """
    good = [
        one
        for one in raced
        if one["interval_95"] is not None
        and one["interval_95"][0] > 1
        and one["speedup"] >= MARGIN
        and bounds.admits_variation(one["total_variation"])
    ]
    return max(good, key=lambda one: one["speedup"], default=plain)


def tune(
    model: Model,
    *,
    sampling: Sampling | None = None,
    prompts: Sequence[str] = (),
    images: int = 4,
    batch: int = 1,
    seed: int = 0,
    bounds: Bounds = Bounds(),
    methods: Sequence[str] = (),
    max_nodes: int = 32,
    max_depth: int = 8,
    out: Path | None = None,
    writes_model: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, Any], Path]:
    """Measure the methods of a model on this machine, and write the fastest one to a profile that "auto" reads.

    Each candidate makes one batch; the fastest then race plain decoding on at least `images` images of `prompts`
    (default: PROMPTS) or of evenly spread classes, `batch` at a time. `methods` restricts what is measured. Return the
    profile and its file: `out`, or the place where "auto" finds it. With `writes_model` the tokens per step of windows,
    which do not depend on the machine, are written into the model's folder. ValueError, before anything is measured, if
    there is no such place.
    """
    path = out or place_of(model)
    sampled = sampling or model.sampling()
    if writes_model and (model.folder is None or sampled != model.sampling()):
        raise ValueError("tokens per step are written into a model's folder for its default sampling: leave others out")
    entered = candidates(model, bounds, max_nodes=max_nodes, max_depth=max_depth, names=methods)
    windows = [number for number, one in enumerate(entered) if writes_model and one.name == "gumbel-jacobi"]
    if writes_model and not windows:
        raise ValueError('tokens per step of windows were not measured: leave "gumbel-jacobi" in --methods')
    count = -(-images // batch)
    requested = requests_to_measure(model, count * batch, prompts or PROMPTS, seed)
    batches = [requested[i : i + batch] for i in range(0, len(requested), batch)]

    report("plain decoding")
    plain = METHODS["plain"]
    [baseline] = race(model, [plain], sampled, batches[:1])
    found = []
    for number, method in enumerate(entered):
        report(f"{number + 1} of {len(entered)}: {label(method.name, method.chosen)}")
        [runs] = race(model, [method], sampled, batches[:1])
        found.append(figures(method, runs, baseline))
    racing = list(dict.fromkeys([*finalists(found, bounds), *windows]))
    report(f"race: plain and {len(racing)} more")
    rounds = batches * -(-ROUNDS // count)
    baseline, *raced = race(model, [plain, *(entered[number] for number in racing)], sampled, rounds)
    for number, runs in zip(racing, raced, strict=True):
        found[number] = figures(entered[number], runs, baseline)

    first = figures(plain, baseline, baseline)
    admitted = [one for one in found if bounds.admits_variation(one["total_variation"])]
    profile = {
        "version": VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(model),
        "model": {"name": model.name, "fingerprint": model.fingerprint},
        "sampling": dataclasses.asdict(sampled),
        "batch": batch,
        "pictures": len(requested),
        "bounds": {"max_tv": bounds.max_tv, "max_kid": bounds.max_kid},
        "plain": first,
        "candidates": sorted(admitted, key=lambda one: (one["interval_95"] is None, -one["speedup"])),
        "choice": choose(first, admitted, bounds),
    }
    if writes_model:
        assert model.folder is not None
        tokens = {entered[number].settings["window"]: found[number]["tokens_per_step"] for number in windows}
        record_tokens_per_step(model.folder, tokens)
    write_json(path, json.loads(json.dumps(profile, sort_keys=True, allow_nan=False)))
    return profile, path


def label(name: str, settings: Mapping[str, Any]) -> str:
    """Return a method and its settings as text, the tree by its nodes and its depth."""
    words = [f"{key.rstrip('_')} {value}" for key, value in settings.items() if key != "tree"]
    nodes = settings.get("tree", "").split()
    size = [f"tree {len(nodes) + 1} to depth {nodes[-1].count('.') + 1}"] if nodes else []
    return " ".join([name, *words, *size])


def requests_to_measure(model: Model, count: int, prompts: Sequence[str], seed: int) -> list[Request]:
    """Return the images to measure on: prompts one after another, or evenly spread classes."""
    classes = model.target.config.num_classes
    subjects = [prompts[i % len(prompts)] if model.takes_prompts else i * classes // count for i in range(count)]
    requested = as_requests(subjects, seed)
    check_requests(model, requested)
    return requested
