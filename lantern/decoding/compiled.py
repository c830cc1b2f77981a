"""Steps compiled by torch.compile: off unless asked for, because the first pass of every size takes a while."""

from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from lantern.decoding.run import Programs, draft, settle
from lantern.decoding.runners import is_run_by, make_eager, mark


def _of_inputs(checks: Any) -> list[bool]:
    """Which of torch's checks before a call stay on: those of the inputs, not of hundreds of modules, which are frozen.

    Without `_own_forward`, one of two targets of a size would be run with the packed weights of the other.
    """
    return torch.compiler.skip_guard_on_all_nn_modules_unsafe(checks)


# kernels chosen by measurement, without a word of each measurement on stderr
OPTIONS: dict[str, Any] = {
    "max_autotune": True,
    "max_autotune_report_choices_stats": False,
    "guard_filter_fn": _of_inputs,
}


def compile_target(target: nn.Module) -> None:
    """Compiles a target's passes in place; each new size of tree or batch is compiled at first use. Twice is once.

    On a CPU a pass is one program, with kernels chosen by measurement and the weights packed into them: to be called
    again when weights have changed. Elsewhere each layer is compiled for itself (regional compilation), of which the
    first serves all others.
    """
    if is_run_by(target, "compiled"):
        return
    make_eager(target)
    mark(target, "compiled")
    if not _is_on_cpu(target):
        for layer in target.get_submodule("layers").children():
            layer.compile(dynamic=False)
        return
    import torch._inductor.config as inductor

    _allow_sizes()
    called = torch.compile(_own_forward(target), dynamic=False, options=OPTIONS)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with inductor.patch(freezing=True):  # read while tracing, where the options of one function do not reach
            return called(*args, **kwargs)

    target.forward = forward


@cache
def compiled_programs() -> Programs:
    """Drafting, and walking with committing, as two programs."""
    return Programs(draft=_compiled(draft), settle=_compiled(settle))


def _compiled(function: Callable[..., Any]) -> Any:
    _allow_sizes()
    return torch.compile(function, dynamic=False)


def _own_forward(target: nn.Module) -> Any:
    """The module's forward with code of its own: programs are found by code, and hold the packed weights of one."""
    shared = type(target).forward
    function = FunctionType(
        shared.__code__.replace(), shared.__globals__, shared.__name__, shared.__defaults__, shared.__closure__
    )
    function.__kwdefaults__ = shared.__kwdefaults__
    return MethodType(function, target)


def _allow_sizes() -> None:
    """Lets one function be compiled for many sizes of trees, batches and prompts, without tables on stderr."""
    import torch._dynamo.config as tracing
    import torch._inductor.select_algorithm as selecting

    selecting.PRINT_AUTOTUNE = False
    tracing.recompile_limit = max(tracing.recompile_limit, 64)


def _is_on_cpu(module: nn.Module) -> bool:
    return next(module.parameters()).device == torch.device("cpu")
