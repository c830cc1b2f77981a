"""What belongs to the process: signals that end it, how other libraries are loaded, its connection to Ray.

SIGINT (Ctrl-C), SIGTERM and SIGHUP end a command or a training cleanly; a second one ends the process at once.

PyPI's torchvision has an extension that links CUDA. With a CPU build of torch the extension does not
load, `torchvision::nms` stays undefined, and importing torchvision fails; so do transformers,
diffusers, torchmetrics, clean-fid and open_clip. Declaring the schemas of two operators is enough, since
lantern uses only the Python code of torchvision.
"""

import importlib.util
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, ClassVar

from lantern.core.config import install_hint

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if sys.platform != "win32":  # where a terminal that is closed sends no signal
    WORDS[signal.SIGHUP] = "terminal closed"


class Stopped(KeyboardInterrupt):
    """Ends a command because of a signal; `code` is the exit code."""

    def __init__(self, number: int) -> None:
        super().__init__(WORDS[signal.Signals(number)])
        self.code = 128 + number


class Stopping:
    """Context in which the first of these signals raises Stopped, and a second one ends the process at once.

    In a block under `shield` the first signal takes effect at the end of the block, so that the block is done whole or
    not begun. A context within another begins with the check of that. Outside of the main thread, where Python delivers
    no signals, the context does nothing.
    """

    _entered: ClassVar[list["Stopping"]] = []  # in the main thread, the innermost last

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._pending = self._shields = 0

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            if self._entered:
                self._entered[-1].check()
            self._entered.append(self)
            # a signal that the caller ignores, as a shell does for background jobs, stays ignored
            handled = [number for number in WORDS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
            self._before = {number: signal.signal(number, self._stop) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        if self in self._entered:
            self._entered.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def is_requested(self) -> bool:
        """Whether a signal has arrived."""
        return bool(self._pending)

    @contextmanager
    def shield(self, *, raises: bool = True) -> Iterator[None]:
        """Delay a signal until the block is done; unless it `raises` then, until the next `check`."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        if raises:
            self.check()

    def check(self) -> None:
        """Raise Stopped if a signal was delayed, or if foreign code, such as a `__del__`, swallowed its exception."""
        if self._pending and not self._shields:
            raise Stopped(self._pending)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        for each in self._before:
            # the second signal gets the system's default action, which works even while Python code is blocked
            signal.signal(each, signal.SIG_DFL)
        self._pending = number
        self.check()


def launched() -> tuple[int, int]:
    """Return the number of this process and how many torchrun or accelerate have launched, (0, 1) without them.

    ValueError for other numbers.
    """
    stated = [os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")]
    if not all(map(str.isdecimal, stated)):
        return 0, 1
    rank, processes = map(int, stated)
    if rank >= processes:
        raise ValueError(f"RANK is {rank}, wanted a number below WORLD_SIZE, {processes}: start lantern by torchrun")
    return rank, processes


_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[object] = []  # a Library undefines its operators when it is collected


def watch_import() -> None:
    """Install an import hook that declares the operators when torchvision is imported.

    This imports neither torch nor torchvision.
    """
    if TorchvisionLoader not in sys.meta_path and "torchvision" not in sys.modules:
        sys.meta_path.insert(0, TorchvisionLoader)


def define_missing_ops(folder: Path) -> bool:
    """Declare torchvision's operators if the extension in its `folder` does not load; return whether it did not."""
    import torch

    for extension in (*folder.glob("_C*.so"), *folder.glob("_C*.pyd")):
        try:
            torch.ops.load_library(str(extension))
        except (ImportError, OSError):
            continue
    if hasattr(torch.ops.torchvision, "nms"):
        return False
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _libraries.append(library)
    return True


class TorchvisionLoader(SourceFileLoader):
    """Finds torchvision as Python does, and declares its operators before it is executed."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of torchvision with this loader; None for all other modules."""
        spec = PathFinder.find_spec(name, path, target) if name == "torchvision" else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = cls(spec.loader.name, spec.loader.path)
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Declare the operators, and execute the module."""
        if importlib.util.find_spec("torch") is not None:
            define_missing_ops(Path(self.path).parent)
        super().exec_module(module)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress, while transformers loads something, its progress bars, messages below errors, and warnings."""
    from transformers import logging

    had_bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()


def check_ray() -> None:
    """Raise ImportError without Ray."""
    try:
        import ray  # noqa: F401 # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ImportError(f"Ray is not installed; {install_hint('ray')}") from error


@contextmanager
def cluster(address: str | None = None) -> Iterator[Mapping[str, float]]:
    """Connect to Ray, or start it locally, without its output; yield the resources of the cluster.

    `address` is that of a cluster; None starts Ray on this machine and stops it at the end. A connection that exists
    already is used and stays. ImportError without Ray.
    """
    import logging

    check_ray()
    import ray  # pyright: ignore[reportMissingImports]

    began = not ray.is_initialized()
    if began:
        # actors import the package from the same path, installed or not
        found: Any = {"runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}}
        where: Any = {"address": address} if address else {"include_dashboard": False}
        kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **found, **where)
        if threading.current_thread() is threading.main_thread():  # with Ray's handler SIGTERM aborts the process
            for number, handler in kept.items():
                if handler is not None:  # one that Python did not install cannot be restored
                    signal.signal(number, handler)
    try:
        yield ray.cluster_resources()
    finally:
        if began:
            ray.shutdown()


def machines() -> int:
    """Return the number of machines of the cluster that are alive."""
    import ray  # pyright: ignore[reportMissingImports]

    return max(1, sum(bool(node["Alive"]) for node in ray.nodes()))
