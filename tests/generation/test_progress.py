import io
import sys
from typing import Any

import pytest
import torch

from lantern.core.types import Step
from lantern.decoding.loop import NO_SCORES
from lantern.generation.generator import Canvas, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> Progress:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("lantern.generation.generator.INTERVAL", 0.0)
    return Progress(4, 16)


def step(index: int, start: list[int], counts: list[int]) -> Step:
    places = torch.tensor(start), torch.tensor(counts)
    return Step(index, *places, torch.zeros(len(start), max(max(counts), 1), dtype=torch.long), NO_SCORES)


def run(progress: Any, images: int, *, steps: int = 4) -> None:
    for index in range(steps):
        progress(step(index, [4 * index] * images, [4] * images))


def test_the_bar_counts_pictures_of_all_batches(progress: Progress) -> None:
    run(progress, 3)
    run(progress, 1, steps=2)
    # three of the first four tokens are given
    assert "56/64" in str(progress.bar) and "2.50 tokens per step" in str(progress.bar)


def test_tokens_of_an_unfinished_batch_are_subtracted(progress: Progress) -> None:
    run(progress, 4, steps=3)
    assert "48/64" in str(progress.bar) and "0/4 done, slowest 12/16" in str(progress.bar)
    progress(step(0, [0, 0], [4, 2]))
    assert " 6/64" in str(progress.bar) and "0/2 done, slowest 2/16" in str(progress.bar)


def test_the_device_is_not_read_at_every_pass(progress: Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lantern.generation.generator.INTERVAL", 0.1)
    requested = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: requested.append(1) or tolist(self))
    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    run(progress, 2)
    assert len(requested) == 1


def test_a_canvas_is_reset_by_a_new_batch() -> None:
    canvas = Canvas(16)
    run(canvas.add, 4, steps=2)
    assert (canvas.tokens >= 0).sum(1).tolist() == [8] * 4
    canvas.add(step(0, [0, 0], [3, 1]))
    assert (canvas.tokens >= 0).sum(1).tolist() == [3, 1]
