"""Runs taken in turn: every contender once a round, the order turned by one place from round to round."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")


def turn_order(contenders: int, number: int) -> list[int]:
    """Who runs when in round `number`: 0 1 2, then 1 2 0, then 2 0 1."""
    return [(number + place) % contenders for place in range(contenders)]


def take_turns(
    runs: Sequence[Callable[[int], Result]],
    rounds: int,
    *,
    device: torch.device,
    after_round: Callable[[int], object] | None = None,
) -> tuple[list[list[float]], list[list[Result]]]:
    """Runs each of `runs` once a round with the round's number; gives seconds and results by contender, by round.

    What slows the machine for a while slows all alike, and nobody always follows the same neighbour.
    """
    seconds: list[list[float]] = [[] for _ in runs]
    results: list[list[Result]] = [[] for _ in runs]
    for number in range(rounds):
        for who in turn_order(len(runs), number):
            begin = now(device)
            result = runs[who](number)
            seconds[who].append(now(device) - begin)
            results[who].append(result)
        if after_round is not None:
            after_round(number)
    return seconds, results


def now(device: torch.device) -> float:
    """The time once the device has done all that it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
