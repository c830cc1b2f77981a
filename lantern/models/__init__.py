"""Models on disk: folders, trained add-ons, compatibility checks, and the model families (`lantern.models.llamagen`).

May import core, drafters and methods. A family's code is in `models/` at the root of a checkout, in a wheel in here.
"""

from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2]
if (_CHECKOUT / "pyproject.toml").is_file():
    __path__.append(str(_CHECKOUT / "models"))
