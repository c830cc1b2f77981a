"""T(n), the time of a target pass over n tokens: measured in a second or two, and remembered between processes.

A pass over n tokens costs little more than one over a single token where it waits for weights, and up to n times as
much where it is bound by arithmetic. The best window, and whether drafting is faster at all, depend on that.
Passes over a `Chain` of nodes in the middle of an image are timed here, and tried by the engine `graph`.
"""

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median, median_low
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.core.config import read_json_object
from lantern.core.io import user_cache, write_json
from lantern.core.types import Scores, Target
from lantern.core.weights import on_device, original
from lantern.decoding.cache import StaticCache
from lantern.decoding.statistics import median_interval, now

if TYPE_CHECKING:
    from lantern.engines.engine import Engine

LOG = logging.getLogger("lantern")
NODES = (1, 2, 4, 8, 16)
LEAST = 3
LEAST_ROUNDS = 6  # of passes over every size: the fewest whose extremes are a 95 % interval of the median
LARGE = 200_000_000  # parameters from which on only the first LEAST sizes are measured on a CPU
PATIENCE = 5.0  # seconds after which times are taken as they are, certain or not
WARM_PASSES = 3  # over each number of tokens: the first ones of the C++ engine use one thread (`ThreadPolicy`)
WARM_BUDGET = 1.5  # seconds of passes that are not measured
RUN = 0.025  # seconds of passes over one token; the later half of them counts
CERTAIN = 1.1  # most width of the interval of a ratio T(n) / T(1)
EXCESS = 2.0  # most growth of the time of a pass, as a multiple of that of its tokens
NOISE = 1.05  # most time of a pass, as a multiple of that of a pass over more tokens
NEAR = 0.95  # least speed of a window, as a share of the fastest one's, at which it is chosen for being shorter
# Tokens per step of `gumbel-jacobi` by window, assumed for models that do not record their own (`lantern tune
# --write-model`): few, as where distributions are flat. Earlier weights of the embedded model committed as many.
TOKENS = {1: 1.0, 2: 1.42, 3: 1.66, 4: 1.83, 8: 2.3, 16: 2.7}
_KEPT: dict[Path, dict[int, float]] = {}  # measured by this process: uncertain, or the user's cache is not writable


def pass_times(engine: "Engine", target: Target, *, rows: int = 2) -> dict[int, float]:
    """Return T(n): seconds of a pass over n tokens of one image, for n of NODES.

    `rows` are the guidance rows of the image. Times are read from the user's cache where this machine, version, engine,
    dtype and shape have been measured before (`measure`); the values of weights do not matter. Times that are not
    certain are kept by this process alone, those that are not steady are not kept.
    """
    path = _path(engine, target, rows)
    kept = _KEPT.get(path) or _read(path)
    if kept is not None:
        return kept
    is_replayed = engine.captures and target.tok_embeddings.weight.device.type == "cuda"
    found, are_certain = measure(engine.prepare(target), rows=rows, is_replayed=is_replayed)
    if not is_steady(found):
        return found
    _KEPT[path] = found
    if not are_certain:
        return found
    try:
        write_json(path, {"seconds": {str(n): seconds for n, seconds in found.items()}})
    except OSError as error:
        LOG.info("times of passes are not kept: %s", error)
    return found


def is_steady(times: Mapping[int, float]) -> bool:
    """Return whether there are times of several sizes that grow as they do while no other program computes.

    A pass never takes longer than one over more tokens, and one over k times as many tokens takes at most EXCESS * k
    times as long.
    """
    pairs = [(n, more) for n in times for more in times if n < more]
    return bool(pairs) and all(times[n] <= times[more] <= NOISE * EXCESS * more / n * times[n] for n, more in pairs)


def best_window(times: Mapping[int, float], tokens: Mapping[int, float] = TOKENS) -> int:
    """Return the shortest window, 2 or longer, that is NEAR the one with the most tokens per second, so that the load
    by other programs seldom changes the choice; `tokens` are the tokens per step of each window. It is 2 where no times
    are known.
    """
    speeds = {n: tokens[n] / time_of(times, n) for n in sorted(tokens) if 2 <= n <= max(times, default=1)}
    return next((n for n, speed in speeds.items() if speed >= NEAR * max(speeds.values())), 2)


