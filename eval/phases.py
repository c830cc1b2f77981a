"""Where the time of a step goes: shares of the phases, the host's part, the draft step, bytes a second."""

from dataclasses import dataclass
from typing import Any

import torch

from lantern.catalog import Parts
from lantern.eval.bandwidth import pass_bytes
from lantern.eval.network_clock import NetworkClock, networks
from lantern.eval.ratios import rounded
from lantern.types import Condition, Generation, Step

PROMPT = "prefill"


@dataclass(frozen=True)
class Timed:
    """One timed generation, the pass over its prompt left out: seconds by phase and the calls of the networks."""

    phases: dict[str, float]
    clock: NetworkClock
    steps: int

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.phases.values())


def time_phases(parts: Parts, condition: Condition, keys: list[tuple[int, int]]) -> Timed:
    """Decodes once with the stopwatch of the loop on and the networks' methods timed."""
    device = condition.device
    clock, count = NetworkClock(device), 0

    def after_prompt(step: Step) -> None:
        nonlocal count
        count += 1
        if step.index == 0:
            clock.reset()

    with clock.watching(networks(parts.target, parts.drafter)):
        made: Generation = parts.generate(condition, keys=keys, is_timed=True, callback=after_prompt)
    phases = {name: seconds for name, seconds in made.seconds.items() if name != PROMPT}
    return Timed(phases, clock, max(count - 1, 1))


def layer_seconds(plain: Timed, layers: int) -> float | None:
    """Seconds of one layer of the target in a pass over one code."""
    found = plain.clock.typical("target.features")
    return None if found is None else found / layers


def describe(timed: Timed, parts: Parts, *, layer: float | None, copy_gbps: float, rows: int) -> dict[str, Any]:
    """The figures of one method as JSON has them.

    `host_share` is everything but the two networks; `draft_step_layers` the time of one depth of drafting, law and
    ranking included, over `layer`; `gbps` the bytes that a pass must read over the time it takes.
    """
    shares = {name: rounded(seconds / timed.total) for name, seconds in timed.phases.items()}
    found: dict[str, Any] = {
        "shares": shares,
        "host_share": rounded(max(1 - timed.clock.outer / timed.total, 0.0)),
        "step_ms": rounded(1e3 * timed.total / timed.steps),
        "pass_ms": None,
        "gbps": None,
        "share_of_copy": None,
        "draft_step_ms": None,
        "draft_step_layers": None,
    }
    nodes = 1 if parts.drafter is None else parts.drafter.max_nodes
    spent = timed.clock.typical("target.forward")
    if spent is not None:
        speed = pass_bytes(_module(parts.target), rows=rows, nodes=nodes) / spent / 1e9
        found |= {"pass_ms": rounded(1e3 * spent), "gbps": rounded(speed), "share_of_copy": rounded(speed / copy_gbps)}
    if parts.drafter is not None and "propose" in timed.phases:
        step = timed.phases["propose"] / timed.steps / max(parts.drafter.depth, 1)
        found["draft_step_ms"] = rounded(1e3 * step)
        found["draft_step_layers"] = None if layer is None else rounded(step / layer)
    return found


def _module(target: object) -> torch.nn.Module:
    assert isinstance(target, torch.nn.Module)
    return target
