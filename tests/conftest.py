"""Settings of the whole suite: threads, the C++ library built once, and tests that need a GPU."""

import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Worker processes share the cores: with a thread per core each, they would wait for one another.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))

# A shell's background jobs ignore these signals, and so would the commands that tests send them to.
if os.name == "posix":
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)

# Before any test module: torchvision must find its operators defined, whatever imports it first.
import torch

import lantern  # noqa: F401
from lantern.engines.cpu import build as building

if TYPE_CHECKING:
    from lantern.models.folder import Model

# Without a GPU Triton's kernels run in its interpreter, which is chosen when triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
        # Published configurations are other settings of methods that the default run tests.
        if "-paper" in item.name:
            item.add_marker("slow")


def _one_at_a_time(build: Callable[[str], Path]) -> Callable[[str], Path]:
    """Return a function that builds the C++ library in one worker process while the others wait for it."""

    @wraps(build)
    def locked(compiler: str) -> Path:
        asked = time.time()
        with (Path(tempfile.gettempdir()) / f"lantern-tests-{os.getuid()}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            name = building.library_name()
            made = [folder / name for folder in building.folders() if (folder / name).is_file()]
            return made[0] if made and made[0].stat().st_mtime >= asked else build(compiler)

    return locked


@pytest.fixture(scope="session", autouse=True)
def _scripted_pass_times() -> Iterator[None]:
    """Let method "auto" choose a window of four where there is no profile, on every machine."""
    from lantern.generation import choice

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "pass_times", lambda *_, **__: {1: 1.0, 2: 1.0, 4: 1.0})
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a toy model, which tests do not change."""
    from tests.tiny_folder import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture(scope="session")
def model(folder: Path) -> "Model":
    """The model of that folder, which tests do not change either."""
    from lantern.models.folder import load_model

    return load_model(folder, device="cpu", engine="eager")


@pytest.fixture(scope="session")
def embedded() -> "Model":
    """The embedded model without its drafters, which tests do not change."""
    from lantern.models.folder import load_model

    return load_model("lantern-emoji", parts=("text", "vq"), device="cpu")


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "toy"))


building._build = _one_at_a_time(building._build)
os.fsync = lambda _: None  # no test outlasts a loss of power, and thousands of small files are written