def time_of(times: Mapping[int, float], nodes: int) -> float:
    """Return T(nodes), interpolated linearly between measured sizes, and extrapolated past the last."""
    sizes = sorted(times)
    above = next((i for i, n in enumerate(sizes) if n >= nodes and i), len(sizes) - 1)
    low, high = sizes[above - 1], sizes[above]
    return times[low] + (times[high] - times[low]) * (nodes - low) / (high - low)


@torch.no_grad()
def measure(
    target: Target, *, rows: int = 2, patience: float = PATIENCE, is_replayed: bool = False
) -> tuple[dict[int, float], bool]:
    """Return T(n) of a prepared target, measured now with half of the image in the cache, and whether all are certain.
    `is_replayed`: of graphs.

    Passes over n tokens are between runs of passes over a single one, and only the ratio to these at its time counts,
    since the load by other programs changes: T(1) is the least time, T(n) that times the median ratio. A single pass
    after larger ones takes longer than in plain decoding, until caches hold what they can of the weights.
    Rounds over all sizes go on until the order is certain: until the interval that holds the median with a probability
    of 95 % is as narrow as CERTAIN for each size, at most for `patience` seconds. A size that is faster than a smaller
    one by more than NOISE is left out.
    """
    with on_device(target.tok_embeddings.weight.device):
        # they hold the memory that graphs read
        passes = passes_of(target, rows, [n for n in NODES if n <= target.config.block_size])
        return _measure(target, {n: replayed(run) for n, run in passes.items()} if is_replayed else passes, patience)


