"""`lantern bench`: speedup over the fastest plain decoding.

All contenders make the same images in one process, in interleaved rounds. Decoding is timed from the text encoder's
features to tokens, prefill included; text encoding and VQ decoding, the same for all methods, are not.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

import torch

from lantern.core.io import sha256_of_lines
from lantern.eval.intervals import mean_estimate
from lantern.eval.json_lines import Line
from lantern.eval.speed import contenders
from lantern.eval.speed import race as racing
from lantern.eval.speed.contenders import PLAIN, Build, Contender, RoundImages, Variant
from lantern.eval.speed.race import STEADY, copy_bandwidth, race, reporter, roofline, rounded, spread
from lantern.eval.speed.surroundings import about, load_average, short_commit
from lantern.generation.choice import choose_method
from lantern.models.folder import Model, load_model

MIN_ROUNDS = 3
RANKING_RUNS = 3  # short decodings of a variant, of which the first may compile
SHARES = ("roofline", "arithmetic")
LEGEND = (
    "  roofline: seconds to read weights and half of the cache at copy bandwidth, as a share of a step's seconds",
    "  arithmetic: seconds of the pass's products at the rate of a large one, as such a share",
)


@dataclass(frozen=True)
class BenchOptions:
    """Options of a bench. `methods` are specs as for `choose_method`; empty means the model's own and "auto".

    Images of one prompt are alike: give as many `prompts` as `images`. Empty `kinds` means all of the device. Plain
    decoding is measured in `baselines` too. Variants that short decodings show to be slow are left out (`field_of`).
    """

    prompts: Sequence[str]
    model: str = "lantern-emoji"
    methods: Sequence[str] = ()
    images: int = 10
    batches: Sequence[int] = (1,)
    dtypes: Sequence[str] = ("fp32", "bf16")
    kinds: Sequence[str] = ()
    baselines: Sequence[str] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    device: str = "auto"
    is_quiet: bool = False
    rounding: bool = False


def measure(options: BenchOptions) -> dict[str, Any]:
    """Return all figures of a model for JSON; a signal after the first round raises CutShort with those so far."""
    before = load_average()
    model = load_model(options.model, device=options.device, dtype="fp32", engine="eager")
    sampling = model.sampling(**options.sampling)
    specs = [spec for spec in options.methods if spec != PLAIN]
    if options.methods and not specs:
        raise ValueError("methods are plain, which is always measured: give methods that draft")
    specs = specs or own_methods(model)
    for spec in specs:
        choose_method(model, spec, report=lambda line: None)
    stable, report = contenders.Stable(model), reporter(options.is_quiet)
    copy_gbps = copy_bandwidth(model.device)
    races, failed, slow, stop = [], [], [], None
    for batch in options.batches:
        try:
            rounds = max(math.ceil(options.images / batch), min(MIN_ROUNDS, options.images))
            jobs = contenders.jobs_of(model, options.prompts, rounds=rounds, batch=batch, seed=options.seed)
            field, failing, left_out = field_of(stable, specs, options, contenders.built(sampling, batch), jobs)
            lines, stop = racing.collect(race(field, jobs, racing.take, report=report), len(field))
        except KeyboardInterrupt as cut:
            if not races:
                raise
            stop = cut
            break
        failed += [one | {"batch": batch} for one in failing]
        slow += [one | {"batch": batch} for one in left_out]
        rounds, rows = len(lines) // len(field), batch * sampling.rows  # fewer after a signal; rows of a step
        of_race = {
            "batch": batch,
            "rounds": rounds,
            "images": batch * rounds,
            "contenders": [contender_figures(one, lines, batch, copy_gbps, rows) for one in field],
            "results": racing.results(field, lines),
            "identity": list(identities(field, lines, batch)),
            "rounding": list(rounding(field, lines, jobs)) if options.rounding and not stop else [],
            "phases": [] if stop else list(racing.phases(racing.best_of_labels(field, lines), jobs[0])),
        }
        races.append(of_race)
        if stop is not None:
            break
    figures = {
        "what": "model",
        **about(model),
        "method_specs": specs,
        "sampling": asdict(sampling),
        "seed": options.seed,
        "prompts": sha256_of_lines(options.prompts),
        "copy_gbps": rounded(copy_gbps),
        "races": races,
        "failed": failed,
        "left_out": slow,
        "failures": broken_promises(races),
    }
    return ended(figures, before, stop)


def ended(figures: dict[str, Any], before: list[float], stop: BaseException | None) -> dict[str, Any]:
    """Return figures with the load before and after; after a signal raise CutShort with them."""
    stopped = None if stop is None else str(stop) or "interrupted"
    figures |= {"stopped": stopped, "load_average": {"begin": before, "end": load_average()}}
    if stop is not None:
        raise racing.CutShort(figures) from stop
    return figures


def field_of(
    stable: contenders.Stable, specs: Sequence[str], options: BenchOptions, build: Build, jobs: Sequence[RoundImages]
) -> tuple[list[Contender], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return plain decoding and the methods in their variants, warmed up, then those that fail and the slow variants.

    Kinds that nobody asked for are ranked by short plain decodings, and slow variants of them are left out: a pass
    takes more than STEADY times that of the fastest, and they are not among the two fastest. The fastest plain decoding
    is therefore always measured in full. RuntimeError if none runs.
    """
    report, kinds = reporter(options.is_quiet), options.kinds or contenders.kinds_of(stable.device)
    plain = contenders.entries_of([PLAIN], {*kinds, *options.baselines}, options.dtypes)
    failed, spent = list[dict[str, Any]](), dict[Variant, float]()
    if any(variant.kind not in options.kinds for _, variant in plain):
        report("ranking the variants of plain decoding")

        def rank(contender: Contender) -> None:
            spent[contender.variant] = min(racing.pass_seconds(contender, jobs[0]) for _ in range(RANKING_RUNS))

        ranked = contenders.line_up(stable, plain, build, rank, failed, report=report)
        plain = [(one.label, one.variant) for one in ranked]
    ordered = sorted(spent, key=spent.__getitem__)
    slow = [one for one in ordered[2:] if one.kind not in options.kinds and spent[one] > STEADY * spent[ordered[0]]]
    entries = [*plain, *contenders.entries_of(specs, kinds, options.dtypes)]
    entries = [(label, variant) for label, variant in entries if variant not in slow]
    field = contenders.line_up(stable, entries, build, lambda one: racing.warm(one, jobs), failed, report=report)
    return field, failed, [{"variant": str(one), "pass_ms": rounded(1e3 * spent[one])} for one in slow]


