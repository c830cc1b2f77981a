"""One tuning run: every candidate makes a batch, the best ones race plain decoding, the fastest one does so again on
other images, and a profile holds it if it is faster there.

Candidates are methods at settings, within a bound on their total variation.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lantern.core.io import write_json
from lantern.core.sampling import Sampling
from lantern.decoding.statistics import median_interval, now
from lantern.drafters.trees import grown
from lantern.generation.choice import VERSION, describe_machine, has_parts, place_of
from lantern.generation.generator import Generator
from lantern.generation.requests import Request, as_requests, check_requests, shuffled_prompts
from lantern.methods import METHODS, Method
from lantern.methods.method import ADD_ONS
from lantern.models.folder import Model, record_tokens_per_step

WINDOWS = (2, 4, 8, 16, 32, 64)
NODES = (2, 3, 4, 8, 16, 32, 64, 128, 256)  # of a tree, the root included
CHANCES = (0.3, 0.7)  # that a drafted token is accepted: trees are wide for the first, deep for the second
WIDEST = 16
MARGIN = 1.03  # a method must beat plain decoding by this factor; less is noise
HOPEFUL = 1 / 1.15  # least speedup in the first batch of a candidate that races
FINALISTS, OF_A_METHOD = 5, 3
ROUNDS = 3  # least number of a race
LAST_ROUNDS = 10  # least number of the race of the fastest one alone
Batch = Sequence[Request]


def swept(method: Method) -> list[dict[str, Any]]:
    """Return the values that are tried of the setting that trades quality for speed; nothing where there is none."""
    return [{option.name: value} for option in method.options.values() for value in option.sweep] or [{}]


def by_drafts(method: Method) -> list[Method]:
    """Return a method, and with each of the other networks that can draft for it."""
    option = method.options.get("drafts")
    others = () if option is None else (one for one in option.choices if one != option.default)
    return [method, *(method.with_options(drafts=one) for one in others)]


def candidates(
    model: Model, max_tv: float = 0.0, *, max_nodes: int = 32, max_depth: int = 8, names: Sequence[str] = ()
) -> list[Method]:
    """Return the methods with the settings to measure, exact ones first, relaxed ones if `max_tv` is above 0.

    Methods with dynamic trees, or without tree and window, have nothing to tune and are left out, as are methods whose
    networks or codebook the model lacks. `names` restricts them. ValueError for an unknown name, for a relaxed
    method without a bound, and for one that has nothing to tune.
    """
    for name in names:
        if name not in METHODS or name == "auto":
            known = ", ".join(known for known in METHODS if known != "auto")
            raise ValueError(f"method {name!r} cannot be tuned, wanted some of {known}")
        if not METHODS[name].exact and not max_tv:
            raise ValueError(f'method "{name}" is relaxed: give a bound on its cost with --max-tv')
        if not METHODS[name].is_plain and "window" not in METHODS[name].options and METHODS[name].tree is None:
            raise ValueError(f'method "{name}" has no window or static tree to tune: measure it with `lantern bench`')
    found, has_table = list[Method](), max_tv > 0 and model.codebook is not None
    for method in chain.from_iterable(map(by_drafts, METHODS.values())):
        is_admitted = method.exact or (max_tv > 0 and (has_table or "k" not in method.options))
        if is_admitted and has_parts(model, method) and (not names or method.name in names):
            shapes = list(shapes_of(method, model, max_nodes, max_depth))
            # the codebook may have fewer neighbours than the default; a method may read one more than it uses
            most = model.target.config.vocab_size - 2
            own = {"k": most} if method.settings.get("k", 0) > most else {}
            found += [method.with_options(**own, **knob, **one) for knob in swept(method) for one in shapes]
    return sorted(found, key=lambda one: not one.exact)


def shapes_of(method: Method, model: Model, max_nodes: int, max_depth: int) -> Iterator[dict[str, Any]]:
    """Yield the windows or the trees to try, as settings; some add-ons draft a limited number of tokens."""
    if (option := method.options.get("window")) is not None:
        least, most = option.low or 0, min(option.high or WINDOWS[-1], model.target.config.block_size)
        yield from ({"window": size} for size in WINDOWS if least <= size <= most)
    elif method.tree is not None:
        deep: list[Any] = [model.add_ons[name] for name in method.made.needs if ADD_ONS[name].limits_depth]
        depth = min([max_depth, *(part.config.depths for part in deep)])
        ranks = range(min(WIDEST, model.target.config.vocab_size))
        sizes = [nodes for nodes in NODES if nodes < max_nodes] + [max_nodes]
        likely = [[chance * (1 - chance) ** rank for rank in ranks] for chance in CHANCES]
        trees = dict.fromkeys(grown(nodes - 1, depth, rates) for nodes in sizes for rates in likely)
        yield from ({"tree": tree.spelling} for tree in trees)


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
    """Return a method's figures as JSON values; its speedup has an interval if it raced for LAST_ROUNDS or more."""
    ratios = [before.seconds / after.seconds for before, after in zip(plain, runs, strict=True)]
    return {
        "method": method.name,
        "settings": dict(method.chosen),
        "rounds": len(runs),
        "tokens_per_step": round(fmean(run.tokens_per_step for run in runs), 4),
        "milliseconds_per_token": round(1000 * median(run.seconds for run in runs), 5),
        "speedup": round(median(ratios), 4),
        "interval_95": [round(end, 4) for end in median_interval(ratios)] if len(ratios) >= LAST_ROUNDS else None,
        "total_variation": round(fmean(run.total_variation for run in runs), 6),
    }


