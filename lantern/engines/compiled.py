"""The engine `compile`: passes compiled by torch.compile. The first pass of each size takes seconds to minutes."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import nn

from lantern.core.types import Scores, Target
from lantern.engines.compiled_steps import allow_sizes
from lantern.engines.engine import Engine
from lantern.engines.prepared import PreparedTarget, WeightCache


@dataclass(frozen=True)
class CompiledEngine(Engine):
    """Passes, drafting and verification by torch.compile.

    On a CPU a pass is one program, with kernels chosen by measurement and the weights packed into it. Elsewhere each
    layer is compiled (regional compilation); all layers share the program of the first.
    """

    compiles_steps: bool = True
    name: ClassVar[str] = "compile"

    def refuses_layers(self, target: Target) -> str | None:
        """Return a reason for devices on which layers are compiled one by one."""
        is_on_cpu = target.tok_embeddings.weight.device.type == "cpu"
        return None if is_on_cpu else super().refuses_layers(target)

    def _prepare(self, target: Any) -> Target:
        return compiled(target)


def compiled(target: nn.Module) -> Target:
    """Return a target with compiled passes; each new size of tree or batch is compiled at first use."""
    is_on_cpu = next(target.parameters()).device.type == "cpu"
    return CompiledPass(target) if is_on_cpu else CompiledLayers(target)


class CompiledPass(PreparedTarget):
    """A target whose pass is one program."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.refresh()

    def refresh(self) -> None:
        """Compile again if weights have changed, since they are packed into the program."""
        self._program = _PASSES.get(self.module)

    def forward(self, *args: Any, **kwargs: Any) -> Scores:
        """Score inputs, as `Target.__call__`."""
        import torch._inductor.config as inductor

        with inductor.patch(freezing=True):  # read while tracing, where the options of one function have no effect
            return self._program(self.module, *args, **kwargs)


class CompiledLayers(PreparedTarget):
    """A target whose layers are compiled one by one."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.refresh()

    def refresh(self) -> None:
        """Compile again if weights have changed place."""
        self._twin = _TWINS.get(self.module)

    def forward(self, *args: Any, **kwargs: Any) -> Scores:
        """Score inputs, as `Target.__call__`."""
        return self._twin(*args, **kwargs)


def _compiled_pass(target: nn.Module) -> Callable[..., Scores]:
    allow_sizes()
    return torch.compile(_own_forward(target), dynamic=False, options=OPTIONS)


def _compiled_layers(target: nn.Module) -> nn.Module:
    """Return a module that shares the target's weights and has compiled layers."""
    layers = nn.ModuleList([copy.copy(layer) for layer in target.get_submodule("layers").children()])
    for layer in layers:
        layer.compile(dynamic=False)
    twin = copy.copy(target)
    twin._modules = target._modules | {"layers": layers}
    return twin


_PASSES: WeightCache[Callable[..., Scores]] = WeightCache(_compiled_pass)
_TWINS: WeightCache[nn.Module] = WeightCache(_compiled_layers)


def _own_forward(target: nn.Module) -> Any:
    """Return the class's forward as a function with code of its own.

    Programs are looked up by code and hold packed weights, so each target needs its own.
    """
    shared = type(target).forward
    function = FunctionType(
        shared.__code__.replace(), shared.__globals__, shared.__name__, shared.__defaults__, shared.__closure__
    )
    function.__kwdefaults__ = shared.__kwdefaults__
    return function


def _keep_input_guards(checks: Any) -> list[bool]:
    """Return which of torch's checks before a call stay on: those of the inputs. Hundreds of modules are frozen."""
    return torch.compiler.skip_guard_on_all_nn_modules_unsafe(checks)


# kernels are chosen by measurement, without a report of each measurement on stderr
OPTIONS: dict[str, Any] = {
    "max_autotune": True,
    "max_autotune_report_choices_stats": False,
    "guard_filter_fn": _keep_input_guards,
}