def own_methods(model: Model) -> list[str]:
    """Return "auto" and the model's own method, as far as they draft; ValueError if neither does."""
    specs = dict.fromkeys(("auto", str(model.generation.get("method", "auto"))))
    drafting = [spec for spec in specs if not choose_method(model, spec).is_plain]
    if not drafting:
        raise ValueError(f"the methods of model {model.name} are plain decoding on this machine: give --methods")
    return drafting


def contender_figures(one: Contender, lines: Sequence[Line], batch: int, copy_gbps: float, rows: int) -> dict[str, Any]:
    """Return the figures of a contender for JSON, changes per token; `rows` are the rows of a step for each node."""
    of_rounds, images = racing.rounds_of(lines, one.name), racing.images_of(lines, one.name)
    seconds, tokens = racing.seconds_of(lines, one.name), one.parts.target.config.block_size
    # a batch takes as many steps as its images take on average
    steps = median(fmean(image["steps"] for image in line["images"]) for line in of_rounds.values())
    moved = fmean(image["total_variation"] for image in images) / tokens
    bound = roofline(one, rows=rows, copy_gbps=copy_gbps, step_seconds=median(seconds) / max(steps, 1.0))
    return {
        **one.described,
        "exact": one.parts.method.exact,
        "seconds": spread(seconds),
        "images_per_second": rounded(batch / median(seconds)),
        "tokens_per_step": rounded(tokens / fmean(image["steps"] for image in images)),
        "total_variation": None if math.isnan(moved) else rounded(moved),  # None: not measured
        "relaxed_share": rounded(fmean(image["relaxed"] for image in images) / tokens),
        **bound,
    }