def finalists(screened: Sequence[Mapping[str, Any]], max_tv: float) -> list[int]:
    """Return the numbers of the candidates that race: the fastest within the bound, few of each method."""
    taken: list[int] = []
    for number in sorted(range(len(screened)), key=lambda number: -screened[number]["speedup"]):
        one = screened[number]
        alike = sum(screened[other]["method"] == one["method"] for other in taken)
        is_good = one["speedup"] > HOPEFUL and one["total_variation"] <= max_tv
        if is_good and alike < OF_A_METHOD and len(taken) < FINALISTS:
            taken.append(number)
    return taken


def is_good(one: Mapping[str, Any], max_tv: float) -> bool:
    """Return whether a method is within the bound and beats plain decoding by MARGIN, and in its interval, if any."""
    low, _ = one["interval_95"] or (MARGIN, MARGIN)
    return low > 1 and one["speedup"] >= MARGIN and one["total_variation"] <= max_tv


def tune(
    model: Model,
    *,
    sampling: Sampling | None = None,
    prompts: Sequence[str] = (),
    images: int = 4,
    batch: int = 1,
    seed: int = 0,
    max_tv: float = 0.0,
    methods: Sequence[str] = (),
    max_nodes: int = 32,
    max_depth: int = 8,
    out: Path | None = None,
    writes_model: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, Any], Path]:
    """Measure the methods of a model on this machine, and write the fastest one to a profile that "auto" reads.

    Each candidate makes one batch; the fastest then race plain decoding on at least `images` images of `prompts`
    (default: concepts, shuffled) or of evenly spread classes, `batch` at a time, and the winner alone in LAST_ROUNDS or
    more on images of another seed, which decide. Relaxed methods are admitted up to a mean total variation of `max_tv`
    per token, as these images estimate it. `methods` restricts what is measured. Return the profile and its file:
    `out`, or the place where "auto" finds it. With `writes_model` the tokens per step of windows, which do not depend
    on the machine, are written into the model's folder. ValueError, before anything is measured, if there is no such
    place.
    """
    path = out or place_of(model)
    sampled = sampling or model.sampling()
    if writes_model and (model.folder is None or sampled != model.sampling()):
        raise ValueError("tokens per step are written into a model's folder for its default sampling: leave others out")
    entered = candidates(model, max_tv, max_nodes=max_nodes, max_depth=max_depth, names=methods)
    windows = [number for number, one in enumerate(entered) if writes_model and one.name == "gumbel-jacobi"]
    if writes_model and not windows:
        raise ValueError('tokens per step of windows were not measured: leave "gumbel-jacobi" in --methods')
    count = -(-images // batch)
    batches = batches_to_measure(model, count, batch, prompts, seed)

    report("plain decoding")
    plain = METHODS["plain"]
    [baseline] = race(model, [plain], sampled, batches[:1] * ROUNDS)
    fastest = [min(baseline, key=lambda run: run.seconds)]  # other programs may slow a batch
    found = []
    for number, method in enumerate(entered):
        report(f"{number + 1} of {len(entered)}: {label(method.name, method.chosen)}")
        [runs] = race(model, [method], sampled, batches[:1])
        found.append(figures(method, runs, fastest))
    racing = list(dict.fromkeys([*finalists(found, max_tv), *windows]))
    report(f"race: plain and {len(racing)} more")
    rounds = batches * -(-ROUNDS // count)
    baseline, *raced = race(model, [plain, *(entered[number] for number in racing)], sampled, rounds)
    for number, runs in zip(racing, raced, strict=True):
        found[number] = figures(entered[number], runs, baseline)
    choice = first = figures(plain, baseline, baseline)
    good = [number for number in racing if is_good(found[number], max_tv)]
    if good:
        winner = max(good, key=lambda number: found[number]["speedup"])
        report(f"race: plain and {label(entered[winner].name, entered[winner].chosen)}")
        rounds = batches_to_measure(model, max(count, LAST_ROUNDS), batch, prompts, seed ^ 1)
        baseline, runs = race(model, [plain, entered[winner]], sampled, rounds)
        found[winner] = figures(entered[winner], runs, baseline)
        choice = found[winner] if is_good(found[winner], max_tv) else first

    admitted = [one for one in found if one["total_variation"] <= max_tv]
    profile = {
        "version": VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(model),
        "model": {"name": model.name, "weights": model.weights_digest},
        "sampling": dataclasses.asdict(sampled),
        "batch": batch,
        "pictures": count * batch,
        "max_tv": max_tv,
        "plain": first,
        "candidates": sorted(admitted, key=lambda one: (-one["rounds"], -one["speedup"])),
        "choice": choice,
    }
    if writes_model:
        assert model.folder is not None
        tokens = {entered[number].settings["window"]: found[number]["tokens_per_step"] for number in windows}
        record_tokens_per_step(model.folder, tokens)
    write_json(path, profile)
    return profile, path


def label(name: str, settings: Mapping[str, Any]) -> str:
    """Return a method and its settings as text, the tree by its nodes and its depth."""
    words = [f"{key.rstrip('_')} {value}" for key, value in settings.items() if key != "tree"]
    nodes = settings.get("tree", "").split()
    size = [f"tree {len(nodes) + 1} to depth {nodes[-1].count('.') + 1}"] if nodes else []
    return " ".join([name, *words, *size])


def batches_to_measure(model: Model, rounds: int, batch: int, prompts: Sequence[str], seed: int) -> list[Batch]:
    """Return the images to measure on: prompts one after another, by default shuffled concepts, or evenly spread
    classes.
    """
    count, classes = rounds * batch, model.target.config.num_classes
    if model.takes_prompts and not prompts:
        prompts = shuffled_prompts(None, seed)
    subjects = [prompts[i % len(prompts)] if model.takes_prompts else i * classes // count for i in range(count)]
    requested = as_requests(subjects, seed)
    check_requests(model, requested)
    return [requested[i : i + batch] for i in range(0, count, batch)]
