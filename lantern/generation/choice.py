"""The method of a call: one that is named, the model's default, or what "auto" chooses on this machine.

"auto" is what the profile of `lantern tune` recommends; without one it is chosen by T(n), the times of passes. The
profile is `profile.json` in the model's folder or, where that is read-only or part of the installed package, a file in
the user's cache named by the digest of the target's weights. It is valid for one machine, dtype, set of weights and
similar sampling.
"""

import errno
import logging
import math
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lantern.core.config import is_out_of_memory, one_line, read_json_object
from lantern.core.io import user_cache
from lantern.core.sampling import Sampling
from lantern.engines.cpu.build import facts
from lantern.engines.pass_times import TOKENS, best_window, is_steady, pass_times, time_of
from lantern.methods import METHODS, Method, find
from lantern.methods.method import check_same, split
from lantern.models.folder import PROFILE_NAME, Model, may_have_profile

LOG = logging.getLogger("lantern")
FLAT = 1.1  # most seconds of a pass over a window, as a multiple of those of a pass over one token
GAIN = 1.1  # least predicted speedup over plain decoding at which a window is chosen; less is noise
VERSION = 2  # of profiles
PACKAGE = Path(__file__).resolve().parents[1]  # nothing is written into it


def choose_method(
    model: Model,
    name: str | Method | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    sampling: Sampling | None = None,
    batch: int = 1,
    report: Callable[[str], None] | None = None,
) -> Method:
    """Return the method of a name with the given settings, such as its tree, or k and delta of relaxed methods.

    The name may have settings too, "lantern++:k=5,delta=0.1". None is the model's default method, whose settings those
    of `settings` replace. Where a default window is not the best one for the engine, the engine's is taken. "auto" is
    the method that a profile of `lantern tune` recommends for this machine and `sampling`; without a profile it is a
    window that is nearly free for `batch` images at a time, else plain decoding (`choose`).
    `report` (default: the log, each line once) receives why a profile is not used, and what is chosen without one.
    ValueError for a setting that the method does not have, or that is given twice with different values. TypeError for
    settings that are not a mapping.
    """
    if not isinstance(settings, Mapping | None):
        raise TypeError(f"settings is of type {type(settings).__name__}, wanted a mapping of names and values")
    model = replace(model)  # with an engine for the target as it is now
    spec, texts = (name, {}) if isinstance(name, Method) else split(name or model.generation.get("method", "auto"))
    method = spec if isinstance(spec, Method) else find(spec)
    if method.name == "auto":
        method = _resolve_auto(model, sampling or model.sampling(), batch, report or _warn_once)
    elif not isinstance(name, Method) and "window" not in {**texts, **(settings or {})}:
        own, method = method, suited(model, method)
        if method.settings != own.settings:
            (report or LOG.info)(f"window {method.settings['window']}, chosen by the times of passes on this machine")
    method = method.with_options(**method.parsed(texts))
    chosen = method.with_options(**settings or {})
    for option in map(method.option, texts if name else ()):
        check_same(option.label, method.settings[option.name], chosen.settings[option.name])
    return chosen


def suited(model: Model, method: Method) -> Method:
    """Return the method with the window that is fastest with the model's engine, if its window depends on the engine.

    A long window saves passes. With passes dispatched one by one each of them has an overhead, which fused steps lack:
    there a pass takes as long as its tokens, unless the processor computes faster than it reads weights. The engine
    measures which is the case (`lantern.engines.pass_times`). The window stays in the range of its option.
    """
    if not (model.engine.fits_windows and any(one.fits for one in method.options.values())):
        return method
    window = best_window(pass_times(model.engine, model.target), model.tokens_per_step or TOKENS)
    option = method.options["window"]
    return method.with_options(window=int(max(min(window, option.high or window), option.low or 0)))


def has_parts(model: Model, method: Method) -> bool:
    """Return whether the model has the add-ons that a method reads."""
    return all(name in model.add_ons for name in method.made.needs)


def _resolve_auto(model: Model, sampling: Sampling, batch: int, report: Callable[[str], None]) -> Method:
    """Return the method that a profile recommends, if the model has what it needs; else the choice by T(n).

    T(n) is that of `engines.pass_times`, which takes up to some seconds the first time on a machine.
    """
    profiled = _of_profile(model, sampling, batch, report)
    if profiled is not None and has_parts(model, profiled):
        return replace(profiled, reason="a profile of `lantern tune` recommends it")
    lines = sampling.rows * batch
    times, most = {}, model.engine.free_nodes(lines)
    try:
        times = pass_times(model.engine, model.target, rows=lines)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        report(f"no times of passes: {one_line(error)}")  # plain decoding halves its batches
    allowed = {n: seconds for n, seconds in times.items() if most is None or n <= max(most, 2)}
    found = choose(allowed, model.tokens_per_step, can_shrink=not model.engine.captures)
    report(f"method auto is {found.spec}: {found.reason}; `lantern tune` measures other methods")
    return found


