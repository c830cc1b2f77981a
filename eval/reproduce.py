"""A whole row of figures by a protocol: pictures, then metrics, and `row.json`, from which it can be repeated.

OUT/pictures/, OUT/manifest-*.jsonl     `lantern.eval.generation`
OUT/row.json                            protocol, choices, fingerprint, machine, digests and figures
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lantern.catalog import Engine, Method
from lantern.config import read_json_object
from lantern.eval.contenders import method_of
from lantern.eval.fingerprint import fingerprint_of
from lantern.eval.generation import Shard, finished, produce
from lantern.eval.manifest import Entry
from lantern.eval.measuring import check_metrics, measured
from lantern.eval.protocol import Protocol, find_prompts, load_protocol, parse_protocol
from lantern.eval.ray_job import Recipe, produce_on_ray
from lantern.eval.row import Row, Task
from lantern.eval.surroundings import surroundings
from lantern.generate import choose_method
from lantern.io import EMBEDDED_MODEL, write_json
from lantern.model_folder import DTYPES, load_model, pick_device, pick_dtype
from lantern.requests import check_requests
from lantern.statistics import totals

ROW_NAME = "row.json"
# what a row says of how it was asked for, and takes again when it is repeated
CHOICES = ("model", "method", "limit", "batch", "device", "dtype", "threads", "engine", "metrics")


def prepare(row: Row) -> Task:
    """Looks up and checks all that a row needs before anything is made; ValueError says what cannot be."""
    protocol, before = _protocol(row.protocol)
    row = _repeated(row, before) if before else row
    name = row.model or EMBEDDED_MODEL
    check_metrics(protocol.metrics if row.metrics is None else row.metrics)
    prompts = find_prompts(protocol.prompts, row.prompts) if protocol.prompts else None
    asked = protocol.requests(prompts)
    asked = asked[: row.limit] if row.limit else asked
    device = pick_device(_own_device(row))
    dtype = pick_dtype(row.dtype, device)
    if row.threads is not None:
        torch.set_num_threads(row.threads)
    # the actors of a Ray job load a model each; ours then only says what it is
    model = load_model(name, device="cpu" if row.ray is not None else device, dtype=dtype, engine=row.engine)
    protocol.check_model(model)
    check_requests(model, asked)
    sampling = protocol.sampling(model)
    method = method_of(model, row.method) if row.method else choose_method(model, sampling=sampling)
    recipe = Recipe(
        model=name,
        device=str(device),
        dtype=next(name for name, kind in DTYPES.items() if kind == dtype),
        method=method,
        sampling=sampling,
        engine=row.engine,
        folder=row.out,
        fingerprint=fingerprint_of(model, method, protocol, batch=row.batch, device=device, dtype=dtype),
        threads=torch.get_num_threads(),
    )
    return Task(row, protocol, asked, recipe, before)


def make(task: Task, *, shield: Callable[[], AbstractContextManager[Any]] = nullcontext, callback: Any = None) -> int:
    """Makes the pictures that are lacking, here or on Ray; returns how many were made."""
    row = task.row
    if row.ray is not None:
        return produce_on_ray(
            task.recipe,
            task.asked,
            batch=row.batch,
            actors=row.actors,
            address=row.ray or os.environ.get("RAY_ADDRESS"),
            is_quiet=row.is_quiet,
        )
    shard = row.shard or Shard()
    with task.recipe.worker(shard.name, shield=shield, callback=callback) as worker:
        return produce(worker, task.asked, batch=row.batch, shard=shard, is_quiet=row.is_quiet)


def complete(task: Task) -> dict[int, Entry] | None:
    """The pictures of the set by number, or None while other shards lack some."""
    done = finished(task.folder, task.recipe.fingerprint)
    wanted = {request.number: done[request.number] for request in task.asked if request.number in done}
    return wanted if len(wanted) == len(task.asked) else None


def conclude(task: Task, entries: Mapping[int, Entry]) -> dict[str, Any]:
    """Measures the pictures, writes row.json, returns its content."""
    figures, missing = measured(task)
    row = {
        "protocol": task.protocol.as_dict(),
        "choices": _choices(task),
        "fingerprint": task.recipe.fingerprint,
        "command": command_line(task),
        "pictures": len(entries),
        "pictures_of_protocol": task.protocol.pictures,
        "pictures_sha256": digest(entry.sha256 for _, entry in sorted(entries.items())),
        "tokens_sha256": digest(entry.tokens_sha256 for _, entry in sorted(entries.items())),
        "speed": speed_of(entries),
        "metrics": figures,
        "not_measured": missing,
        "surroundings": surroundings(torch.device(task.recipe.device)),
    }
    write_json(task.folder / ROW_NAME, row)
    return row


def digest(digests: Any) -> str:
    """One digest of many, in their order."""
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def speed_of(entries: Mapping[int, Entry]) -> dict[str, Any]:
    """Codes a pass, seconds a picture and, of relaxed methods, the price, over all pictures."""
    found = totals([entry.figures() for entry in entries.values()])
    seconds = sum(found["seconds"].values()) / len(entries)
    return found | {"seconds_per_picture": round(seconds, 4)}


def is_repeated(task: Task, row: Mapping[str, Any]) -> bool | None:
    """Whether the pictures are those of the row that was repeated, byte for byte; None if none was."""
    if task.before is None:
        return None
    return all(row[name] == task.before.get(name) for name in ("pictures", "pictures_sha256", "tokens_sha256"))


def command_line(task: Task) -> str:
    """The command that makes the row again, but for where things are on a machine."""
    chosen = _choices(task)
    words = ["lantern reproduce", task.protocol.name, "--method", f"'{chosen['method']}'"]
    for name in ("model", "limit", "batch", "device", "dtype", "threads"):
        if chosen[name] not in (None, 0, "") and (name, chosen[name]) not in (("batch", 1), ("model", EMBEDDED_MODEL)):
            words += [f"--{name}", str(chosen[name])]
    flags = {"compile": "--compile", "graphs": "--cuda-graphs", "fused": "--fused"}
    flags["reproducible"] = "--reproducible"
    return " ".join(words + [flag for name, flag in flags.items() if chosen["engine"][name]])


def spec_of(method: Method) -> str:
    """A method as it is written on the command line: name and what is changed of its settings."""
    changed = ",".join(f"{name}={value}" for name, value in method.changed().items())
    return f"{method.name}:{changed}" if changed else method.name


def _protocol(name: str) -> tuple[Protocol, Mapping[str, Any] | None]:
    """The protocol, and the row that is to be repeated if a row's file was named."""
    if not name.endswith(".json"):
        return load_protocol(name), None
    values = read_json_object(name)
    if "choices" not in values:
        return load_protocol(name), None
    if not isinstance(values["choices"], dict) or not isinstance(values.get("protocol"), dict):
        raise ValueError(f"{name} is no row of `lantern reproduce`: it lacks protocol or choices")
    return parse_protocol(values["protocol"], source=name), values