def replayed(run: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a CUDA graph of a pass."""
    from lantern.engines.cuda.graphs import capture

    for _ in range(WARM_PASSES):
        run()
    return capture(run)[0].replay


def _measure(
    target: Target, passes: Mapping[int, Callable[[], object]], patience: float
) -> tuple[dict[int, float], bool]:
    device, begun = target.tok_embeddings.weight.device, time.perf_counter()
    next(iter(passes.values()))()  # the first pass allocates memory
    for run in list(passes.values())[:LEAST]:
        for _ in range(WARM_PASSES):
            if time.perf_counter() - begun < WARM_BUDGET:
                run()
    begun = time.perf_counter()
    is_large = device.type == "cpu" and sum(weight.numel() for weight in target.parameters()) >= LARGE
    sizes = [n for n in passes if n > 1][: LEAST - 1 if is_large else None]
    singles, ratios = list[tuple[float, float]](), {n: list[float]() for n in sizes}  # when, and how long
    for rounds in count():
        is_late = rounds > LEAST_ROUNDS and time.perf_counter() - begun > patience
        are_certain = all(map(is_certain, ratios.values()))
        if is_late or (rounds and are_certain):
            break
        timed = {n: (time.perf_counter(), _elapsed(passes[n], device)) for n in sizes}
        singles.append((time.perf_counter(), _steady(passes[1], device)))
        for n, (when, seconds) in timed.items() if rounds else ():
            (begin, before), (end, after) = singles[-2:]
            ratios[n].append(seconds / (before + (after - before) * (when - begin) / (end - begin)))
    least = min(seconds for _, seconds in singles)
    times, largest = {1: least}, 1.0
    for n, values in ratios.items():
        if median(values) * NOISE >= largest:
            largest = max(median(values), largest)
            times[n] = least * largest
    return times, are_certain


def is_certain(values: Sequence[float]) -> bool:
    """Return whether the median of what the values are samples of is known: its interval is as narrow as CERTAIN."""
    if len(values) < LEAST_ROUNDS:
        return False
    low, high = median_interval(values)
    return high <= CERTAIN * low


def _steady(run: Callable[[], Any], device: torch.device) -> float:
    """Return the time of a pass in the later half of a run of them."""
    begun, times = time.perf_counter(), list[float]()
    while not times or time.perf_counter() - begun < RUN:
        times.append(_elapsed(run, device))
    return median_low(times[len(times) // 2 :])


def _elapsed(run: Callable[[], Any], device: torch.device) -> float:
    """Return the time of a pass: on a CPU with one thread that of the processor, which no other program adds to."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        begun = time.process_time()
        run()
        return time.process_time() - begun
    begun = now(device)
    run()
    return now(device) - begun


def _path(engine: "Engine", target: Target, rows: int) -> Path:
    """Return the file of the times: its name differs with all that they depend on."""
    from lantern import __version__
    from lantern.engines.cpu.build import library_name, processor

    weight = target.tok_embeddings.weight
    device = torch.cuda.get_device_name(weight.device) if weight.device.type == "cuda" else processor()
    settings = engine.as_dict() | {"reason": ""}
    shape = dataclasses.asdict(original(target).config)
    versions = (__version__, library_name(), torch.__version__, torch.get_num_threads())
    key = json.dumps([device, str(weight.dtype), settings, shape, rows, versions], sort_keys=True, default=str)
    return user_cache() / "profiles" / f"passes-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _read(path: Path) -> dict[int, float] | None:
    """Return recorded times, or None without a sound record."""
    try:
        found = {int(n): float(seconds) for n, seconds in read_json_object(path)["seconds"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    is_sound = {1} <= found.keys() <= {*NODES} and all(0 < seconds < 3600 for seconds in found.values())
    return found if is_sound and is_steady(found) else None


def waves(count: int, *, device: torch.device, begin: int = 0) -> Float[Tensor, " n"]:
    """Return numbers between -1 and 1 without an order, and without touching a random generator."""
    return torch.arange(begin, begin + count, device=device).mul(0.7391).sin()


class Chain:
    """A chain of n nodes of one image, with half of the image in the cache: zeros, or random numbers."""

    def __init__(self, target: Target, rows: int, nodes: int, *, is_random: bool = False, is_fp8: bool = False) -> None:
        config: Any = target.config
        weight, self.nodes = target.tok_embeddings.weight, nodes
        device, self.known = weight.device, (config.block_size - nodes) // 2
        sizes = {"layers": config.n_layer, "heads": config.n_head, "head_dim": config.head_dim, "images": 1}
        sizes |= {"rows": rows, "prefix": 1, "tokens": config.block_size, "stage": nodes}
        sizes |= {"columns": config.raster.columns if config.raster.newlines else 0}
        dtype = config.cache_dtype(device, weight.dtype)
        self.cache = StaticCache(**sizes, dtype=dtype, device=device, is_fp8=is_fp8)
        if is_random:
            for number, layer in enumerate(self.cache.buffer):
                layer.copy_(self.cache.stored(waves(layer.numel(), device=device, begin=number)).view_as(layer))
            self.cache.buffer[0::2, :, :, 0] = 0  # LlamaGen's prompts are values without keys
        size = (rows, nodes, self.cache.slots)
        self.mask = torch.full(size, -torch.inf, dtype=self.cache.dtype, device=device)
        self.mask[..., : 1 + self.known] = 0.0
        self.cache.first.fill_(1)  # the prompt has one token
        staged = torch.full((nodes, nodes), -torch.inf, dtype=torch.float32, device=device).triu(1)
        self.mask[..., self.cache.first_stage_slot :] = staged
        steps = torch.arange(nodes, device=device).expand(rows, -1)
        self.inputs = target.tok_embeddings(steps % config.vocab_size)
        self.positions = steps + self.known + config.cls_token_num
        self.slots = steps + self.cache.first_stage_slot

    def run(self, target: Target, nodes: int | None = None) -> Scores:
        """Return the scores of the first nodes, by default of all."""
        at = slice(nodes)
        how: dict[str, Any] = {"cache": self.cache, "slots": self.slots[:, at]}
        return target(self.inputs[:, at], self.positions[:, at], self.mask[:, at], **how)

    def run_alone(self, target: Target, node: int) -> Scores:
        """Return the scores of one node, after committing those before it, which the last run has staged."""
        cache, begin = self.cache, 1 + self.known
        staged = slice(cache.first_stage_slot, cache.first_stage_slot + node)
        cache.buffer[..., begin : begin + node, :] = cache.buffer[..., staged, :].clone()
        mask = torch.full_like(self.mask[:, :1], -torch.inf)
        mask[..., : begin + node] = mask[..., cache.first_stage_slot] = 0.0
        at = slice(node, node + 1)
        how: dict[str, Any] = {"cache": cache, "slots": self.slots[:, :1]}
        return target(self.inputs[:, at], self.positions[:, at], mask, **how)


def passes_of(target: Target, rows: int, nodes: Sequence[int]) -> dict[int, Callable[[], Scores]]:
    """Return passes over chains of n tokens, with half of the image in the cache."""
    chain = Chain(target, rows, max(nodes))
    return {n: partial(chain.run, target, n) for n in nodes}