def choose(times: Mapping[int, float], tokens: Mapping[int, float] | None = None, *, can_shrink: bool = True) -> Method:
    """Return the method for T(n) by number of tokens n, with its reason; plain decoding if the times are not steady.

    `tokens` are the tokens per step that windows of n tokens commit. The best of these windows (`best_window`) is
    chosen if it is GAIN times as fast as plain decoding. Without `tokens`, a window of n tokens commits at least one
    token per pass, so it is at most T(n) / T(1) times as slow as plain decoding, whatever the model: the longest window
    whose factor is at most FLAT is chosen. A window by `tokens` that is not as good as free gets the setting `least`,
    if the engine's passes can shrink.
    """
    options: dict[str, Any] = {}
    windows = [n for n in times if n > 1]
    known = {n: tokens[n] for n in tokens if 2 <= n <= max(times, default=1)} if tokens else {}

    def cost(window: int) -> str:
        factor = time_of(times, window) / times[1]
        return f"a step over {window} tokens takes {factor:.2f} times a step over one ({1e3 * times[1]:.1f} ms)"

    if not is_steady(times):
        reason = "other programs took part of the time in which steps were measured"
    elif known:
        pays = {n: count for n, count in known.items() if count >= GAIN * time_of(times, n) / times[1]}
        best = best_window(times, pays or known)
        least = GAIN * time_of(times, best) / times[1]
        reason = f"{cost(best)} and commits {known[best]:.2f} tokens"
        if pays:
            # the image at hand may commit fewer tokens than those that were recorded
            options = {"window": best} | ({"least": round(least, 2)} if can_shrink and least > GAIN * FLAT else {})
    else:
        flat = [n for n in windows if times[n] <= FLAT * times[1]]
        reason = f"{cost(max(flat, default=min(windows, default=1)))}, and windows of up to {FLAT:g} times are chosen"
        options = {"window": max(flat)} if flat else {}
    method = METHODS["gumbel-jacobi"].with_options(**options) if options else METHODS["plain"]
    return replace(method, reason=reason)


@cache
def _warn_once(line: str) -> None:
    LOG.warning(line)


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
    return cache_folder() / f"{model.weights_digest}.json"


def _of_profile(model: Model, sampling: Sampling, batch: int, report: Callable[[str], None]) -> Method | None:
    """Return the method that a profile recommends for a model, or None; `report` gets why a profile is not used.

    The profile of the model's folder comes before that of the cache, which is used where the other does not fit.
    """
    if model.folder is None or not may_have_profile(model.folder):
        return None
    why = ""
    for path in (model.folder / PROFILE_NAME, cache_folder() / f"{model.weights_digest}.json"):
        if not os.path.isfile(path):  # or in a folder that cannot be read
            continue
        try:
            profile = read_profile(path)
            fault, choice = unfit(profile, model, sampling, batch), profile["choice"]
            if not fault:
                return find(str(choice.get("method"))).with_options(**dict(choice.get("settings") or {}))
        except (TypeError, ValueError) as error:
            fault = str(error)
        why = why or fault
    if why:
        report(f"the model's profile is not used: {why}; `lantern tune` makes one that fits")
    return None


def read_profile(path: Path) -> dict[str, Any]:
    """Read a profile; ValueError for another kind of file and for another version."""
    profile = read_json_object(path)
    if profile.get("version") != VERSION:
        raise ValueError(f"{path} has version {str(profile.get('version'))[:20]}, wanted {VERSION}")
    for key in ("machine", "model", "sampling", "choice"):
        if not isinstance(profile.get(key), dict):
            raise ValueError(f"{path} is not a complete profile: {key!r} is missing")
    return profile


def unfit(profile: Mapping[str, Any], model: Model, sampling: Sampling, batch: int) -> str:
    """Return why a profile is not valid for this machine, these weights and this sampling; "" if it is.

    The number of images at a time may differ by a factor of two. TypeError or ValueError for a profile whose own
    sampling or number is invalid.
    """
    for name, here in describe_machine(model).items():
        if (there := profile["machine"].get(name)) != here:
            return f"it was measured with {name} {str(there)[:60]}, here it is {here}"
    if not batch / 2 <= (there := profile.get("batch", batch)) <= 2 * batch:
        return f"it was measured with {there} images at a time, here it is {batch}"
    far = too_far(Sampling(**profile["sampling"]), sampling, model.target.config.vocab_size)
    is_same = profile["model"].get("weights") == model.weights_digest
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
