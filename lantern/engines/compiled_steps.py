"""Drafting and verification compiled by torch.compile, for engines that compile steps."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from lantern.decoding.loop import Programs, draft, verify


@cache
def compiled_programs() -> Programs:
    """Return drafting and verification as two compiled programs."""
    return Programs(draft=_compiled_function(draft), verify=_compiled_function(verify), may_look=False)


def _compiled_function(function: Callable[..., Any]) -> Any:
    allow_sizes()
    return torch.compile(function, dynamic=False)


def allow_sizes() -> None:
    """Allow one function to be compiled for many sizes of trees, batches and prompts, without tables on stderr."""
    import torch._dynamo.config as tracing
    import torch._inductor.select_algorithm as selecting

    selecting.PRINT_AUTOTUNE = False
    tracing.recompile_limit = max(tracing.recompile_limit, 64)
