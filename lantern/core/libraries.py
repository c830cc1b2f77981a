"""How other libraries are loaded: torchvision with a CPU build of torch, transformers without messages.

PyPI's torchvision has an extension that links CUDA. With a CPU build of torch the extension does not
load, `torchvision::nms` stays undefined, and importing torchvision fails; so do transformers,
diffusers, torchmetrics, clean-fid and open_clip. Declaring the schemas of two operators is enough, since
lantern uses only the Python code of torchvision.
"""

import importlib.util
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

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
