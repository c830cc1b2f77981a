"""The engine `cpu`: passes (`target.py`) and whole rounds (`steps.py`) as C++ programs."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lantern.core.sampling import Sampling
from lantern.core.types import Drafter, Target
from lantern.decoding.loop import State
from lantern.decoding.rounds import Rounds, TorchRounds
from lantern.engines.cpu import build
from lantern.engines.cpu.drafter import packed_drafter
from lantern.engines.cpu.steps import FusedRounds, is_fused, nodes_of
from lantern.engines.cpu.target import CpuTarget, check
from lantern.engines.engine import Engine


@dataclass(frozen=True)
class CpuEngine(Engine):
    """Runs a pass as one C++ program, and whole rounds of plain decoding and windows of samples.

    The bits of a token's logits depend on nothing that is scored with it.
    """

    name: ClassVar[str] = "cpu"
    fits_windows: ClassVar[bool] = True

    def why_not(self, target: Target, drafter: Drafter | None = None, *, can_wait: bool = True) -> str | None:
        """Return a reason for other layers, devices, dtypes and widths, and where the library is missing."""
        if target.config.family != "llamagen":
            return "the cpu engine runs LlamaGen's layers, not this model's: use --engine eager"
        if self.weights == "int4":
            return "the cpu engine reads weights in full or in int8, int4 was given: use --engine eager"
        if self.is_fp8:
            return "the cpu engine keeps keys and values in fp32, a KV cache in fp8 was given: use --engine eager"
        try:
            check(target)
            missing = build.missing()
            if missing is not None:
                build.find_compiler()
        except ValueError as error:
            return str(error)
        if missing is None or can_wait:
            return None
        return f"{missing}: `lantern doctor --build` or `--engine cpu` builds it"

    def _prepare(self, target: Any) -> Target:
        return CpuTarget(target)

    def prepare_part(self, module: Any) -> Any:
        """Return a drafter with packed layers, or LlamaGen's tokenizer with a packed decoder; others as they are."""
        from lantern.engines.cpu.vq import packed_vq

        return packed_vq(packed_drafter(module, int8=self.weights == "int8"))

    def drive(self, states: Sequence[State], earlier: Rounds | None = None) -> Rounds:
        """Return what takes rounds: fused ones if the generations have them."""
        return FusedRounds(states, earlier) if is_fused(states[0]) else TorchRounds(states, earlier)

    def group(self, state: State) -> Hashable:
        """Return what generations have in common: fused rounds, with passes of one size, or none."""
        if not is_fused(state):
            return state.group
        return ("fused", nodes_of(state), state.group)

    def fuses_plain(self, sampling: Sampling) -> bool:
        """Return whether plain decoding runs in C++: not with top-p."""
        return sampling.top_p == 1

    def keeps_bits(self, target: Target, nodes: int, lines: int) -> bool:
        """Return True."""
        return True
