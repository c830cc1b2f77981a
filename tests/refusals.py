"""Errors of one line, as every refusal is."""

from collections.abc import Callable
from typing import Any

import pytest

Errors = type[Exception] | tuple[type[Exception], ...]


def refused(
    call: Callable[..., object], *given: Any, error: Errors = ValueError, match: str | None = None, **how: Any
) -> str:
    """Return the line with which a call is refused; it holds the pattern `match`."""
    with pytest.raises(error, match=match) as caught:
        call(*given, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)
