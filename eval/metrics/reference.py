"""References that images are compared with: folders of images, prepared training data, or saved statistics."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lantern.core.config import one_line
from lantern.core.io import sha256_of
from lantern.eval.metrics.judges import Judge
from lantern.eval.metrics.moments import Gaussian, Moments
from lantern.eval.metrics.pictures import find_pictures


@dataclass(frozen=True)
class Reference:
    """A named reference: images, or mean and covariance of their features, or neither.

    Of features that were not made here count is 0 and made_with "".
    """

    name: str
    pictures: Sequence[Path] = ()
    gaussian: Gaussian | None = None
    count: int = 0
    sha256: str = ""
    made_with: str = ""


def open_reference(given: Path | Sequence[Path] | None, *, name: str = "") -> Reference:
    """Open a folder, files of images, moments (.safetensors), or `mu` and `sigma` (.npz, as of clean-fid and ADM).

    ValueError for another kind of file.
    """
    if given is None:
        return Reference("")
    if not isinstance(given, Path):
        return Reference(name or f"{len(given)} images", tuple(given))
    if given.is_dir():
        return Reference(name or given.name, find_pictures(given))
    if given.suffix == ".safetensors":
        stored = Moments.load(given)
        return Reference(name or given.name, (), stored.gaussian, stored.count, sha256_of(given), stored.made_with)
    if given.suffix == ".npz":
        return Reference(name or given.name, gaussian=_gaussian(given), sha256=sha256_of(given))
    raise ValueError(f"got reference {given}, expected a folder of images, .npz with mu and sigma, or .safetensors")


def made_with(name: str, judge: Judge) -> str:
    """Return a string that identifies network and resize of moments; `name` is such as "inception:clean"."""
    return f"inception {judge.weights.sha256} {name.partition(':')[2]}"


def _gaussian(path: Path) -> Gaussian:
    try:
        with np.load(path, allow_pickle=False) as stored:
            mean, covariance = (torch.from_numpy(stored[name].astype(np.float64)) for name in ("mu", "sigma"))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} has no mu and sigma: {one_line(error)}") from error
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        raise ValueError(f"{path}: mu is {list(mean.shape)}, sigma {list(covariance.shape)}, expected [c] and [c, c]")
    return mean, covariance
