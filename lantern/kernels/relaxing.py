"""The bounded relaxation of fused windows (`relax.h`): what is told of it, and what it tells of its price."""

import ctypes
import math
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lantern.kernels.packed import LANES
from lantern.relaxations.bounded import Bounded
from lantern.types import Verdict


class RelaxingTold(ctypes.Structure):
    """`Relaxing` of relax.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("near", "rounds", "width")),
        *((name, ctypes.c_float) for name in ("delta", "cap")),
        *((name, ctypes.c_void_p) for name in ("table", "distances")),
    ]


class Rules:
    """A relaxation as C++ reads it; keeps alive what it points to."""

    def __init__(self, by: Bounded) -> None:
        codes, spare = len(by.table), -by.k % LANES
        self._table = pad(by.table[:, : by.k].int(), (0, spare), value=codes)
        self._distances = None if by.distances is None else pad(by.distances[:, : by.k].float(), (0, spare))
        self.told = RelaxingTold(
            *(by.k + spare, by.rounds, min(by.width, codes), by.delta, by.cap),
            *(self._table.data_ptr(), None if self._distances is None else self._distances.data_ptr()),
        )


class Relaxing:
    """The laws of a window's drafts and what moving them cost, in memory that `lantern_turns` writes to.

    `price` sums up for each image, as in `turns.cpp`: relaxed codes, total variation, latent distance, and the largest
    total variation.
    """

    def __init__(self, by: Bounded, images: int, nodes: int, vocab: int) -> None:
        self._rules, self.tells_distance = Rules(by), by.distances is not None
        self.laws, self._moved = torch.zeros(images, nodes - 1, vocab), torch.zeros(images, nodes, vocab)
        self._spent, self._travelled = torch.zeros(2, images, nodes).unbind()
        self._owed = torch.zeros(images, nodes - 1)
        self.price = torch.zeros(images, 4, dtype=torch.double)

    @property
    def places(self) -> tuple[int, ...]:
        """Where all is, in the order of `Turns`."""
        tensors = (self.laws, self._moved, self._spent, self._travelled, self._owed, self.price)
        return (ctypes.addressof(self._rules.told), *(tensor.data_ptr() for tensor in tensors))

    def begin(self, codes: Int[Tensor, "b n"], *, is_random: bool) -> None:
        """Notes the laws of initial codes: uniform, or each code itself."""
        self.laws.fill_(1 / self.laws.shape[-1] if is_random else 0.0)
        if not is_random:
            self.laws.scatter_(-1, codes[..., None], 1.0)

    def log_laws(self) -> Float[Tensor, "b n v"]:
        """The laws of the window's drafts as `DraftTree.log_q` has them, with a row for the leaf as well, of none."""
        return pad(self.laws.log(), (0, 0, 0, 1), value=-math.inf)

    def priced(self, verdict: Verdict) -> Verdict:
        """A verdict on the last window, with its price."""
        nodes = pad(verdict.path, (1, 0))
        return replace(
            verdict,
            relaxed=self._owed.gather(1, nodes[:, :-1].clamp(max=self._owed.shape[1] - 1)),
            total_variation=self._spent.gather(1, nodes),
            latent_distance=self._travelled.gather(1, nodes) if self.tells_distance else None,
        )
