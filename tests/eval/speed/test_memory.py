"""Peak memory in a separate process."""

import mmap
import sys
from pathlib import Path

import pytest
import torch

from lantern.eval.speed import memory
from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_peak_memory_is_measured_in_a_separate_process(folder: Path) -> None:
    requested = {
        "model": str(folder),
        "method": "eagle1",
        "dtype": "fp32",
        "device": "cpu",
        "threads": 1,
        "sampling": {},
    }
    found = memory.peak_of(requested)
    assert found["weights"] > 0 and found["added"] >= 0
    assert found["peak"] == pytest.approx(found["weights"] + found["added"], abs=0.02)


def test_a_measuring_process_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(OSError, match="failed: no message on stderr"):
        memory.peak_of({})


def test_peak_memory_includes_freed_memory() -> None:
    memory.forget_peak()
    before = memory.peak_mib()
    # Fresh pages: what earlier tests left free is not used.
    block = torch.frombuffer(mmap.mmap(-1, 1 << 28), dtype=torch.uint8).fill_(1)
    assert memory.peak_mib() - before > 30 or not memory.CLEAR.is_file()
    assert block[-1] == 1
