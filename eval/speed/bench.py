"""`lantern bench` (or `python -m lantern.eval.speed.bench`): speedup over the fastest plain decoding.

All contenders make the same images in one process, in interleaved rounds. Decoding is timed from the text encoder's
features to codes, prefill included. Text encoding and VQ decoding cost every method the same and are reported apart.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from lantern.core.sampling import Sampling
from lantern.decoding.loop import now
from lantern.eval.speed.contenders import (
    PLAIN,
    PROMPTS,
    Job,
    Stable,
    Variant,
    condition_of,
    kinds_of,
    line_up,
    method_of,
    variants,
)
from lantern.eval.speed.memory import peak_of
from lantern.eval.speed.pass_curve import PassCurve, most
from lantern.eval.speed.phases import copy_bandwidth, describe, layer_seconds, roofline, time_phases
from lantern.eval.speed.race import Entry, fastest, identity, results, rounded, run_race
from lantern.eval.speed.surroundings import about, load_average
from lantern.models.folder import Model, load_model

MIN_ROUNDS = 3


@dataclass(frozen=True)
class BenchOptions:
    """Options of a bench. `methods` are specs as for `contenders.method_of`; empty means the model's own and "auto".

    Empty `kinds` means all kinds of the device. Plain decoding, which is always measured, also runs in the kinds
    `baselines`. Variants of kinds not in `kinds` are left out if short decodings show that they are slow
    (`race.leave_out_slow`). Passes over `nodes` nodes are timed in the fastest variants.
    """

    model: str = "lantern-emoji"
    methods: Sequence[str] = ()
    images: int = 10
    batches: Sequence[int] = (1,)
    dtypes: Sequence[str] = ("fp32", "bf16")
    kinds: Sequence[str] = ()
    baselines: Sequence[str] = ()
    nodes: Sequence[int] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    prompts: Sequence[str] = PROMPTS
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    device: str = "auto"
    reproducible: bool = False
    has_memory: bool = True
    is_quiet: bool = False


def measure(options: BenchOptions) -> dict[str, Any]:
    """Return all figures of a model for JSON; `failures` lists broken promises, empty in a good run."""
    before = load_average()
    model = load_model(options.model, device=options.device, dtype="fp32", engine="eager")
    sampling = model.sampling(**options.sampling)
    specs = [spec for spec in options.methods if spec != PLAIN] or own_methods(model)
    for spec in specs:
        method_of(model, spec)
    stable = Stable(model, reproducible=options.reproducible)
    copy_gbps = copy_bandwidth(model.device)
    races, phases, curves, failed, slow = [], [], [], [], []
    for batch in options.batches:
        chosen = variants(options.kinds or kinds_of(model.device), options.dtypes, options.baselines)
        lineup = line_up(stable, specs, chosen, sampling, batch)
        jobs = jobs_of(model, options, batch)
        entries = run_race(lineup, jobs, device=model.device, is_quiet=options.is_quiet, asked=options.kinds)
        found = phase_figures(entries, jobs[0], batch, copy_gbps, sampling)
        rows = batch * sampling.rows
        races.append(race_figures(entries, batch, copy_gbps, rows) | {"bounds": bounds(entries, found)})
        phases += found
        if not curves:
            curve = PassCurve(stable, sampling, jobs[0])
            curves = [curve.measure(one, options.nodes, copy_gbps=copy_gbps) for one in quickest(entries)]
        failed += [failure | {"batch": batch} for failure in lineup.failed]
        slow += [one | {"batch": batch} for one in lineup.slow]
    return {
        "what": "model",
        **about(model),
        "method_specs": specs,
        "sampling": {name: getattr(sampling, name) for name in ("guidance", "temperature", "top_k", "top_p")},
        "seed": options.seed,
        "reproducible": options.reproducible,
        "copy_gbps": rounded(copy_gbps),
        "races": races,
        "phases": phases,
        "verify": curves,
        "memory": memory_figures(options, specs, races[0], model) if options.has_memory else [],
        "beside": seconds_beside(model, options),
        "failed": failed,
        "left_out": slow,
        "failures": broken_promises(races),
        "load_average": {"begin": before, "end": load_average()},
    }


def own_methods(model: Model) -> list[str]:
    """Return "auto" and the model's own method, as far as they draft; ValueError if neither does."""
    specs = dict.fromkeys(("auto", str(model.generation.get("method", "auto"))))
    drafting = [spec for spec in specs if not method_of(model, spec).is_plain]
    if not drafting:
        raise ValueError(f"the methods of model {model.name} are plain decoding on this machine: give --methods")
    return drafting


def jobs_of(model: Model, options: BenchOptions, batch: int) -> list[Job]:
    """Return the jobs of all rounds, with different images: at least `images` of them in at least three rounds."""
    rounds = max(math.ceil(options.images / batch), min(MIN_ROUNDS, options.images))
    numbers = [range(first * batch, (first + 1) * batch) for first in range(rounds)]
    return [
        Job(condition_of(model, options.prompts, of_round), [(options.seed, number) for number in of_round])
        for of_round in numbers
    ]


