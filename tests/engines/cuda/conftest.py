"""What tests of kernels share, and a quicker interpreter for them."""

from contextlib import suppress
from functools import cache
from types import SimpleNamespace

import pytest
import torch

with suppress(ImportError):  # replace Triton's language once, and look for no overflows: only debug mode reports them
    from triton.runtime import interpreter

    replace, kept = cache(interpreter._patch_lang), SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: (replace(function), kept)[1]
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of four positions, so that trees cross their borders; a GPU multiplies tiles of 16 at least."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if not torch.cuda.is_available():
        monkeypatch.setattr("lantern.engines.cuda.kernels.BLOCK", 4)
