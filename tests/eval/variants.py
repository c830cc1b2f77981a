from typing import Any

import torch

from lantern.eval.speed.contenders import PLAIN, Contender, Stable, Variant, built, line_up
from lantern.models.folder import Model

CPU = torch.device("cpu")
EAGER = Variant("eager", "fp32")


def eager(model: Model, *labels: str) -> list[Contender]:
    """Plain decoding and these methods, eagerly, without a warm-up."""
    build: Any = built(model.sampling())
    return line_up(Stable(model), [(label, EAGER) for label in (PLAIN, *labels)], build, lambda one: None, [])