def _repeated(row: Row, before: Mapping[str, Any]) -> Row:
    """The row with the choices of an earlier one; what is said beside stays: where things are, who makes them."""
    choices = {name: before["choices"].get(name) for name in CHOICES}
    if not isinstance(choices["engine"], dict):
        raise ValueError(f'{row.protocol}: "engine" is missing from its choices: repeat a row that is whole')
    found = {name: value for name, value in choices.items() if value is not None}
    found |= {"engine": Engine(**choices["engine"]), "model": row.model or choices["model"]}
    return dataclasses.replace(row, **found)


def _choices(task: Task) -> dict[str, Any]:
    row, recipe = task.row, task.recipe
    return {
        "model": recipe.model if not Path(recipe.model).is_dir() else Path(recipe.model).name,
        "method": spec_of(recipe.method),
        "limit": row.limit,
        "batch": row.batch,
        "device": torch.device(recipe.device).type,
        "dtype": recipe.dtype,
        "threads": recipe.fingerprint["config"]["threads"],
        "engine": asdict(row.engine),
        "metrics": task.metrics,
    }


def _own_device(row: Row) -> str:
    """The device of a process: of several that one machine runs, each has its own GPU."""
    local = os.environ.get("LOCAL_RANK", "")
    if row.device in ("auto", "cuda") and local.isdecimal() and torch.cuda.is_available():
        return f"cuda:{local}"
    return row.device
