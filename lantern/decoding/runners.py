"""How a target's passes are run: what compiling or fusing puts on it, whether that still holds, and taking it off."""

from typing import Any

from torch import nn


def weights_of(module: nn.Module) -> tuple[Any, ...]:
    """What changes whenever a weight does, or its dtype or device."""
    return tuple((p.device, p.dtype, p.data_ptr(), p._version) for p in module.parameters())


def is_run_by(target: Any, runner: str) -> bool:
    """Whether passes are run by "fused" or "compiled" code that was made of the weights as they are now."""
    return getattr(target, "_run_by", None) == (runner, weights_of(target))


def mark(target: Any, runner: str) -> None:
    """Notes which code, made of which weights, was put on a target."""
    target.__dict__["_run_by"] = (runner, weights_of(target))


def make_eager(target: Any) -> None:
    """Takes off what was put on a target, by us alone: layers are dispatched one by one again."""
    if "_run_by" not in vars(target):
        return
    for name in target.runner:
        target.__dict__.pop(name, None)
    for layer in target.get_submodule("layers").children():
        layer._compiled_call_impl = None
