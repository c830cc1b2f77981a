"""Where the time of a step goes: shares of the phases, the host's part, the draft step, bytes a second."""

from dataclasses import dataclass
from typing import Any

import torch

from lantern.eval.bandwidth import layer_bytes, pass_bytes
from lantern.eval.contenders import Contender, Job
from lantern.eval.network_clock import NetworkClock, networks
from lantern.eval.ratios import rounded
from lantern.types import Callback, Step

PROMPT, DRAFTING, PASS = "prefill", "propose", "score"


@dataclass(frozen=True)
class Timed:
    """One timed generation, the pass over its prompt left out: seconds by phase and the calls of the networks.

    In compiled steps the drafter's network is not seen apart from the rest of drafting, and in graphed ones nothing is.
    Turns that are one program tell of their passes themselves.
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
        """Seconds of a pass of the target; None where nobody sees it."""
        if self.clock.calls or self.contender.variant.is_graphed:
            return self.clock.typical("target.forward")
        return self.phases[PASS] / self.steps

    @property
    def host_share(self) -> float | None:
        """Share of everything but the two networks; of compiled steps all of drafting counts as network."""
        if not self.clock.calls:
            return None if self.pass_seconds is None else 1 - self.phases[PASS] / self.total
        hidden = self.phases.get(DRAFTING, 0.0) if self.contender.variant.is_compiled else 0.0
        return max(1 - (self.clock.outer + hidden) / self.total, 0.0)


def time_phases(contender: Contender, job: Job, *, callback: Callback | None = None) -> Timed:
    """Decodes once with the stopwatch of the loop on and the networks' methods timed; `callback` sees every step."""
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
        # what a compiler has traced must stay as it was traced
        watched = {"target": (contender.parts.target, ("forward",))}
    is_whole = contender.parts.takes_whole_turns  # of which the clock sees nothing, and which looking would slow down
    with clock.watching({} if contender.variant.is_graphed or is_whole else watched):
        made = contender.decode(job, is_timed=True, callback=callback if is_whole else after_prompt)
    phases = {name: seconds for name, seconds in made.seconds.items() if name != PROMPT}
    return Timed(contender, phases, clock, max(int(made.passes.max()) - 1 if is_whole else count - 1, 1))


def layer_seconds(plain: Timed) -> float | None:
    """Seconds of one layer of the target in a pass over one code, where that is compiled by its share of the bytes."""
    target = _module(plain.contender.parts.target)
    layers = plain.contender.parts.target.config.n_layer
    features = plain.clock.typical("target.features")
    if features is not None:
        return features / layers
    whole = plain.pass_seconds
    return None if whole is None else whole * layer_bytes(target) / pass_bytes(target, rows=0)


def describe(timed: Timed, *, layer: float | None, copy_gbps: float, rows: int) -> dict[str, Any]:
    """The figures of one method as JSON has them.

    `gbps` is the bytes that a pass must read over the time it takes; `draft_step_layers` the time of one pass of the
    drafter, law and ranking included, over `layer`: one for each depth, or one for all.
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
    # a window is proposed without a network: it has no draft steps
    if hasattr(parts.drafter, "module") and DRAFTING in timed.phases and parts.drafter is not None:
        passes = getattr(parts.drafter, "draft_passes", max(parts.drafter.depth, 1))
        step = timed.phases[DRAFTING] / timed.steps / passes
        found["draft_step_ms"] = rounded(1e3 * step)
        found["draft_step_layers"] = None if layer is None else rounded(step / layer)
    return found


def _module(target: object) -> torch.nn.Module:
    assert isinstance(target, torch.nn.Module)
    return target
