"""Build hook that moves folders of a checkout below `lantern` in the wheel, and compiles the C++ library.

The target model's code, the evaluation, and the embedded weights are next to the package in a checkout. A wheel must
not install top-level packages named `models` or `eval`. An editable install uses the checkout and copies nothing.

With a compiler the wheel holds one C++ library for each kind of processor of this architecture, and is for Linux on it
only; an editable install compiles the one for this processor. Without a compiler, or with LANTERN_NO_LIBRARY set, the
wheel holds Python only.
"""

import os
import sys
import sysconfig
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WHEEL_LAYOUT = {
    "models/llamagen": "lantern/models/llamagen",
    "eval": "lantern/eval",
    "assets/lantern-emoji": "lantern/assets/lantern-emoji",
    "assets/prompts": "lantern/assets/prompts",
}
LIBRARIES = "lantern/engines/cpu/lib"
LEFT_OUT = {"profile.json", "results", "__pycache__"}  # local measurements, result files, caches


class LayoutHook(BuildHookInterface):
    """Adds the folders of WHEEL_LAYOUT to wheels, except editable ones, and the C++ library to all."""

    compiled: tempfile.TemporaryDirectory[str] | None = None  # libraries, until the wheel holds them

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to the build; `version` is "standard" or "editable"."""
        self.add_library(build_data, is_editable=version == "editable")
        if version == "editable":
            return
        for folder, place in WHEEL_LAYOUT.items():
            for path in sorted(Path(self.root, folder).rglob("*")):
                inside = path.relative_to(Path(self.root, folder))
                if path.is_file() and not LEFT_OUT & set(inside.parts):
                    build_data["force_include"][str(path)] = f"{place}/{inside.as_posix()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the compiled libraries, which the wheel holds now."""
        if self.compiled is not None:
            self.compiled.cleanup()

    def add_library(self, build_data: dict[str, Any], *, is_editable: bool) -> None:
        """Compile the C++ library: into the checkout for an editable install, else into the wheel."""
        compiling = load_compiler(self.root)
        if os.environ.get("LANTERN_NO_LIBRARY"):
            return
        if is_editable:
            folder = Path(self.root, LIBRARIES)
            known = {path.name for path in folder.glob("*.so")}
            self.report(compiling.compile_all(folder, compiling.supported()[:1], known)[1])
            return
        self.compiled = tempfile.TemporaryDirectory(prefix="lantern-library-")
        made, errors = compiling.compile_all(Path(self.compiled.name), compiling.of_machine())
        self.report(errors)
        for path in made:
            for part in (path, compiling.record_of(path)):
                build_data["force_include"][str(part)] = f"{LIBRARIES}/{part.name}"
        if made:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def report(self, errors: list[str]) -> None:
        """Print why libraries were not compiled; the package works without them, more slowly."""
        for error in errors:
            self.app.display_warning(f"the C++ library is not part of this build: {error}")


def load_compiler(root: str) -> ModuleType:
    """Return lantern/engines/cpu/build.py as a module, without importing the package."""
    spec = spec_from_file_location("lantern_compiler", Path(root, "lantern/engines/cpu/build.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
