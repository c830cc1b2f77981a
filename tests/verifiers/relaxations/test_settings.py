"""Settings of relaxations that are out of range are refused in one line."""

import math
from typing import Any

import pytest
import torch

from lantern.verifiers.relaxations.bounded import Bounded
from lantern.verifiers.relaxations.cool import Cool
from lantern.verifiers.relaxations.grouped import Grouped
from lantern.verifiers.relaxations.lantern import Lantern
from lantern.verifiers.relaxations.lantern_pp import LanternPP
from lantern.verifiers.relaxations.neighbours import proximity_table
from lantern.verifiers.relaxations.tolerance import Tolerance
from lantern.verifiers.relaxations.typical import Typical
from lantern.verifiers.relaxations.vvs import Vvs

LINE = torch.arange(5.0)[:, None]
TABLE = proximity_table(LINE, 4)
NEEDS: dict[type, tuple[Any, ...]] = {
    **dict.fromkeys((Bounded, Lantern, LanternPP), (TABLE,)),
    Grouped: (LINE,),
}


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        (Bounded, {"k": 5}, "k is 5, wanted from 0 to 4"),
        (Bounded, {"k": 2, "delta": 1.5}, "delta is 1.5"),
        (Bounded, {"k": 2, "delta": math.nan}, "delta is nan"),
        (Bounded, {"k": 2, "cap": 0.5}, "cap is 0.5"),
        (Bounded, {"k": 2, "rounds": 0}, "rounds is 0"),
        (Bounded, {"k": 2, "width": 2.0}, "width is 2.0"),
        (Cool, {"omega": -1}, "omega is -1"),
        (Cool, {"nu": math.inf}, "nu is inf"),
        (Grouped, {"group": 3}, "group is 3"),
        (Grouped, {"p_radius": -1}, "p_radius is -1"),
        (Grouped, {"d_radius": -1}, "d_radius is -1"),
        (Lantern, {"k": 5}, "k is 5, wanted from 0 to 4"),
        (Lantern, {"k": 4, "residual": "released"}, "wanted from 0 to 3"),
        (Lantern, {"k": 2, "delta": math.nan}, "delta is nan"),
        (Lantern, {"k": 2, "delta": 1.5}, "delta is 1.5"),
        (LanternPP, {"k": 2, "lambda_": 0.5}, "lambda_ is 0.5"),
        (LanternPP, {"k": 2, "residual": "compat"}, 'residual is "compat"'),
        (Tolerance, {"samples": 0}, "samples is 0"),
        (Tolerance, {"samples": 1.5}, "samples is 1.5"),
        (Tolerance, {"samples": True}, "samples is True"),
        (Typical, {"alpha": -1}, "alpha is -1"),
        (Vvs, {"skip": 33}, "skip is 33, wanted a number of tokens from 0"),
    ],
)
def test_settings_out_of_range_raise(rule: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule(*NEEDS.get(rule, ()), **settings)
