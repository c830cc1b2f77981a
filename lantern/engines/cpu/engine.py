"""The engine `cpu`: passes, samples and whole steps in C++."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from lantern.engines.engine import Engine, Module

if TYPE_CHECKING:
    from lantern.core.sampling import Sampling
    from lantern.core.types import Drafter, Generation, Target, Verifier


@dataclass(frozen=True)
class CpuEngine(Engine):
    """Runs a pass as one C++ program, built at first use, and whole steps of plain decoding and sample-match windows.

    The bits of a code's logits depend on nothing that is scored with it, so `reproducible` holds without cost.
    """

    name: ClassVar[str] = "cpu"

    def available(self, target: "Target", *, can_wait: bool = True) -> str | None:
        """Return a reason for other devices, dtypes and widths, and where the library is missing."""
        from lantern.engines.cpu import build
        from lantern.engines.cpu.target import check

        if (reason := super().available(target, can_wait=can_wait)) is not None:
            return reason
        if self.weights == "int4":
            return "the cpu engine reads weights in full or in int8, int4 was given: use --engine eager"
        try:
            check(target)
        except ValueError as error:
            return str(error)
        missing = build.missing()
        if missing is None:
            return None
        try:
            build.find_compiler()
        except ValueError as error:
            return str(error)
        return None if can_wait else f"{missing}: `lantern doctor --build` or `--engine cpu` builds it"

    def prepare_drafter(self, module: Module) -> Module:
        """Return a drafter's module with packed layers, if they fit."""
        from lantern.engines.cpu.drafter import packed_drafter

        return packed_drafter(module, int8=self.weights == "int8")

    def fused_decoder(
        self, target: "Target", sampling: "Sampling", drafter: "Drafter | None", verifier: "Verifier | None"
    ) -> "Callable[..., Generation] | None":
        """Return the decoder of fused steps: plain decoding, and windows of the target's samples; not for top-p."""
        from lantern.engines.cpu.target import CpuTarget

        is_window = drafter is not None and drafter.sample_window is not None
        if sampling.top_p < 1 or not isinstance(target, CpuTarget):
            return None
        if drafter is not None and not (is_window and verifier is not None and verifier.is_sample_match):
            return None
        from lantern.engines.cpu.target import generate

        return partial(generate, target, sampling=sampling, drafter=drafter)

    @property
    def rounds_wide(self) -> bool:
        """False: passes are reproducible as they are."""
        return False

    def window(self, target: "Target") -> int:
        """Return the window with the most codes per second, by the times of passes on this machine."""
        from lantern.engines.pass_times import best_window, pass_times

        return best_window(pass_times(self, target))

    def _prepare(self, target: Any) -> "Target":
        from lantern.engines.cpu.target import CpuTarget

        return CpuTarget(target)
