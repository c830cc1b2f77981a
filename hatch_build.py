"""Build hook that moves folders of a checkout below `lantern` in the wheel.

The target model's code, the evaluation, and the embedded weights are next to the package in a checkout. A wheel must
not install top-level packages named `models` or `eval`. An editable install uses the checkout and copies nothing.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WHEEL_LAYOUT = {
    "models/llamagen": "lantern/models/llamagen",
    "eval": "lantern/eval",
    "assets/lantern-emoji": "lantern/assets/lantern-emoji",
    "assets/prompts": "lantern/assets/prompts",
}
LEFT_OUT = {"profile.json", "results", "__pycache__"}  # local measurements, result files, caches


class LayoutHook(BuildHookInterface):
    """Adds the folders of WHEEL_LAYOUT to wheels, except editable ones."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to the build; `version` is "standard" or "editable"."""
        if version == "editable":
            return
        for folder, place in WHEEL_LAYOUT.items():
            for path in sorted(Path(self.root, folder).rglob("*")):
                inside = path.relative_to(Path(self.root, folder))
                if path.is_file() and not LEFT_OUT & set(inside.parts):
                    build_data["force_include"][str(path)] = f"{place}/{inside.as_posix()}"
