"""Device and variants of the speed tests."""

import torch

from lantern.eval.speed.contenders import Variant

CPU = torch.device("cpu")
EAGER = {"plain": [Variant("eager", "fp32")], "others": [Variant("eager", "fp32")]}
