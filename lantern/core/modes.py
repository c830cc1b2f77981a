"""Generation as outside of the modes of torch that a caller may be in."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function run as outside of `torch.autocast`, which would change tokens and what the C++ engine reads, and
    with the CPU as the default device.
    """

    @wraps(function)
    def run(*args: P.args, **named: P.kwargs) -> T:
        device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
        with device, torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **named)

    return run
