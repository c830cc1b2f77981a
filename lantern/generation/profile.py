"""The profile that `lantern tune` writes and method "auto" reads: measurements, and the method they recommend.

It is `profile.json` in the model's folder or, where that is read-only or part of the installed package, a file in the
user's cache named by the model's fingerprint. A profile is valid for one machine, dtype, set of weights and similar
sampling.
"""

import dataclasses
import errno
import math
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lantern.core.config import read_json_object
from lantern.core.io import user_cache
from lantern.core.sampling import Sampling
from lantern.engines.cpu.compiler import facts
from lantern.methods import Method, find
from lantern.models.folder import PROFILE_NAME, Model

VERSION = 2
PACKAGE = Path(__file__).resolve().parents[1]  # nothing is written into it
KEYS = ("machine", "model", "sampling", "choice")


def describe_machine(model: Model) -> dict[str, Any]:
    """Return what decoding times depend on: device, its name, threads, dtype, how passes are run, torch's version."""
    is_cuda = model.device.type == "cuda"
    processor = facts().get("model name") or platform.processor() or platform.machine()
    return {
        "device": model.device.type,
        "name": torch.cuda.get_device_name(model.device) if is_cuda else processor,
        "threads": torch.get_num_threads(),
        "dtype": model.dtype_name,
        "passes": model.passes,
        "torch": torch.__version__,
    }


def cache_folder() -> Path:
    """Return the folder of profiles for models in read-only folders."""
    return user_cache() / "profiles"


def place_of(model: Model) -> Path:
    """Return the file in which "auto" finds the profile of this model; make its folder.

    ValueError if there is no place for it.
    """
    if model.folder is None:
        raise ValueError("a model that was assembled in memory has no folder for its profile: give out, a file")
    if os.access(model.folder, os.W_OK) and not model.folder.resolve().is_relative_to(PACKAGE):
        return model.folder / PROFILE_NAME
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        if not os.access(cache_folder(), os.W_OK):
            raise PermissionError(errno.EACCES, "cannot be written to")
    except OSError as error:
        raise ValueError(
            f"{cache_folder()}: {error.strerror}: give the profile's file (out), or a cache folder"
        ) from error
    return cache_folder() / f"{model.fingerprint}.json"


def chosen_method(model: Model, sampling: Sampling, report: Callable[[str], None]) -> Method | None:
    """Return the method that a profile recommends for a model of a folder, or None; `report` gets the reason.

    The profile of the folder comes before that of the cache.
    """
    assert model.folder is not None
    why = ""
    for path in (model.folder / PROFILE_NAME, cache_folder() / f"{model.fingerprint}.json"):
        if not path.is_file():
            continue
        try:
            profile = read_profile(path)
            why = why or unfit(profile, model, sampling)
            if not why:
                choice = profile["choice"]
                return find(str(choice.get("method"))).with_options(**dict(choice.get("settings") or {}))
        except (TypeError, ValueError) as error:
            why = why or str(error)
    if why:
        report(f"the model's profile is not used: {why}; `lantern tune` makes one that fits")
    return None


def read_profile(path: Path) -> dict[str, Any]:
    """Read a profile; ValueError for another kind of file and for another version."""
    profile = read_json_object(path)
    if profile.get("version") != VERSION:
        raise ValueError(f"{path} has version {str(profile.get('version'))[:20]}, wanted {VERSION}")
    for key in KEYS:
        if not isinstance(profile.get(key), dict):
            raise ValueError(f"{path} is not a complete profile: {key!r} is missing")
    return profile


def unfit(profile: Mapping[str, Any], model: Model, sampling: Sampling) -> str:
    """Return why a profile is not valid for this machine, these weights and this sampling; "" if it is.

    TypeError or ValueError for a profile whose own sampling is invalid.
    """
    for name, here in describe_machine(model).items():
        if (there := profile["machine"].get(name)) != here:
            return f"it was measured with {name} {str(there)[:60]}, here it is {here}"
    fields = [entry.name for entry in dataclasses.fields(Sampling)]
    measured = Sampling(**{name: value for name, value in profile["sampling"].items() if name in fields})
    far = too_far(measured, sampling, model.target.config.vocab_size)
    is_same = profile["model"].get("fingerprint") == model.fingerprint
    return far or ("" if is_same else "it was measured with other weights")


def too_far(there: Sampling, here: Sampling, tokens: int) -> str:
    """Return why acceptance measured at sampling `there` does not apply to `here`; "" if it does.

    Guidance may differ by half, temperature and top-p by 0.2, the number of tokens to choose from by a factor of 4.
    """

    def ratio(a: float, b: float) -> float:
        return max(a, b) / min(a, b) if min(a, b) > 0 else math.inf

    kept = [min(one.top_k or tokens, tokens) for one in (there, here)]
    is_near_guidance = here.rows == 1 or ratio(there.guidance, here.guidance) <= 1.5 + 1e-9
    are_near = {
        "guidance": there.rows == here.rows and is_near_guidance,
        "temperature": there.is_greedy == here.is_greedy and abs(there.temperature - here.temperature) <= 0.2 + 1e-9,
        "top_p": abs(there.top_p - here.top_p) <= 0.2 + 1e-9,
        "top_k": ratio(*kept) <= 4,
        "guidance_interval": (there.guidance_interval < 0) == (here.guidance_interval < 0),
    }
    for name, is_near in are_near.items():
        if not is_near:
            return f"it was measured at {name} {getattr(there, name):g}, this is {getattr(here, name):g}"
    return ""
