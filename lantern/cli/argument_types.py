"""Types for argparse: numbers with bounds, names from a list, settings and paths; errors state what was wanted."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from lantern.cli.command import nearest


def integer(low: int, high: int) -> Callable[[str], int]:
    """Return a type for whole numbers in [low, high]."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text[:40]!r}, wanted a whole number from {low} to {high}")
        return value

    return parse


def real(low: float, high: float) -> Callable[[str], float]:
    """Return a type for finite numbers in [low, high]."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high):
            raise argparse.ArgumentTypeError(f"{text[:40]!r}, wanted a number from {low:g} to {high:g}")
        return value

    return parse


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """Return a type for one of `names`."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r}, wanted one of {', '.join(names)}{nearest(text, list(names))}"
            )
        return text

    return parse


def existing(text: str) -> Path:
    """Parse the path of a file or folder that exists."""
    try:
        if Path(text).exists():
            return Path(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: {error.strerror}") from error
    raise argparse.ArgumentTypeError(f"{text[:80]!r} does not exist")
