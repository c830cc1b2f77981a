"""The engine `graph`: passes by Triton kernels, and one CUDA graph for a whole round."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from lantern.engines.cuda import constant_rows
from lantern.engines.engine import Engine, refuses_weights

if TYPE_CHECKING:
    from lantern.core.types import Drafter, Target
    from lantern.decoding.loop import State
    from lantern.decoding.rounds import Rounds

PRODUCTS = ("fused", "cublas")
UNMEASURED = "the kernels for this model were tested in Triton's interpreter, and not on a GPU"


@dataclass(frozen=True)
class GraphEngine(Engine):
    """Replays each round, plain or drafted, as one CUDA graph. Passes are Triton kernels if the target fits them.

    A pass has 32 rows per line (guidance row of an image), fewer in large batches (`constant_rows`). Trees
    of at most so many nodes give plain decoding's tokens. Targets that do not fit the kernels run through torch.
    Without a GPU, Triton's interpreter (TRITON_INTERPRET=1) runs the same kernels for tests, step by step and without
    graphs. `products` of small passes over LlamaGen's layers are `fused` with what stands around them; with "cublas",
    or if those failed, they are cuBLAS's. ValueError for other products.
    """

    products: str = "fused"
    name: ClassVar[str] = "graph"
    captures: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.products not in PRODUCTS:
            raise ValueError(f"products is {self.products!r}, expected one of {', '.join(PRODUCTS)}")

    def why_not(self, target: "Target", drafter: "Drafter | None" = None, *, can_wait: bool = True) -> str | None:
        """Return a reason for targets that are not on CUDA, and for trees whose size the host chooses in each step."""
        device = target.tok_embeddings.weight.device.type
        if device != "cuda" and self.without_kernels(target) is not None:
            return f"CUDA graphs need a CUDA device, the model is on {device}: use another engine, or move the model"
        if drafter is not None and drafter.needs_host:
            return (
                f"the trees of {type(drafter).__name__} change size from step to step, which a CUDA graph cannot "
                "replay: use --engine eager, or set adaptive to False where there is that setting"
            )
        if target.config.family != "llamagen" and target.config.processes > 1:
            return "the graph engine runs models in one process, this one is shared: use --engine eager"
        return refuses_weights(target, self.weights)

    def remark(self, target: "Target") -> str | None:
        """Return why passes do not run as Triton kernels, or that those of this model have not run on a GPU."""
        if (reason := self.without_kernels(target)) is not None:
            return f"passes run through torch: {reason}"
        return None if target.config.family == "llamagen" else UNMEASURED

    def without_kernels(self, target: "Target") -> str | None:
        """Return why passes of a target run through torch, or None if they are Triton kernels."""
        if find_spec("triton") is None:
            return "Triton, which builds the GPU kernels, is not installed: pip install triton"
        from lantern.core.weights import left_out, original
        from lantern.engines.cuda.kernels import is_interpreted
        from lantern.engines.cuda.trial import failed_kernels

        if target.tok_embeddings.weight.device.type != "cuda" and not is_interpreted():
            return "the GPU kernels need a CUDA device"
        if self.weights == "int4":
            return "the GPU kernels read weights in full or in int8, int4 was given"
        if (reason := left_out(original(target))) is not None:
            return f"the GPU kernels read the weights themselves, and {reason}"
        faults = [failed_kernels(original(target), kind, is_fp8=self.is_fp8) for kind in self._kinds(target)]
        if all(faults):
            return faults[-1]
        if target.config.family == "llamagen":
            from lantern.engines.cuda.target import refusal
        else:
            from lantern.engines.cuda.llama import refusal
        return refusal(original(target))

    def _prepare(self, target: Any) -> "Target":
        if self.without_kernels(target) is None:
            from lantern.engines.cuda.trial import trial_of

            for made in (kind(target) for kind in self._kinds(target)):
                if trial_of(made, is_fp8=self.is_fp8).fault is None:
                    return made
        return self.prepare_part(target)

    def prepare_part(self, module: Any) -> Any:
        """Return a target with newlines with passes of one size, which a graph can replay.

        With `fused` products an EAGLE-1 module has passes by kernels too, not in fp32. Others are returned as they are.
        """
        if self.products == "fused" and find_spec("triton") is not None:
            from lantern.engines.cuda.fused_eagle import fused_eagle

            module = fused_eagle(module)
        from lantern.core.weights import FixedPasses
        from lantern.models.transformers.target import TransformersTarget

        has_newlines = isinstance(module, TransformersTarget) and module.config.raster.newlines
        return FixedPasses(module) if has_newlines else module

    def drive(self, states: "Sequence[State]", earlier: "Rounds | None" = None) -> "Rounds":
        """Return what replays the rounds of one generation, or those of a wave for several. Without a GPU, and of row
        fronts, which the host counts, they run one operation at a time.
        """
        import torch

        from lantern.decoding.row_front import RowFront
        from lantern.decoding.wave import Wave, wave_of

        if len(states) > 1 or isinstance(earlier, Wave):
            return wave_of(states, earlier, lambda batch: self.drive([batch]))
        if len(states) == 1 and torch.cuda.is_available() and not isinstance(states[0], RowFront):
            from lantern.engines.cuda.graphs import GraphRounds

            return GraphRounds(states[0])
        return super().drive(states)

    def group(self, state: "State") -> Hashable:
        """Return what generations have in common that one wave may hold: also their method and the form of sampling."""
        if state.kind is None or not state.drafter.memory:
            return id(state)
        return state.group, state.kind

    def keeps_bits(self, target: "Target", nodes: int, lines: int) -> bool:
        """Return whether passes are kernels that keep the bits of a row here, of as many rows as plain decoding."""
        if self.without_kernels(target) is not None or nodes > constant_rows(lines):
            return False
        from lantern.engines.cuda.target import KernelTarget
        from lantern.engines.cuda.trial import trial_of

        if not isinstance(target, KernelTarget) or not trial_of(target, is_fp8=self.is_fp8).keeps_bits:
            return False
        return target.program.keeps_rows(lines * constant_rows(lines))

    def free_nodes(self, lines: int) -> int:
        """Return the rows of plain decoding, which shrink as the batch grows."""
        return constant_rows(lines)

    def _kinds(self, target: Any) -> list[Any]:
        """Return the classes of a target's kernel passes, the preferred one first."""
        from lantern.engines.cuda.fused import spills
        from lantern.engines.cuda.llama import LlamaTarget
        from lantern.engines.cuda.target import FusedTarget, KernelTarget

        if target.config.family != "llamagen":
            return [LlamaTarget]
        fuses = self.products == "fused" and not spills(target.tok_embeddings.weight)
        return [FusedTarget, KernelTarget] if fuses else [KernelTarget]
