"""Mean and covariance of features from sums that are exact in any split and order, and references to compare with."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lantern.core.config import one_line
from lantern.core.io import save_tensors, sha256_of
from lantern.eval.metrics.pictures import find_pictures
from lantern.training.data import is_prepared, unpack

LIMIT = 32.0  # Inception's pooled features stay far below
MOST = 1 << 20  # features of one set
Gaussian = tuple[Float[Tensor, " c"], Float[Tensor, "c c"]]  # mean and covariance
COARSE, FINE = 16, 17  # bits of the high part below the limit, of the low part below those


class Moments:
    """Number, sum and outer products of features of `width` values, in float64.

    A feature is rounded to a fixed grid of 2**-28 (float32 precision for values from 1/16 up) and split into a high and
    a low part. Products of parts are multiples of one step, and float64 holds the sum of 2**20 of them exactly, so
    order, split and kernel do not change a bit. `made_with` names network and resize; `sets` has the sha256 of the sets
    of images, if known. Moments that were made otherwise, or of a set that is included already, are not merged.
    """

    def __init__(self, width: int, *, made_with: str = "") -> None:
        self.width, self.count, self.made_with = width, 0, made_with
        self.sets: tuple[str, ...] = ()
        self._sum = torch.zeros(width, dtype=torch.float64)
        # high x high, high x low, low x low
        self._products = torch.zeros(3, width, width, dtype=torch.float64)

    def add(self, features: Float[Tensor, "n c"]) -> None:
        """Add features; ValueError for NaN, values beyond the limit, another width, or too many features."""
        if features.ndim != 2 or features.shape[1] != self.width:
            raise ValueError(f"features of shape {list(features.shape)}, wanted [n, {self.width}]")
        self._make_room(len(features))
        x = features.detach().double()
        if len(x) and not bool((x.abs() < LIMIT).all()):
            raise ValueError(f"a feature has magnitude {float(x.abs().max()):g}, wanted below {LIMIT:g}")
        step = LIMIT / 2**COARSE
        high = torch.round(x / step) * step
        low = torch.round((x - high) * (2**FINE / step)) * (step / 2**FINE)
        self._sum += (high + low).sum(0).cpu()
        for place, (left, right) in enumerate(((high, high), (high, low), (low, low))):
            self._products[place] += (left.T @ right).cpu()
        self.count += len(x)

    def merge(self, other: "Moments") -> None:
        """Add the moments of another set; ValueError if width, network or resize differ."""
        if (other.width, other.made_with) != (self.width, self.made_with):
            wanted = f"wanted {self.width} made with {self.made_with!r}"
            raise ValueError(f"moments of {other.width} values made with {other.made_with!r}, {wanted}")
        if twice := set(self.sets) & set(other.sets):
            raise ValueError(f"the images of sha256 {min(twice)[:16]}... are included already: merge each set once")
        self._make_room(other.count)
        self._sum += other._sum
        self._products += other._products
        self.count += other.count
        self.sets = tuple(sorted((*self.sets, *other.sets)))

    @property
    def gaussian(self) -> Gaussian:
        """The mean, and the covariance divided by n - 1; ValueError for fewer than two features."""
        if self.count < 2:
            raise ValueError(f"moments of {self.count} features have no covariance, wanted at least 2")
        high, mixed, low = self._products
        mean, products = self._sum / self.count, high + ((mixed + mixed.T) + low)
        return mean, (products - self.count * torch.outer(mean, mean)) / (self.count - 1)

    def save(self, path: str | Path) -> None:
        """Write the moments to a safetensors file, atomically."""
        facts = torch.tensor([self.count, LIMIT], dtype=torch.float64)
        tensors = {"facts": facts, "sum": self._sum, "products": self._products}
        save_tensors(tensors, path, {"made_with": self.made_with, "sets": " ".join(self.sets)})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read moments written by `save`; ValueError for a missing, damaged or other file."""
        try:
            with safe_open(path, "pt") as file:
                stored = {name: file.get_tensor(name) for name in ("facts", "sum", "products")}
                reported = file.metadata() or {}
            count, limit = stored["facts"].tolist()
            if limit != LIMIT:
                raise ValueError(f"its limit is {limit:g}, wanted {LIMIT:g}")
            moments = cls(len(stored["sum"]), made_with=reported.get("made_with", ""))
            moments.count, moments._sum, moments._products = int(count), stored["sum"], stored["products"]
            moments.sets = tuple(reported.get("sets", "").split())
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path} is not a file of moments: {one_line(error)}") from error
        if moments._products.shape != (3, moments.width, moments.width):
            raise ValueError(f"{path} holds products of shape {list(moments._products.shape)}: extract them again")
        return moments

    def _make_room(self, more: int) -> None:
        if self.count + more > MOST:
            raise ValueError(f"got {self.count + more} features, wanted at most {MOST}, above which sums are inexact")


@dataclass(frozen=True)
class Reference:
    """A named reference: images, or mean and covariance, or neither; of others' features count is 0, made_with ""."""

    name: str
    pictures: Sequence[Path] = ()
    gaussian: Gaussian | None = None
    count: int = 0
    sha256: str = ""
    made_with: str = ""


def open_reference(given: Path | Sequence[Path] | None, *, name: str = "", room: Path) -> Reference:
    """Open a folder, files of images, moments (.safetensors), or `mu` and `sigma` (.npz, as of clean-fid and ADM).

    The images of data prepared by `lantern train data` are written to `room`. ValueError for another kind of file.
    """
    if given is None:
        return Reference("")
    if not isinstance(given, Path):
        return Reference(name or f"{len(given)} images", tuple(given))
    if given.is_dir():
        pictures = unpack(given, room) if is_prepared(given) else find_pictures(given)
        return Reference(name or given.name, pictures)
    if given.suffix == ".safetensors":
        stored = Moments.load(given)
        return Reference(name or given.name, (), stored.gaussian, stored.count, sha256_of(given), stored.made_with)
    if given.suffix == ".npz":
        try:
            with np.load(given, allow_pickle=False) as file:
                mean, covariance = (torch.from_numpy(file[key].astype(np.float64)) for key in ("mu", "sigma"))
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{given} has no mu and sigma: {one_line(error)}") from error
        if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
            got = f"mu is {list(mean.shape)}, sigma {list(covariance.shape)}"
            raise ValueError(f"{given}: {got}, wanted [c] and [c, c]")
        return Reference(name or given.name, gaussian=(mean, covariance), sha256=sha256_of(given))
    raise ValueError(f"got reference {given}, wanted a folder of images, .npz with mu and sigma, or .safetensors")
