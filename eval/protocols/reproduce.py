"""`lantern reproduce`: a row of figures by a protocol: images, metrics, and a `row.json` that repeats it.

OUT/pictures/, OUT/manifest-*.jsonl     `lantern.eval.protocols.generation`
OUT/row.json                            protocol, choices, fingerprint, machine, digests and figures
"""

import dataclasses
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import lantern
from lantern.cli.command import check_folder
from lantern.cli.options import Choices
from lantern.core.config import EMBEDDED_MODEL, build_config, check_number, installed, read_json_object, resolve_model
from lantern.core.io import sha256_of, sha256_of_lines, write_json
from lantern.core.process import check_ray
from lantern.core.types import Callback
from lantern.engines.engine import AutoEngine, Engine
from lantern.engines.engine import engine as make_engine
from lantern.eval.metrics import quality
from lantern.eval.protocols.generation import Entry, Shard, Shield, finished, picture_path, produce
from lantern.eval.protocols.protocol import Protocol, find_prompts, load_protocol
from lantern.eval.protocols.ray_job import RayJob, produce_on_ray
from lantern.eval.speed.surroundings import file_hashes, surroundings
from lantern.generation.choice import choose_method
from lantern.generation.generator import Generator
from lantern.generation.images import totals
from lantern.generation.requests import Request, check_requests
from lantern.methods import Method, find
from lantern.methods.method import ADD_ONS, DRAFTER
from lantern.models.folder import Model, load_model, pick_device, pick_dtype

ROW_NAME = "row.json"
# settings that row.json records and a repeated row takes over
CHOICES = ("model", "method", "limit", "batch", "device", "dtype", "threads", "engine", "metrics")


class TableRow(Choices):
    """A requested row. `protocol` is a name, a protocol's .json file, or a `row.json` to repeat.

    A repeated row's choices take the place of defaults. `model` None means the embedded one. `method` is a spec as for
    `choose_method`; None means the model's own. `limit` takes only the first images of the set; 0 means all. `batch` 0
    means 1. `metrics` None means the protocol's; empty means none. `prompts`, `reference` and `weights` are paths.
    `ray` (an address, or "" to start Ray locally) and `actors` make it a Ray job.
    """

    _: KW_ONLY
    protocol: str
    out: Path
    device: str = "auto"
    dtype: str = "auto"
    engine: Engine = field(default_factory=AutoEngine)
    weights: Mapping[str, Path] = field(default_factory=dict)
    shard: Shard | None = None
    is_quiet: bool = False


@dataclass(frozen=True)
class ResolvedRow:
    """A row with everything resolved: protocol, metrics, requests, recipe, and the row to repeat, if any."""

    row: TableRow
    protocol: Protocol
    metrics: list[str]
    requested: list[Request]
    recipe: RayJob
    before: Mapping[str, Any] | None


