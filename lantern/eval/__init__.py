"""Measuring quality and speed: `lantern.eval.<question>`.

The code stands in `eval/` at the root of a checkout and inside this folder in a wheel.
"""

from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2]
if (_CHECKOUT / "pyproject.toml").is_file():
    __path__.append(str(_CHECKOUT / "eval"))