def identities(field: Sequence[Contender], lines: Sequence[Line], batch: int) -> Iterator[dict[str, Any]]:
    """Yield for each exact method how many tokens differ from plain decoding in the same variant.

    It must be none in fp32 with a cache in full, and where the engine keeps tokens (`Decoder.promise`); elsewhere
    rounding can change some.
    """
    plain = {one.variant: one.name for one in field if one.is_plain}
    for one in field:
        if one.parts.method.is_identical and one.variant in plain:
            yield {
                "method": one.label,
                "variant": str(one.variant),
                "images": len(racing.images_of(lines, one.name)),
                **racing.identity(lines, one.name, plain[one.variant]),
                "must_be_identical": one.variant.is_fp32 or one.parts.promise(batch) == "tokens",
            }


@torch.no_grad()
def rounding(
    field: Sequence[Contender], lines: Sequence[Line], jobs: Sequence[RoundImages]
) -> Iterator[dict[str, Any]]:
    """Yield how far each variant moves the distributions of tokens from those of the first, for JSON.

    Each reads the images of the first variant's plain decoding. Figures are means over the tokens of an image: the
    total variation, with a 95 % interval over images, and how often the most likely token is the same.
    """
    first, *others = (one for one in field if one.is_plain)
    found: dict[str, list[tuple[float, float]]] = {str(one.variant): [] for one in others}
    for number, line in racing.rounds_of(lines, first.name).items():
        tokens = racing.unpack([image["tokens"] for image in line["images"]]).to(first.device)
        right = first.log_probs(jobs[number], tokens)
        for one in others:
            log_p = one.log_probs(jobs[number], tokens)
            variation = (log_p.exp() - right.exp()).abs().sum(-1).mean(1) / 2
            is_same = (log_p.argmax(-1) == right.argmax(-1)).double().mean(1)
            found[str(one.variant)] += zip(variation.tolist(), is_same.tolist(), strict=True)
    for name, pairs in found.items():
        moved, same = torch.tensor(pairs, dtype=torch.float64).unbind(1)
        mean = mean_estimate(moved, seed=0)
        ends = {"interval_95": [rounded(mean.low), rounded(mean.high)], "same_best": rounded(float(same.mean()))}
        yield {"variant": name, "from": str(first.variant), "total_variation": rounded(mean.value), **ends}


