"""Pictures from files as a stream of batches: prepared in threads ahead of the network, each file read once."""

import hashlib
import io
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from lantern.core.config import one_line
from lantern.generation.images import read_facts

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
AHEAD = 2  # batches that are prepared while the network processes one
Prepare = Callable[[np.ndarray], Tensor]
Read = tuple[bytes, str | None, dict[str, Tensor]]  # of one file: sha256, prompt, inputs by network


@dataclass(frozen=True)
class Batch:
    """A batch in the order of files: inputs by network, and the prompt in each file, if any."""

    first: int
    inputs: Mapping[str, Shaped[Tensor, "b ..."]]
    prompts: tuple[str | None, ...]
    names: tuple[str, ...]


@dataclass
class Stream:
    """Batches of images. After iteration, `sha256` is the digest of all files in order.

    before: a function applied to every image (uint8, h w 3). prepare: by network, a function from an image to a
    tensor. Both run in threads (Pillow and numpy release the GIL). ValueError for a file that is no image.
    """

    paths: Sequence[Path]
    prepare: Mapping[str, Prepare]
    batch: int = 32
    before: Callable[[np.ndarray], np.ndarray] | None = None
    _digest: "hashlib._Hash" = field(default_factory=hashlib.sha256, repr=False)

    @property
    def sha256(self) -> str:
        """Digest of the digests of all files read so far."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[Batch]:
        self._digest = hashlib.sha256()
        waiting = deque[tuple[int, Iterator[Read]]]()
        with ThreadPoolExecutor() as pool:
            try:
                for first in range(0, len(self.paths), self.batch):
                    waiting.append((first, pool.map(self._read, self.paths[first : first + self.batch])))
                    if len(waiting) > AHEAD:
                        yield self._gather(*waiting.popleft())
                while waiting:
                    yield self._gather(*waiting.popleft())
            finally:
                pool.shutdown(cancel_futures=True)

    def _gather(self, first: int, tasks: Iterator[Read]) -> Batch:
        digests, prompts, read = zip(*tasks, strict=True)
        names, inputs = tuple(path.name for path in self.paths[first : first + len(read)]), {}
        for digest in digests:
            self._digest.update(digest)
        for judge in self.prepare:
            tensors = [one[judge] for one in read]
            for name, tensor in zip(names, tensors, strict=True):
                if tensor.shape != tensors[0].shape:
                    got, expected = list(tensor.shape), list(tensors[0].shape)
                    raise ValueError(f"{name} is {got}, {names[0]} is {expected}: expected images of the same size")
            inputs[judge] = torch.stack(tensors)
        return Batch(first, inputs, prompts, names)

    def _read(self, path: Path) -> Read:
        from PIL import Image, UnidentifiedImageError

        try:
            content = path.read_bytes()
            with Image.open(io.BytesIO(content)) as picture:
                facts, is_lossless = read_facts(picture), picture.format == "PNG"
                pixels = np.array(picture.convert("RGB"))
        except UnidentifiedImageError as error:  # its message has the address of a buffer
            raise ValueError(f"{path} is not a complete image: its format is not recognised") from error
        except (Image.DecompressionBombError, SyntaxError, ValueError) as error:
            raise ValueError(f"{path} is not a complete image: {one_line(error)}") from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise ValueError(f"{path} is not a complete image: {one_line(error)}") from error
        scale = facts.get("scale", "1")
        if facts.get("Software", "").startswith("lantern") and scale.isdecimal() and scale != "1":
            # `lantern-generate --scale` enlarged it: metrics need the pixels of the model
            if not is_lossless or facts.get("resample") != "nearest":
                why = "metrics need the pixels of the model: make images for metrics with --scale 1"
                raise ValueError(f"{path} was enlarged {scale} times and {why}")
            step = max(int(scale), 1)
            pixels = pixels[::step, ::step]
        pixels = self.before(pixels) if self.before else pixels
        inputs = {judge: one(pixels) for judge, one in self.prepare.items()}
        return hashlib.sha256(content).digest(), facts.get("prompt"), inputs


def raw(pixels: np.ndarray) -> Tensor:
    """Return an image as a tensor of bytes, 3 h w."""
    return torch.from_numpy(pixels).permute(2, 0, 1)


def find_pictures(folder: Path) -> list[Path]:
    """Return the images of a folder and its subfolders, sorted by path; ValueError if there are none."""
    found = sorted(
        os.path.join(place, name)
        for place, _, names in os.walk(folder)
        for name in names
        if not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES
    )
    if not found:
        raise ValueError(f"{folder} has no images, expected files with suffix {', '.join(sorted(SUFFIXES))}")
    return [Path(path) for path in found]
