"""Generation in the dtypes of the weights, whatever mode its caller is in."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def without_autocast(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function run as outside of `torch.autocast`, which would change tokens, and what the C++ engine reads."""

    @wraps(function)
    def run(*args: P.args, **named: P.kwargs) -> T:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **named)

    return run