def broken_promises(races: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line for each exact method whose tokens differ from plain decoding's where they must not."""
    return [
        f"{one['method']} ({one['variant']}, batch {race['batch']}) differs from plain decoding in "
        f"{one['differing_images']} of {one['images']} images"
        for race in races
        for one in race["identity"]
        if one["must_be_identical"] and one["differing_tokens"]
    ]


def render(figures: Mapping[str, Any]) -> str:
    """Return the figures of a model or a size as a table."""
    lines = [*_heading(figures), *(_races(figures) if figures["what"] == "model" else _size(figures))]
    lines += [f"not measured: {one['method']} {one['variant']}: {one['reason']}" for one in figures["failed"]]
    slow = figures.get("left_out", ())
    lines += [f"left out: {one['variant']}, {one['pass_ms']:g} ms a pass of plain decoding" for one in slow]
    if figures.get("stopped"):
        lines.append(f"{figures['stopped']}: figures are of the rounds before")
    return "\n".join(map(str.rstrip, lines))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns: the first two to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "".join(f"  {{:{'<' if place < 2 else '>'}{width}}}" for place, width in enumerate(widths))
    return [form.format(*row) for row in rows]


def _heading(figures: Mapping[str, Any]) -> Iterator[str]:
    where, load = figures["surroundings"], figures["load_average"]
    what = f"model {figures['model']}" if figures["what"] == "model" else f"LlamaGen-{figures['shape']}, random weights"
    in_wheel = where["commit"] == where["lantern"]
    commit = "" if in_wheel else f", commit {short_commit(where['commit'])}"
    yield f"{what}; lantern {where['lantern']}{commit}"
    yield f"torch {where['torch']}, torchao {where['torchao'] or 'none'}, python {where['python']}"
    yield f"{where['gpu'] or where['cpu']}, {where['threads']} threads of {where['cores']} cores"
    begin, end = ("/".join(f"{value:.2f}" for value in load[when]) for when in ("begin", "end"))
    yield f"load average {begin} before, {end} after; copy bandwidth {figures['copy_gbps']:.1f} GB/s"


def _races(figures: Mapping[str, Any]) -> Iterator[str]:
    header = ("method", "run as", "s median", "p10", "p90", "images/s", "tau", *SHARES, "TV per token")
    for of_batch in figures["races"]:
        size = f"{of_batch['rounds']} rounds, {of_batch['images']} images each"
        yield from ("", f"batch {of_batch['batch']}: {size}, interleaved")
        rows: list[tuple[str, ...]] = [header]
        for one in of_batch["contenders"]:
            rates = [f"{one[name]:.2f}" for name in ("images_per_second", "tokens_per_step")]
            bound = [f"{one[name]:.0%}" if name in one else "-" for name in SHARES]
            moved = "exact" if one["exact"] else "-" if (cost := one["total_variation"]) is None else f"{cost:.3f}"
            rows.append((*_timed(one, "seconds", ".3f"), *rates, *bound, moved))
        yield from (*aligned(rows), *_claims(of_batch))
        for one in of_batch["identity"]:
            differing = one["differing_images"]
            what, of = ("tokens differ", f"{differing} of ") if differing else ("no token differs", "")
            yield f"  {one['method']} as {one['variant']}: {what} from plain decoding in {of}{one['images']} images"
        for one in of_batch["rounding"]:
            low, high = one["interval_95"]
            moved = f"total variation {one['total_variation']:.4f} ({low:.4f} to {high:.4f}) a token from {one['from']}"
            yield f"  {one['variant']}: {moved}, the same best token in {one['same_best']:.1%}"
        yield from _phases(of_batch)


def _size(figures: Mapping[str, Any]) -> Iterator[str]:
    tree = figures["tree"]
    shape = f"tree {tree['name']} ({tree['nodes']} nodes, depth {tree['depth']})"
    yield from ("", f"scripted acceptance, {shape}, {figures['drafter']}, batch {figures['batch']}")
    rows: list[tuple[str, ...]] = [("method", "run as", "ms per token", "p10", "p90", "tokens/s", *SHARES)]
    for one in figures["contenders"]:
        shares = (f"{one[name]:.0%}" if name in one else "-" for name in SHARES)
        rows.append((*_timed(one, "ms_per_token", ".2f"), f"{one['tokens_per_second']:.1f}", *shares))
    yield from (*aligned(rows), *_claims(figures), *_phases(figures))


def _phases(race: Mapping[str, Any]) -> Iterator[str]:
    if race.get("phases"):
        yield "  time of a step by phase, in runs of their own:"
    for one in race.get("phases", ()):
        parts = ", ".join(f"{name} {share:.0%}" for name, share in one["shares"].items())
        yield f"    {one['method']} as {one['variant']}: {parts}"


def _timed(one: Mapping[str, Any], name: str, form: str) -> list[str]:
    """Return the first cells of a contender's row: how it runs, and the spread of its times."""
    times = [format(one[name][end], form) for end in ("median", "p10", "p90")]
    return [one["method"], f"{one['variant']} {one['dtype']}", *times]


def _claims(race: Mapping[str, Any]) -> Iterator[str]:
    """Yield which plain decoding methods are compared with, and each method's speedup over it."""
    plain = sum(one["method"] == PLAIN for one in race["contenders"])
    name = race["results"][0]["baseline"] if race["results"] else "none"
    yield f"  baseline: plain as {name}, the fastest of the {plain} variants of plain decoding above"
    yield from LEGEND
    for one in race["results"]:
        low, high = one["interval_95"]
        ratio = f"{one['median_of_ratios']:.2f}x ({low:.2f} to {high:.2f}), of medians {one['ratio_of_medians']:.2f}"
        sides = f"{one['method']} as {one['variant']} over plain as {one['baseline']}"
        yield f"  {sides}: {ratio if one['claim'] is not None else one['refusal']}"
