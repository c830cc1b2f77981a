"""The two operator schemas without which torchvision cannot be imported beside a CPU build of torch.

PyPI's torchvision carries an extension that links CUDA. Where torch has none the extension does not
load, `torchvision::nms` stays undefined, and the import of torchvision fails; transformers,
diffusers, torchmetrics, clean-fid and open_clip fail with it. Declaring the schemas is enough: all
that Lantern uses of torchvision is written in Python.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[object] = []  # a Library undefines its operators when it is collected


def watch_import() -> None:
    """Arrange that torchvision, whoever imports it, finds its operators defined.

    Costs no import itself: torch and torchvision load when they are asked for.
    """
    watched = any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path)
    if not watched and "torchvision" not in sys.modules:
        sys.meta_path.insert(0, _TorchvisionFinder())


def define_missing_ops(folder: Path) -> bool:
    """Declare torchvision's operators if the extension in its `folder` does not load.

    Returns whether they had to be declared.
    """
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


class _TorchvisionFinder:
    """Finds torchvision as Python would, with a loader that looks after its operators first."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _TorchvisionLoader(spec.loader.name, spec.loader.path)
        return spec


class _TorchvisionLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        if importlib.util.find_spec("torch") is not None:
            define_missing_ops(Path(self.path).parent)
        super().exec_module(module)
