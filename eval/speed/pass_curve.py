"""T(n), the time of a target pass over n nodes, and the upper bound on speedup that follows from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Step, Target
from lantern.engines.prepared import original
from lantern.eval.speed.contenders import PLAIN, Contender, DoneError, Job, Stable, Variant, until_done
from lantern.eval.speed.phases import NetworkClock, pass_bytes
from lantern.eval.speed.race import interleave, rounded
from lantern.eval.speed.scripted import FixedDrafter, ScriptedVerifier
from lantern.methods.registry import METHODS, Decoder
from lantern.verifiers.gumbel import GumbelVerifier

NODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128)
PASSES, ROUNDS = 5, 3


@dataclass(frozen=True)
class PassCurve:
    """Times target passes over trees of any size while an image is decoded."""

    stable: Stable
    sampling: Sampling
    job: Job

    @property
    def device(self) -> torch.device:
        """Device of the passes."""
        return self.job.condition.device

    def measure(self, variant: Variant, nodes: Sequence[int], *, copy_gbps: float) -> dict[str, Any]:
        """Return T(n) in milliseconds and T(n) / T(1); passes of all n are interleaved.

        T(n) / T(1) is also the number of codes per pass at which a pass over n nodes breaks even.
        """
        nodes = sorted({1, *nodes})
        runs = [lambda _, n=n: self.seconds(variant, n) for n in nodes]
        for run in runs:
            run(0)
        _, found = interleave(runs, ROUNDS, device=self.device)
        spent = {n: median(of_n) for n, of_n in zip(nodes, found, strict=True)}
        read = pass_bytes(original(self._target(variant)), rows=len(self.job.keys) * self.sampling.rows)
        speed = read / spent[1] / 1e9
        return {
            "variant": str(variant),
            "nodes": nodes,
            "ms": [rounded(1e3 * spent[n]) for n in nodes],
            "over_one": [rounded(spent[n] / spent[1]) for n in nodes],
            "gbps": rounded(speed),
            "share_of_copy": rounded(speed / copy_gbps),
        }

    def seconds(self, variant: Variant, nodes: int) -> float:
        """Return the median seconds of scoring `nodes` nodes, measured at the target during a generation."""
        target, verifier = self._target(variant), GumbelVerifier()
        method, parts = METHODS[PLAIN], Decoder(METHODS[PLAIN], target, self.sampling, None, None)
        config = target.config
        if nodes > 1:
            drafter, method = FixedDrafter(nodes, config.vocab_size), METHODS["eagle1"]
            script = ScriptedVerifier(verifier, (1,), (1,), config.block_size)
            parts = Decoder(method, target, self.sampling, drafter, script)
        # only the pass is timed: the rest of the step need not be compiled
        contender = Contender("verify", method, variant, parts)
        clock = NetworkClock(self.device)

        def watch(step: Step) -> None:
            if step.index == 0:
                clock.reset()
            if step.index == PASSES:
                raise DoneError(0.0)

        with clock.watching({"target": (target, ("forward",))}):
            until_done(contender, self.job, watch)
        return median(clock.calls["target.forward"])

    def _target(self, variant: Variant) -> Target:
        model = self.stable.model(variant)
        return model.engine.prepare(model.target)


def most(figures: Mapping[str, Any], plain: Mapping[str, Any], tau: float) -> float | None:
    """Return the speedup if everything but the target's passes were free: tau T(1) / T(n); None if unknown.

    `figures` and `plain` are the phase entries of the method and of plain decoding.
    """
    if figures["pass_ms"] is None or plain["pass_ms"] is None:
        return None
    return rounded(tau * plain["pass_ms"] / figures["pass_ms"])
