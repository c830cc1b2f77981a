"""Time of a step by phase: shares, host share, draft step, and memory bandwidth of the target's pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lantern.core.types import Callback, Drafter, Step, Target
from lantern.decoding.loop import now
from lantern.engines.prepared import original
from lantern.eval.speed.contenders import Contender, Job
from lantern.eval.speed.race import rounded
from lantern.models.llamagen.transformer import TransformerConfig


class NetworkClock:
    """Seconds of every call of the watched methods, by label; `outer` is the sum over calls that are not nested.

    On a GPU each call synchronises before and after it, so shares are correct and totals slightly too long.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nested = 0
        self.reset()

    def reset(self) -> None:
        """Forget all calls so far."""
        self.outer = 0.0
        self.calls: dict[str, list[float]] = {}

    def typical(self, label: str) -> float | None:
        """Return the median seconds of a call, or None without calls."""
        return median(self.calls[label]) if self.calls.get(label) else None

    @contextmanager
    def watching(self, watched: Mapping[str, tuple[object, Sequence[str]]]) -> Iterator["NetworkClock"]:
        """Time methods of objects, given as label -> (object, method names). Restores the objects at exit."""
        undo: list[Callable[[], object]] = []
        try:
            for label, (thing, names) in watched.items():
                undo += [self._watch(thing, name, f"{label}.{name}") for name in names if hasattr(thing, name)]
            yield self
        finally:
            for one in reversed(undo):
                one()

    def _watch(self, thing: Any, name: str, label: str) -> Callable[[], object]:
        inner, own = getattr(thing, name), vars(thing).get(name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._nested += 1
            begin = now(self._device)
            try:
                return inner(*args, **kwargs)
            finally:
                spent = now(self._device) - begin
                self._nested -= 1
                self.calls.setdefault(label, []).append(spent)
                self.outer += spent if self._nested == 0 else 0.0

        # bypass nn.Module.__setattr__, which registers what it is given
        object.__setattr__(thing, name, timed)
        return (lambda: object.__setattr__(thing, name, own)) if own else (lambda: object.__delattr__(thing, name))


NETWORKS = {"target": ("forward", "features", "head"), "drafter": ("forward",)}


def networks(target: object, drafter: Drafter | None) -> dict[str, tuple[object, Sequence[str]]]:
    """Return what to watch of a method: its target, and the module of its drafter if there is one."""
    found: dict[str, tuple[object, Sequence[str]]] = {"target": (target, NETWORKS["target"])}
    if drafter is not None and drafter.module is not None:
        found["drafter"] = (drafter.module, NETWORKS["drafter"])
    return found


COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
REPEATS = 9
# tables of which a pass reads only a few rows
TABLES = ("tok_embeddings.", "cls_embedding.")


def copy_bandwidth(device: torch.device, *, size: int | None = None) -> float:
    """Return the bandwidth in GB/s (read and written bytes) of copying a tensor larger than any cache."""
    count = size or COPY_BYTES.get(device.type, 1 << 28)
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(REPEATS):
        begin = now(device)
        target.copy_(source)
        seconds.append(now(device) - begin)
    return 2 * count / median(seconds[1:]) / 1e9


def pass_bytes(target: nn.Module, *, rows: int, nodes: int = 1, cached: int | None = None) -> int:
    """Return the bytes that a pass reads: weights without embedding tables, and keys and values of `cached` code slots.

    `cached` is by default all slots of an image. The cache of a CPU is in fp32 for every dtype.
    """
    config: Any = target.config
    assert isinstance(config, TransformerConfig)
    weights = sum(stored_bytes(value) for name, value in target.named_parameters() if not name.startswith(TABLES))
    norm, slots = target.get_parameter("norm.weight"), config.block_size if cached is None else cached
    width = 4 if norm.device.type == "cpu" else norm.dtype.itemsize
    return weights + 2 * config.n_layer * rows * (slots + nodes) * config.dim * width


def roofline(contender: Contender, *, rows: int, copy_gbps: float, step_seconds: float) -> dict[str, float]:
    """Return the least milliseconds of a pass (`floor_ms`) and its share of a step's time (`roofline`), for JSON.

    A pass must at least read the weights and, on average over an image, half of the keys and values; at the bandwidth
    of a copy this takes `floor_ms`. Weights that stay in a processor's cache can be read faster, and the share then
    exceeds 1. The step's time includes drafting and verification.
    """
    target, drafter = _module(contender.parts.target), contender.parts.drafter
    nodes = 1 if drafter is None else drafter.max_nodes
    read = pass_bytes(target, rows=rows, nodes=nodes, cached=contender.parts.target.config.block_size // 2)
    seconds = read / copy_gbps / 1e9
    return {"floor_ms": rounded(1e3 * seconds), "roofline": rounded(seconds / max(step_seconds, 1e-12))}


def layer_bytes(target: nn.Module) -> int:
    """Return the bytes of the weights of one layer."""
    return sum(stored_bytes(value) for value in target.get_submodule("layers.0").parameters())


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor occupies; for a quantised tensor, those of its inner tensors."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.nbytes
    return sum(stored_bytes(getattr(tensor, name)) for name in flatten()[0])


PROMPT, DRAFTING, PASS = "prefill", "propose", "score"


@dataclass(frozen=True)
class Timed:
    """One timed generation without its prefill: seconds by phase and the calls of the networks.

    In compiled steps the drafter's network is not timed apart from the rest of drafting; in CUDA graphs no network is.
    Fused steps report the time of their passes themselves.
    """

    contender: Contender
    phases: dict[str, float]
    clock: NetworkClock
    steps: int

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.phases.values())

    @property
    def pass_seconds(self) -> float | None:
        """Seconds of a pass of the target; None where it cannot be timed."""
        if self.clock.calls or self.contender.variant.is_graphed:
            return self.clock.typical("target.forward")
        return self.phases[PASS] / self.steps

    @property
    def host_share(self) -> float | None:
        """Share of the time outside the two networks; in compiled steps all of drafting counts as network."""
        if not self.clock.calls:
            return None if self.pass_seconds is None else 1 - self.phases[PASS] / self.total
        hidden = self.phases.get(DRAFTING, 0.0) if self.contender.variant.is_compiled else 0.0
        return max(1 - (self.clock.outer + hidden) / self.total, 0.0)


def time_phases(contender: Contender, job: Job, *, callback: Callback | None = None) -> Timed:
    """Decode once with the loop's timers on and the networks' methods timed; `callback` receives every step."""
    clock, count = NetworkClock(job.condition.device), 0

    def after_prompt(step: Step) -> None:
        nonlocal count
        count += 1
        if step.index == 0:
            clock.reset()
        if callback is not None:
            callback(step)

    watched = networks(contender.parts.target, contender.parts.drafter)
    if contender.variant.is_compiled:
        # traced modules must not be patched
        watched = {"target": (contender.parts.target, ("forward",))}
    # the clock cannot see into fused steps, and a callback at every step would slow them down
    is_whole = contender.parts.uses_fused_steps
    with clock.watching({} if contender.variant.is_graphed or is_whole else watched):
        made = contender.decode(job, is_timed=True, callback=callback if is_whole else after_prompt)
    phases = {name: seconds for name, seconds in made.seconds.items() if name != PROMPT}
    return Timed(contender, phases, clock, max(int(made.passes.max()) - 1 if is_whole else count - 1, 1))


def layer_seconds(plain: Timed) -> float | None:
    """Return the seconds of one target layer in a pass over one code; in compiled passes by its share of the bytes."""
    target = _module(plain.contender.parts.target)
    layers = plain.contender.parts.target.config.n_layer
    features = plain.clock.typical("target.features")
    if features is not None:
        return features / layers
    whole = plain.pass_seconds
    return None if whole is None else whole * layer_bytes(target) / pass_bytes(target, rows=0)


def describe(timed: Timed, *, layer: float | None, copy_gbps: float, rows: int) -> dict[str, Any]:
    """Return the figures of one method for JSON.

    `gbps` is the bytes that a pass reads over its time. `draft_step_layers` is the time of one drafter pass, with head
    and ranking, over `layer`; a drafter makes one pass per depth, or one for all depths.
    """
    parts, host = timed.contender.parts, timed.host_share
    found: dict[str, Any] = {
        "shares": {name: rounded(seconds / timed.total) for name, seconds in timed.phases.items()},
        "host_share": None if host is None else rounded(host),
        "step_ms": rounded(1e3 * timed.total / timed.steps),
        "pass_ms": None,
        "gbps": None,
        "share_of_copy": None,
        "draft_step_ms": None,
        "draft_step_layers": None,
    }
    nodes = 1 if parts.drafter is None else parts.drafter.max_nodes
    spent = timed.pass_seconds
    if spent is not None:
        speed = pass_bytes(_module(parts.target), rows=rows, nodes=nodes) / spent / 1e9
        found |= {"pass_ms": rounded(1e3 * spent), "gbps": rounded(speed), "share_of_copy": rounded(speed / copy_gbps)}
    # a window is proposed without a network and has no draft steps
    if parts.drafter is not None and parts.drafter.module is not None and DRAFTING in timed.phases:
        passes = parts.drafter.draft_passes or max(parts.drafter.depth, 1)
        step = timed.phases[DRAFTING] / timed.steps / passes
        found["draft_step_ms"] = rounded(1e3 * step)
        found["draft_step_layers"] = None if layer is None else rounded(step / layer)
    return found


def _module(target: Target) -> torch.nn.Module:
    module = original(target)
    assert isinstance(module, torch.nn.Module)
    return module
