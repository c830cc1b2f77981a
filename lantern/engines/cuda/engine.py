"""The engine `graph`: passes by Triton kernels, and one CUDA graph for a whole step."""

import dataclasses
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from lantern.engines.cuda.rows import ROWS, constant_rows
from lantern.engines.engine import Engine, Module

if TYPE_CHECKING:
    from lantern.core.types import Drafter, Target
    from lantern.decoding.loop import Programs

PRODUCTS = ("cublas", "fused", "fused+pdl")
UNMEASURED = "the kernels for this model were tested in Triton's interpreter, and not on a GPU"


@dataclass(frozen=True)
class GraphEngine(Engine):
    """Replays each step, plain or drafted, as one CUDA graph. Passes are Triton kernels if the target fits them.

    A pass has `rows` rows per line (guidance row of an image), fewer in large batches (`rows.constant_rows`). Trees
    of at most so many nodes give plain decoding's codes. Targets that do not fit the kernels run through torch, with
    layers compiled if `compiles_steps`. Without a GPU, Triton's interpreter (TRITON_INTERPRET=1) runs the same kernels
    for tests, step by step and without graphs. `products` of small passes over LlamaGen's layers are cuBLAS's, or
    `fused` with what stands around them, with "fused+pdl" also started early. ValueError for another number of rows and
    for other products.
    """

    rows: int = ROWS
    products: str = "cublas"
    name: ClassVar[str] = "graph"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows not in (16, 32, 64):
            raise ValueError(f"rows is {self.rows}, expected 16, 32 or 64")
        if self.products not in PRODUCTS:
            raise ValueError(f"products is {self.products!r}, expected one of {', '.join(PRODUCTS)}")

    def available(self, target: "Target", *, can_wait: bool = True) -> str | None:
        """Return a reason for targets that are not on CUDA."""
        device = target.tok_embeddings.weight.device.type
        if device != "cuda" and self.without_kernels(target) is not None:
            return f"CUDA graphs need a CUDA device, the model is on {device}: use another engine, or move the model"
        return super().available(target, can_wait=can_wait)

    def refuses_layers(self, target: "Target") -> str | None:
        """Return None: passes that are no kernels are captured as torch runs them."""
        return None

    def remark(self, target: "Target") -> str | None:
        """Return why passes do not run as Triton kernels, or that those of this model have not run on a GPU."""
        if (reason := self.without_kernels(target)) is not None:
            return f"passes run through torch: {reason}"
        return None if target.config.family == "llamagen" else UNMEASURED

    def without_kernels(self, target: "Target") -> str | None:
        """Return why passes of a target run through torch, or None if they are Triton kernels."""
        if find_spec("triton") is None:
            return "Triton, which builds the GPU kernels, is not installed: pip install triton"
        from lantern.engines.cuda.kernels import is_interpreted
        from lantern.engines.cuda.trial import failed_kernels
        from lantern.engines.prepared import original

        if target.tok_embeddings.weight.device.type != "cuda" and not is_interpreted():
            return "the GPU kernels need a CUDA device"
        if self.weights == "int4":
            return "the GPU kernels read weights in full or in int8, int4 was given"
        if (fault := failed_kernels(original(target), self._kernels(target))) is not None:
            return fault
        if target.config.family == "llamagen":
            from lantern.engines.cuda.target import refusal
        else:
            from lantern.engines.cuda.llama import refusal
        return refusal(original(target))

    def refuses(self, drafter: "Drafter") -> str | None:
        """Return a reason for trees whose size the host chooses from the step before."""
        if drafter.needs_host:
            return (
                f"the trees of {type(drafter).__name__} change size from step to step, which a CUDA graph cannot "
                "replay: set adaptive to False, or use --engine eager"
            )
        return super().refuses(drafter)

    def keeps_codes(self, target: "Target", *, nodes: int, lines: int) -> bool:
        """Return whether passes are kernels that keep the bits of a row here, of as many rows as plain decoding."""
        if self.without_kernels(target) is not None or nodes > constant_rows(lines, self.rows):
            return False
        from lantern.engines.cuda.fused_target import is_fused
        from lantern.engines.cuda.target import keeps_rows
        from lantern.engines.cuda.trial import trial_of

        rows = lines * constant_rows(lines, self.rows)
        return trial_of(target).keeps_bits and (is_fused(target, rows) or keeps_rows(target, rows))

    def most_nodes(self, lines: int) -> int:
        """Return the rows of plain decoding, which shrink as the batch grows."""
        return constant_rows(lines, self.rows)

    def programs(self) -> "Programs":
        """Return the parts of a step, replayed from a graph."""
        from lantern.engines.cuda.graphs import graphed

        return dataclasses.replace(super().programs(), wrap=graphed, may_look=False)

    def prepare_drafter(self, module: Module) -> Module:
        """Return a drafter's module; a smaller target with passes of one size."""
        return _fixed(module)

    @property
    def rounds_wide(self) -> bool:
        """False: passes already round in the same way."""
        return False

    def _kernels(self, target: Any) -> Any:
        """Return the class of a target's kernel passes."""
        from lantern.engines.cuda.fused_target import FusedEarlyTarget, FusedTarget
        from lantern.engines.cuda.llama import LlamaTarget
        from lantern.engines.cuda.target import KernelTarget

        of_llamagen: dict[str, Any] = dict(zip(PRODUCTS, (KernelTarget, FusedTarget, FusedEarlyTarget), strict=True))
        return of_llamagen[self.products] if target.config.family == "llamagen" else LlamaTarget

    def _prepare(self, target: Any) -> "Target":
        if self.without_kernels(target) is None:
            from lantern.engines.cuda.trial import trial_of

            made = self._kernels(target)(target, self.rows)
            if trial_of(made).fault is None:
                return made
        if not self.compiles_steps or target.config.family != "llamagen":
            return _fixed(target)
        from lantern.engines.compiled import compiled

        return compiled(target)


def _fixed(module: Any) -> Any:
    """Return a target with newlines with passes of one size, which a graph can replay; other modules as they are."""
    from lantern.engines.prepared import FixedPasses
    from lantern.models.transformers.target import TransformersTarget

    has_newlines = isinstance(module, TransformersTarget) and module.config.raster.newlines
    return FixedPasses(module) if has_newlines else module
