"""Debug mode: asked for by LANTERN_DEBUG=1, by --debug of every command, or by `debug=True`."""

import os

VARIABLE = "LANTERN_DEBUG"


def is_debugging() -> bool:
    """Whether the environment asks for debug mode; empty and 0 do not."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")
