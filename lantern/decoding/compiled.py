"""Passes compiled by torch.compile: off unless asked for, because the first pass of every size takes a while."""

from typing import Any

import torch
from torch import nn


def compile_passes(target: nn.Module, drafter: nn.Module | None = None) -> None:
    """Compiles a target's and a drafter's passes in place; each new size of tree or batch is compiled at first use.

    On a CPU the whole pass is one program with kernels chosen by measurement and the target's weights packed into it:
    weights that change afterwards are not seen. Elsewhere each layer is compiled for itself (regional compilation), of
    which the first serves all others.
    """
    if _is_on_cpu(target):
        target.compile(dynamic=False, options={"max_autotune": True, "freezing": True})
        if drafter is not None:
            drafter.compile(dynamic=False, options={"max_autotune": True})
        return
    layers: Any = [*target.get_submodule("layers").children()]
    layers += [] if drafter is None else [*drafter.get_submodule("layers").children()]
    for layer in layers:
        layer.compile(dynamic=False)


def _is_on_cpu(module: nn.Module) -> bool:
    return next(module.parameters()).device == torch.device("cpu")