def race_figures(entries: Sequence[Entry], batch: int, copy_gbps: float, rows: int) -> dict[str, Any]:
    """Return one race for JSON; `rows` are the rows of a pass for each node."""
    return {
        "batch": batch,
        "rounds": len(entries[0].seconds),
        "images": batch * len(entries[0].seconds),
        "contenders": [entry.as_dict(batch) | roofline_of(entry, copy_gbps, rows) for entry in entries],
        "results": results(entries, batch),
        "identity": identity(entries),
    }


def roofline_of(entry: Entry, copy_gbps: float, rows: int) -> dict[str, float]:
    """Return `phases.roofline` of an entry; a batch takes as many steps as its images take on average."""
    spent = entry.spread.median / max(median(made.steps for made in entry.made), 1.0)
    return roofline(entry.contender, rows=rows, copy_gbps=copy_gbps, step_seconds=spent)


def phase_figures(
    entries: Sequence[Entry], job: Job, batch: int, copy_gbps: float, sampling: Sampling
) -> list[dict[str, Any]]:
    """Return the time by phase of every method in its fastest variant, measured in a separate run."""
    found = []
    layers: dict[object, float | None] = {}
    for label, entry in best_entries(entries).items():
        best = entry.contender
        timed = time_phases(best, job)
        plain = [entry.contender for entry in entries if entry.contender.is_plain]
        same = [one for one in plain if one.variant == best.variant]
        if same and best.variant not in layers:
            layers[best.variant] = layer_seconds(timed if best.is_plain else time_phases(same[0], job))
        rows = batch * sampling.rows
        figures = describe(timed, layer=layers.get(best.variant), copy_gbps=copy_gbps, rows=rows)
        found.append({"method": label, "variant": str(best.variant), "batch": batch} | figures)
    return found


def bounds(entries: Sequence[Entry], phases: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return each method's upper bound on speedup (`pass_curve.most`)."""
    at, best = {one["method"]: one for one in phases}, best_entries(entries)
    taus = {label: entry.as_dict(1)["step_compression"] for label, entry in best.items() if label != PLAIN}
    return {label: most(at[label], at[PLAIN], tau) for label, tau in taus.items()}


def best_entries(entries: Sequence[Entry]) -> dict[str, Entry]:
    """Return the entry of the fastest variant of each label."""
    labels = dict.fromkeys(entry.contender.label for entry in entries)
    return {label: fastest([entry for entry in entries if entry.contender.label == label]) for label in labels}


def quickest(entries: Sequence[Entry]) -> list[Variant]:
    """Return the variants in which a contender is fastest and passes can be timed."""
    found = dict.fromkeys(entry.contender.variant for entry in best_entries(entries).values())
    return [variant for variant in found if not variant.is_graphed]


def memory_figures(
    options: BenchOptions, specs: Sequence[str], race: Mapping[str, Any], model: Model
) -> list[dict[str, Any]]:
    """Return peak memory of plain decoding and each method, eager, in its fastest dtype, and the ratio to plain."""
    dtype = {result["method"]: result["variant"].split()[-1] for result in race["results"]}
    found = []
    for spec in (PLAIN, *(spec for spec in specs if spec in dtype)):
        for kind in dict.fromkeys([dtype[spec]] if spec != PLAIN else dtype.values()):
            requested = {
                "model": options.model,
                "method": spec,
                "dtype": kind,
                "device": str(model.device),
                "threads": torch.get_num_threads(),
                "sampling": dict(options.sampling),
            }
            found.append({"method": spec, "dtype": kind} | peak_of(requested))
    plain = {figure["dtype"]: figure["peak"] for figure in found if figure["method"] == PLAIN}
    return [figure | {"ratio": rounded(figure["peak"] / plain[figure["dtype"]])} for figure in found]


def seconds_beside(model: Model, options: BenchOptions) -> dict[str, float]:
    """Return the seconds that are the same for every method: text encoding and VQ decoding of one image."""
    found = {}
    work: dict[str, Callable[[], object]] = {}
    if model.takes_prompts:
        work["text"] = lambda: condition_of(model, options.prompts, [0])
    if model.vq is not None:
        codes = torch.zeros(1, model.target.config.block_size, dtype=torch.long, device=model.device)
        work["vq"] = lambda: model.pictures(codes)
    with torch.inference_mode():
        for name, run in work.items():
            run()
            begin = now(model.device)
            run()
            found[name] = rounded(now(model.device) - begin)
    return found


def broken_promises(races: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line for each exact method whose codes differ from plain decoding's where they must not."""
    return [
        f"{one['method']} ({one['variant']}, batch {race['batch']}) differs from plain decoding in "
        f"{one['differing_images']} of {one['images']} images"
        for race in races
        for one in race["identity"]
        if one["must_be_identical"] and one["differing_codes"]
    ]


if __name__ == "__main__":
    from lantern.cli.bench import main

    sys.exit(main())