def fingerprint_of(
    model: Model, method: Method, protocol: Protocol, *, engine: Engine, batch: int, device: torch.device
) -> dict[str, Any]:
    """Return everything that an image's bytes depend on besides its number: weights, config, versions."""
    names = [name for name in method.made.needs if name != DRAFTER]  # the model's fingerprint has the drafter
    parts = {name: (model.folder or Path()) / ADD_ONS[name].folder for name in names}
    known = {name: file_hashes(path) if model.folder and path.is_dir() else None for name, path in parts.items()}
    return {
        "weights": {"model": model.fingerprint} | known,
        "config": {
            "model": model.name,
            "drawn": protocol.sampled,
            "method": method.as_dict(),
            "sampling": asdict(protocol.sampling(model)),
            "engine": engine.as_dict(),
            "device": device.type,
            "dtype": str(model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads() if device.type == "cpu" else None,
            "batch": batch,
        },
        "versions": {"lantern": lantern.__version__, "torch": torch.__version__}
        | {name: installed(name) for name in ("transformers", "pillow")},
    }


def measured(task: ResolvedRow) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the figures for JSON, and the reason for each metric that cannot be computed."""
    missing = obstacles(task)
    can = [name for name in task.metrics if name not in missing]
    if not can:
        return {}, missing
    row, protocol = task.row, task.protocol
    options = quality.Options(
        reference_name=protocol.reference.name if protocol.reference else "",
        prompts_name=protocol.prompts.file if protocol.prompts else "",
        **protocol.resized,
        device=torch.device(task.recipe.device),
        is_quiet=row.is_quiet,
    )
    paths = [picture_path(row.out, request.number) for request in task.requested]
    prompts = [request.prompt for request in task.requested if request.prompt is not None] or None
    how: dict[str, Any] = {"prompts": prompts, "weights": row.weights, "seed": protocol.seed, "options": options}
    figures = {name: one.as_dict() for name, one in quality.measure(paths, row.reference, can, **how).items()}
    wanted = protocol.reference.images if protocol.reference else 0
    for figure in figures.values():
        if wanted and (count := figure["reference_images"]) not in (None, 0, wanted):
            figure["warning"] += f"{'; ' * bool(figure['warning'])}{count} reference images, the protocol has {wanted}"
    return figures, missing


def obstacles(task: ResolvedRow) -> dict[str, str]:
    """Return the reason for each metric that cannot be computed; checked before generation starts."""
    known, row = task.protocol.reference, task.row
    origin = f": {known.name} ({known.origin})" if known else ""
    return {m: why for m in task.metrics if (why := quality.obstacle(m, row.reference, row.weights, origin))}


def prepare(row: TableRow) -> ResolvedRow:
    """Resolve and check all that a row needs first.

    ValueError for what does not fit, ImportError without Ray, OSError if its folder cannot be written.
    """
    check_folder(row.out)
    if row.ray is not None:
        check_ray()
    protocol, before = _protocol(row.protocol)
    row = _repeated(row, before) if before else row
    row = dataclasses.replace(row, batch=row.batch or 1)
    name = row.model or EMBEDDED_MODEL
    metrics = list(protocol.metrics if row.metrics is None else row.metrics)
    prompts = find_prompts(protocol.prompts, row.prompts) if protocol.prompts else None
    requested = protocol.requests(prompts)[: row.limit or None]
    if (made := row.out / ROW_NAME).is_file() and read_json_object(made).get("pictures", 0) > len(requested):
        raise ValueError(f"{made} is a row of more than {len(requested)} images: give another --out, or delete it")
    if metrics:
        quality.in_order(metrics)  # rejects unknown ones
        lacking = [name for name in metrics if quality.PROMPTS in quality.METRICS[name].needs]
        if lacking and not protocol.prompts:
            raise ValueError(f"{lacking[0]} needs prompts, which {protocol.name} has not: leave it out of --metrics")
        known, given = protocol.reference, row.reference
        if given and known and known.sha256 and (given.is_dir() or sha256_of(given) != known.sha256):
            wanted = f"wanted sha256 {known.sha256[:12]}... of {protocol.name}"
            raise ValueError(f"{given} is another reference, {wanted}: get {known.name} from {known.origin}")
        quality.check_reference(metrics, [picture_path(row.out, one.number) for one in requested], row.reference)
    local = os.environ.get("LOCAL_RANK", "")  # with it each process has its own GPU
    is_local = row.device in ("auto", "cuda") and local.isdecimal() and torch.cuda.is_available()
    device = pick_device(f"cuda:{local}" if is_local else row.device)
    dtype = pick_dtype(row.dtype, device, resolve_model(name), row.engine)
    torch.set_num_threads(row.threads or torch.get_num_threads())
    # each actor of a Ray job loads its own model; this one is only for checks and the fingerprint
    model = load_model(name, device="cpu" if row.ray is not None else device, dtype=dtype, engine=row.engine)
    protocol.check_model(model)
    check_requests(model, requested)
    sampling = protocol.sampling(model)
    method = choose_method(model, row.method, sampling=sampling)
    # `auto` chooses an engine for this method; the actors of a Ray job let it choose on their own devices
    chosen = row.engine if row.ray is not None else Generator(model, method, sampling).parts.engine
    chosen = dataclasses.replace(chosen, reason="")
    recipe = RayJob(
        model=name,
        device=str(device),
        dtype=model.dtype_name,
        method=method,
        sampling=sampling,
        engine=chosen,
        folder=row.out,
        fingerprint=fingerprint_of(model, method, protocol, engine=chosen, batch=row.batch, device=device),
        threads=torch.get_num_threads(),
    )
    return ResolvedRow(row, protocol, metrics, requested, recipe, before)


def make(task: ResolvedRow, *, shield: Shield = nullcontext, callback: Callback | None = None) -> int:
    """Write the missing images, in this process or on Ray; return their number."""
    row, how = task.row, {"batch": task.row.batch, "is_quiet": task.row.is_quiet}
    if row.ray is not None:
        address = row.ray or os.environ.get("RAY_ADDRESS")
        return produce_on_ray(task.recipe, task.requested, actors=row.actors, address=address, **how)
    shard = row.shard or Shard()
    with task.recipe.worker(shard.name, shield=shield, callback=callback) as worker:
        return produce(worker, task.requested, shard=shard, **how)


def complete(task: ResolvedRow) -> dict[int, Entry] | None:
    """Return the entries of all images by number, or None if some are missing."""
    done, numbers = finished(task.row.out, task.recipe.fingerprint), [request.number for request in task.requested]
    return {number: done[number] for number in numbers} if done.keys() >= set(numbers) else None


def conclude(task: ResolvedRow, entries: Mapping[int, Entry]) -> dict[str, Any]:
    """Compute the metrics, write row.json, return its content; `speed` is over all images."""
    figures, missing = measured(task)
    ordered, row, recipe = [entries[number] for number in sorted(entries)], task.row, task.recipe
    speed = totals([entry.figures() for entry in ordered])
    changed = ",".join(f"{name}={value}" for name, value in recipe.method.changed().items())
    choices = {
        "model": recipe.model if not Path(recipe.model).is_dir() else Path(recipe.model).name,
        "method": f"{recipe.method.name}:{changed}".rstrip(":"),
        "limit": row.limit,
        "batch": row.batch,
        "device": torch.device(recipe.device).type,
        "dtype": recipe.dtype,
        "threads": recipe.fingerprint["config"]["threads"],
        "engine": recipe.engine.as_dict(),
        "metrics": task.metrics,
    }
    found = {
        "protocol": asdict(task.protocol),
        "choices": choices,
        "fingerprint": recipe.fingerprint,
        "pictures": len(entries),
        "pictures_of_protocol": task.protocol.pictures,
        "pictures_sha256": sha256_of_lines(entry.sha256 for entry in ordered),
        "tokens_sha256": sha256_of_lines(entry.tokens_sha256 for entry in ordered),
        "speed": speed | {"seconds_per_picture": round(sum(speed["seconds"].values()) / len(entries), 4)},
        "metrics": figures,
        "not_measured": missing,
        "surroundings": surroundings(torch.device(recipe.device)),
    }
    for temporary in (task.row.out / "pictures").rglob(".*.png"):  # what kills left
        temporary.unlink()
    write_json(task.row.out / ROW_NAME, found)
    return found


def is_repeated(task: ResolvedRow, row: Mapping[str, Any]) -> bool | None:
    """Return whether the images equal those of the repeated row byte for byte; None without a repeated row."""
    names = ("pictures", "pictures_sha256", "tokens_sha256")
    return None if task.before is None else all(row[name] == task.before.get(name) for name in names)


def _protocol(name: str) -> tuple[Protocol, Mapping[str, Any] | None]:
    """Return the protocol, and the row to repeat if `name` is a row.json."""
    values = read_json_object(name) if name.endswith(".json") else {}
    if "choices" not in values:
        return load_protocol(name), None
    if not isinstance(values["choices"], dict) or not isinstance(values.get("protocol"), dict):
        raise ValueError(f"{name} is not a row of `lantern reproduce`: protocol or choices are missing")
    return build_config(Protocol, values["protocol"], source=name), values


def _repeated(row: TableRow, before: Mapping[str, Any]) -> TableRow:
    """Return the row with the choices of an earlier one; model, metrics, paths and shards stay as given.

    ValueError for other choices than those of the earlier row, and for a model that is not found.
    """
    choices = {name: before["choices"].get(name) for name in CHOICES}
    if not isinstance(choices["engine"], dict):
        raise ValueError(f'{row.protocol}: "engine" is missing from its choices: give a complete row.json')
    for name, least in (("limit", 0), ("batch", 1), ("threads", 1)):
        if choices[name] is not None:
            check_number(f"{row.protocol}: {name}", choices[name], least, kind=int)
    try:
        engine = make_engine(**choices["engine"])
    except TypeError as error:
        raise ValueError(f"{row.protocol}: engine has settings that there are not: {error}") from error
    both = {name: (getattr(row, name), choices[name]) for name in ("limit", "batch", "dtype", "threads")} | {
        "method": [spec and find(spec).spec for spec in (row.method, choices["method"])],
        "device": (row.device.partition(":")[0], choices["device"]),
        "engine": (row.engine.name, engine.name),
        "target-weights": (row.engine.weights, engine.weights),
        "kv-cache": (row.engine.kv_cache, engine.kv_cache),
    }
    others = [
        f"--{name} {given} (the row has {own})"
        for name, (given, own) in both.items()
        if own is not None and given not in (None, 0, "auto", "full", own)
    ]
    if others:
        why = "is repeated with its own choices: leave these out, or give its protocol to make another row"
        raise ValueError(f"got {', '.join(others)}, but {row.protocol} {why}")
    if row.model is None and choices["model"] is not None:
        try:
            resolve_model(choices["model"])
        except ValueError as error:
            raise ValueError(f"{row.protocol} names only its model's folder: {error}; give --model") from error
    found = {name: value for name, value in choices.items() if value is not None} | {"engine": engine}
    kept = {"model": row.model, "metrics": row.metrics, "device": None if row.device == "auto" else row.device}
    return dataclasses.replace(row, **found | {name: value for name, value in kept.items() if value is not None})
