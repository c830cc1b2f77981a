"""T(n), the time of a target pass over n tokens: measured in about 50 ms, and remembered between processes.

A pass over n tokens costs little more than one over a single token where it waits for weights, and up to n times as
much where it is bound by arithmetic. The best window, and whether drafting is faster at all, depend on that.
"""

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lantern.core.io import user_cache, write_json
from lantern.core.types import Target
from lantern.decoding.statistics import now
from lantern.engines.chain import passes_of
from lantern.engines.engine import Engine
from lantern.engines.prepared import on_device, original

LOG = logging.getLogger("lantern")
NODES = (1, 2, 4, 8, 16)
LEAST = 3  # sizes that are measured whatever they take
BUDGET = 0.05  # seconds
WARM_PASSES = 3  # over each number of tokens: the first ones of the C++ engine use one thread (`ThreadPolicy`)
WARM_BUDGET = 1.5  # seconds of passes that are not measured
TRIALS = 3
EXCESS = 2.0  # most growth of the time of a pass, as a multiple of that of its tokens
NOISE = 1.1  # most time of a pass, as a multiple of that of a pass over more tokens
# Tokens per step of `gumbel-jacobi` by window, assumed for models that do not record their own (`lantern tune
# --write-model`): few, as where distributions are flat. Earlier weights of the embedded model committed as many.
TOKENS = {1: 1.0, 2: 1.42, 3: 1.66, 4: 1.83, 8: 2.3, 16: 2.7}


def pass_times(engine: Engine, target: Target, *, rows: int = 2, budget: float = BUDGET) -> dict[int, float]:
    """Return T(n): seconds of a pass over n tokens of one image, for n of NODES, as far as `budget` seconds allow.

    `rows` are the guidance rows of the image. Sizes that the budget does not reach are missing; the first three are
    always there, so that large models take longer than the budget once, with the C++ engine by up to WARM_BUDGET.
    Figures are minima of several passes with half of the image in the cache. They are read from the user's cache where
    this machine, version, engine, dtype and shape have been measured before; the values of weights do not matter.
    Figures that are not steady, because other programs took part of the time, are measured up to TRIALS times, and not
    kept.
    """
    path = _path(engine, target, rows)
    kept = _read(path)
    if kept is not None:
        return kept
    prepared = engine.prepare(target)
    found, trials = measure(prepared, rows=rows, budget=budget), 1
    while not is_steady(found) and trials < TRIALS:
        found, trials = measure(prepared, rows=rows, budget=budget), trials + 1
    if not is_steady(found):
        return found
    try:
        write_json(path, {"seconds": {str(n): seconds for n, seconds in found.items()}})
    except OSError as error:
        LOG.info("times of passes are not kept: %s", error)
    return found


def is_steady(times: Mapping[int, float]) -> bool:
    """Return whether the times grow as they do while no other program computes.

    A pass takes at most NOISE times as long as one over more tokens, and one over k times as many tokens at most
    EXCESS * k times as long.
    """
    pairs = [(n, more) for n in times for more in times if n < more]
    return all(times[n] <= NOISE * times[more] <= NOISE * EXCESS * more / n * times[n] for n, more in pairs)


def best_window(times: Mapping[int, float], tokens: Mapping[int, float] = TOKENS) -> int:
    """Return the window, 2 or longer, with the most tokens per second; `tokens` are the tokens per step of each
    window.
    """
    lengths = [n for n in tokens if 2 <= n <= max(times)]
    return max(lengths, key=lambda n: tokens[n] / time_of(times, n))


def time_of(times: Mapping[int, float], nodes: int) -> float:
    """Return T(nodes), interpolated linearly between measured sizes, and extrapolated past the last."""
    sizes = sorted(times)
    above = next((i for i, n in enumerate(sizes) if n >= nodes and i), len(sizes) - 1)
    low, high = sizes[above - 1], sizes[above]
    return times[low] + (times[high] - times[low]) * (nodes - low) / (high - low)


@torch.no_grad()
def measure(target: Target, *, rows: int = 2, budget: float = BUDGET) -> dict[int, float]:
    """Return T(n) of a prepared target as `pass_times` does, measured now."""
    with on_device(target.tok_embeddings.weight.device):
        return _measure(target, rows, budget)


def _measure(target: Target, rows: int, budget: float) -> dict[int, float]:
    passes = passes_of(target, rows, [n for n in NODES if n <= target.config.block_size])
    begun = time.perf_counter()
    next(iter(passes.values()))()  # the first pass allocates memory
    # In ascending order: where time runs out, passes over more tokens seem slower, and plain decoding is chosen.
    for run in list(passes.values())[:LEAST]:
        for _ in range(WARM_PASSES):
            if time.perf_counter() - begun < WARM_BUDGET:
                run()
    begun = time.perf_counter()
    found: dict[int, float] = {}
    while True:
        for n, run in passes.items():
            if len(found) >= min(LEAST, len(passes)) and time.perf_counter() - begun > budget:
                return found
            found[n] = min(_elapsed(run, target.tok_embeddings.weight.device), found.get(n, float("inf")))


def _elapsed(run: Callable[[], Any], device: torch.device) -> float:
    begun = now(device)
    run()
    return now(device) - begun


def _path(engine: Engine, target: Target, rows: int) -> Path:
    """Return the file of the times: its name differs with all that they depend on."""
    from lantern import __version__
    from lantern.engines.cpu.build import library_name, processor

    weight = target.tok_embeddings.weight
    device = torch.cuda.get_device_name(weight.device) if weight.device.type == "cuda" else processor()
    settings = {"name": engine.name} | {name: value for name, value in vars(engine).items() if name != "reason"}
    shape = dataclasses.asdict(original(target).config)
    versions = (__version__, library_name(), torch.__version__, torch.get_num_threads())
    key = json.dumps([device, str(weight.dtype), settings, shape, rows, versions], sort_keys=True, default=str)
    return user_cache() / "profiles" / f"passes-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _read(path: Path) -> dict[int, float] | None:
    """Return recorded times, or None without a sound record."""
    try:
        found = {int(n): float(seconds) for n, seconds in json.loads(path.read_text("utf-8"))["seconds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    is_sound = len(found) >= 2 and all(0 < seconds < 3600 for seconds in found.values())
    return found if is_sound and is_steady(found) else None
