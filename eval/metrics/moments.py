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
from lantern.core.io import check_finite, save_tensors, sha256_of
from lantern.eval.metrics.pictures import find_pictures
from lantern.training.data import is_prepared, unpack

BLOCK = 2048  # features at a time
LIMIT = 32.0  # Inception's pooled features stay far below
COARSE, FINE = 16, 17  # bits of the high part below the limit, of the low part below those
Gaussian = tuple[Float[Tensor, " c"], Float[Tensor, "c c"]]  # mean and covariance


@dataclass(frozen=True)
class Moments:
    """Number, sum and outer products of features, in float64.

    A feature is rounded to a fixed grid of 2**-28 (float32 precision for values from 1/16 up) and split into a high and
    a low part. Products of parts (high x high, high x low, low x low) are multiples of one step, and float64 holds the
    sum of 2**20 of them exactly, so order, split and kernel do not change a bit. `made_with` names network and resize;
    `sets` has the sha256 of the sets of images, if known.
    """

    count: int
    sum: Float[Tensor, " c"]
    products: Float[Tensor, "3 c c"]
    made_with: str = ""
    sets: tuple[str, ...] = ()

    @classmethod
    def of(cls, features: Float[Tensor, "n c"], *, made_with: str = "", sets: tuple[str, ...] = ()) -> Self:
        """Return the moments of features; ValueError for NaN and values beyond the limit."""
        width, step = features.shape[1], LIMIT / 2**COARSE
        total, products = (torch.zeros(*shape, dtype=torch.float64) for shape in ((width,), (3, width, width)))
        for x in features.split(BLOCK):
            x = x.double().cpu()
            if len(x) and not bool((x.abs() < LIMIT).all()):
                raise ValueError(f"a feature has magnitude {float(x.abs().max()):g}, wanted below {LIMIT:g}")
            high = torch.round(x / step) * step
            low = torch.round((x - high) * (2**FINE / step)) * (step / 2**FINE)
            total += (high + low).sum(0)
            products += torch.stack([left.T @ right for left, right in ((high, high), (high, low), (low, low))])
        return cls(len(features), total, products, made_with, sets)

    def merged(self, other: "Moments") -> "Moments":
        """Return the moments of both; ValueError if they were made otherwise, or have a set of images in common."""
        theirs, ours = (f"{len(one.sum)} values made with {one.made_with!r}" for one in (other, self))
        if theirs != ours:
            raise ValueError(f"moments of {theirs}, wanted {ours}")
        if twice := set(self.sets) & set(other.sets):
            raise ValueError(f"the images of sha256 {min(twice)[:16]}... are included already: merge each set once")
        sets, products = tuple(sorted((*self.sets, *other.sets))), self.products + other.products
        return Moments(self.count + other.count, self.sum + other.sum, products, self.made_with, sets)

    @property
    def gaussian(self) -> Gaussian:
        """The mean, and the covariance divided by n - 1; ValueError for fewer than two features, and above 2**20."""
        if not 2 <= self.count <= 1 << 20:
            raise ValueError(f"moments of {self.count} features, wanted at least 2, and at most 2**20 for exact sums")
        high, mixed, low = self.products
        mean, products = self.sum / self.count, high + ((mixed + mixed.T) + low)
        return mean, (products - self.count * torch.outer(mean, mean)) / (self.count - 1)

    def save(self, path: str | Path) -> None:
        """Write the moments to a safetensors file, atomically."""
        facts = torch.tensor([self.count, LIMIT], dtype=torch.float64)
        tensors = {"facts": facts, "sum": self.sum, "products": self.products}
        save_tensors(tensors, path, {"made_with": self.made_with, "sets": " ".join(self.sets)})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read moments written by `save`; ValueError for a missing, damaged or other file."""
        try:
            with safe_open(path, "pt") as file:
                facts, total, products = (file.get_tensor(name) for name in ("facts", "sum", "products"))
                stated = file.metadata() or {}
            if facts.shape != (2,) or total.ndim != 1 or products.shape != (3, *total.shape, *total.shape):
                raise ValueError(f"its products have shape {list(products.shape)}")
            sets = tuple(stated.get("sets", "").split())
            return cls(int(facts[0]), total, products, stated.get("made_with", ""), sets)
        except (SafetensorError, OSError, OverflowError, ValueError) as error:
            raise ValueError(f"{path} is not a file of moments: {one_line(error)}") from error


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
        return Reference(name or given.name, unpack(given, room) if is_prepared(given) else find_pictures(given))
    if given.suffix == ".safetensors":
        stored = Moments.load(given)
        return Reference(name or given.name, (), stored.gaussian, stored.count, sha256_of(given), stored.made_with)
    if given.suffix == ".npz":
        try:
            with given.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                mean, covariance = (torch.from_numpy(file[key].astype(np.float64)) for key in ("mu", "sigma"))
        except Exception as error:  # zipfile, zlib and NumPy raise of every kind for damaged files
            raise ValueError(f"{given} has no mu and sigma: {one_line(error)}") from error
        if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
            raise ValueError(f"{given}: mu {list(mean.shape)}, sigma {list(covariance.shape)}, wanted [c] and [c, c]")
        check_finite({"mu": mean, "sigma": covariance}, source=given)
        return Reference(name or given.name, gaussian=(mean, covariance), sha256=sha256_of(given))
    raise ValueError(f"got reference {given}, wanted a folder of images, .npz with mu and sigma, or .safetensors")
