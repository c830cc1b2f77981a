"""Errors of one line, as every refusal is."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(call: Callable[..., object], *given: Any, error: type[Exception] = ValueError, **how: Any) -> str:
    """Return the line with which a call is refused."""
    with pytest.raises(error) as caught:
        call(*given, **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)
