"""The engine `graph`: one CUDA graph for a whole step."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lantern.engines.engine import Engine

if TYPE_CHECKING:
    from lantern.core.types import Drafter, Target
    from lantern.decoding.loop import Programs


@dataclass(frozen=True)
class GraphEngine(Engine):
    """Replays each step, plain or drafted, as one CUDA graph. With `compiles_steps` layers are compiled too."""

    name: ClassVar[str] = "graph"

    def available(self, target: "Target", *, can_wait: bool = True) -> str | None:
        """Return a reason for targets that are not on CUDA."""
        device = target.tok_embeddings.weight.device.type
        if device != "cuda":
            return f"CUDA graphs need a CUDA device, the model is on {device}: use another engine, or move the model"
        return super().available(target, can_wait=can_wait)

    def refuses(self, drafter: "Drafter") -> str | None:
        """Return a reason for trees whose size the host chooses from the step before."""
        if drafter.needs_host:
            return (
                f"the trees of {type(drafter).__name__} change size from step to step, which a CUDA graph cannot "
                "replay: set adaptive to False, or use --engine eager"
            )
        return super().refuses(drafter)

    def programs(self) -> "Programs":
        """Return the parts of a step, replayed from a graph."""
        from lantern.engines.cuda.graphs import GraphedStepper

        return dataclasses.replace(super().programs(), wrap=GraphedStepper, may_look=False)

    def _prepare(self, target: Any) -> "Target":
        if not self.compiles_steps:
            return target
        from lantern.engines.compiled import compiled

        return compiled(target)
