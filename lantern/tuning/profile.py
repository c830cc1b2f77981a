"""The profile that `lantern tune` writes and method "auto" reads: what was measured, and what it recommends.

It stands beside the model as `profile.json` or, where that folder cannot be written to, in the user's cache under the
model's fingerprint. A profile speaks for one machine, dtype, set of weights and kind of sampling only.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lantern.catalog import Method, find
from lantern.config import read_json_object
from lantern.io import user_cache, write_json
from lantern.model_folder import Model
from lantern.sampling import Sampling
from lantern.tuning.costs import Costs, costs_of
from lantern.tuning.machine import describe_machine

VERSION = 1
NAME = "profile.json"
KEYS = ("machine", "model", "sampling", "choice")


def cache_folder() -> Path:
    """Where profiles of models go whose own folder cannot be written to."""
    return user_cache() / "profiles"


def write_profile(profile: Mapping[str, Any], model: Model, out: Path | None = None) -> Path:
    """Write a profile to `out`, or where "auto" looks for it; keys are sorted. Returns the path."""
    content = json.loads(json.dumps(profile, sort_keys=True, allow_nan=False))
    if out is not None:
        write_json(out, content)
        return out
    assert model.folder is not None
    try:
        write_json(model.folder / NAME, content)
        return model.folder / NAME
    except OSError:
        path = cache_folder() / f"{model.fingerprint}.json"
        write_json(path, content)
        return path


def chosen_method(model: Model, sampling: Sampling, tell: Callable[[str], None]) -> Method | None:
    """The method that a profile of this model recommends here, or None; why a profile does not apply is told."""
    why = ""
    for path in _places(model):
        try:
            profile = read_profile(path)
            why = why or unfit(profile, model, sampling)
            if not why:
                return method_of(profile["choice"], source=path)
        except ValueError as error:
            why = why or str(error)
    if why:
        tell(f"the model's profile is not used: {why}; `lantern tune` makes one that fits")
    return None


def measured_costs(model: Model) -> Costs | None:
    """What steps take on this machine by a profile of these weights, whatever its sampling; None without one."""
    for path in _places(model):
        try:
            profile = read_profile(path)
            is_here = all(profile["machine"].get(name) == here for name, here in describe_machine(model).items())
            if is_here and profile["model"].get("fingerprint") == model.fingerprint:
                return costs_of(profile)
        except ValueError:  # a profile that cannot be read is told of where a method is chosen by it
            continue
    return None


def read_profile(path: Path) -> dict[str, Any]:
    """Read a profile; ValueError for a file that is none, or of another version."""
    profile = read_json_object(path)
    if profile.get("version") != VERSION:
        raise ValueError(f"{path} has version {str(profile.get('version'))[:20]}, wanted {VERSION}")
    for key in KEYS:
        if not isinstance(profile.get(key), dict):
            raise ValueError(f"{path} is no whole profile: {key!r} is missing")
    return profile


def method_of(choice: Mapping[str, Any], *, source: Path) -> Method:
    """The method of a profile's choice; ValueError for one that there is not, or settings that it does not take."""
    try:
        return find(str(choice.get("method"))).with_options(**dict(choice.get("settings") or {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source} recommends what cannot be: {error}") from error


def unfit(profile: Mapping[str, Any], model: Model, sampling: Sampling) -> str:
    """Why a profile does not speak for this machine, these weights and this sampling; "" if it does."""
    for name, here in describe_machine(model).items():
        if (there := profile["machine"].get(name)) != here:
            return f"it was measured with {name} {str(there)[:60]}, here it is {here}"
    measured = {name: profile["sampling"].get(name) for name in _SAMPLING if name in profile["sampling"]}
    try:
        far = too_far(Sampling(**measured), sampling, model.target.config.vocab_size)
    except (TypeError, ValueError) as error:
        return f"its sampling cannot be: {error}"
    if far:
        return far
    if profile["model"].get("fingerprint") != model.fingerprint:
        return "it was measured with other weights"
    return ""


def too_far(there: Sampling, here: Sampling, codes: int) -> str:
    """Why acceptance measured `there` says little of `here`; "" where it does.

    Guidance may differ by half, temperature and top-p by 0.2, the number of codes to choose from by a factor of 4.
    """
    kept = [min(one.top_k or codes, codes) for one in (there, here)]
    are_near = {
        "guidance": there.rows == here.rows and _ratio(there.guidance, here.guidance) <= 1.5 + 1e-9,
        "temperature": there.is_greedy == here.is_greedy and abs(there.temperature - here.temperature) <= 0.2 + 1e-9,
        "top_p": abs(there.top_p - here.top_p) <= 0.2 + 1e-9,
        "top_k": _ratio(*kept) <= 4,
        "guidance_interval": (there.guidance_interval < 0) == (here.guidance_interval < 0),
    }
    are_near["guidance"] |= there.rows == here.rows == 1
    for name, is_near in are_near.items():
        if not is_near:
            return f"it was measured at {name} {getattr(there, name):g}, this is {getattr(here, name):g}"
    return ""


_SAMPLING = tuple(entry.name for entry in dataclasses.fields(Sampling))


def _ratio(a: float, b: float) -> float:
    return max(a, b) / min(a, b) if min(a, b) > 0 else math.inf


def _places(model: Model) -> Iterator[Path]:
    """The profiles that there are, the one beside the model first; weights are only hashed where it may matter."""
    if model.folder is None:
        return
    if (model.folder / NAME).is_file():
        yield model.folder / NAME
    if cache_folder().is_dir() and any(cache_folder().glob("*.json")):
        path = cache_folder() / f"{model.fingerprint}.json"
        if path.is_file():
            yield path
