"""Where a checkout's folders go inside the wheel.

The code of the target model, the evaluation and the embedded weights stand beside the package in a
checkout; a wheel must not install top-level packages called `models` or `eval`, so they move below
`lantern`. An editable install finds the checkout itself and copies nothing.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WHEEL_LAYOUT = {
    "models/llamagen": "lantern/models/llamagen",
    "eval": "lantern/eval",
    "assets/lantern-emoji": "lantern/assets/lantern-emoji",
}


class LayoutHook(BuildHookInterface):
    """Adds the folders of WHEEL_LAYOUT to every wheel that is not an editable one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Tell hatchling what to include; `version` is "standard" or "editable"."""
        if version != "editable":
            build_data["force_include"].update(WHEEL_LAYOUT)
