"""Measurement of quality and speed: metrics, speed, protocols and boards.

The code is in `eval/` at the root of a checkout and in this folder in a wheel. Only commands and training scripts
import it; it may import everything of lantern.
"""

from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2]
if (_CHECKOUT / "pyproject.toml").is_file():
    __path__.append(str(_CHECKOUT / "eval"))
