"""Pictures from files as a stream of batches: prepared in threads ahead of the network, each file read once."""

import hashlib
import io
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
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
    tensor. Both run in `workers` threads (Pillow and numpy release the GIL). ValueError for a file that is no image.
    """

    paths: Sequence[Path]
    prepare: Mapping[str, Prepare]
    batch: int = 32
    workers: int = 0
    before: Callable[[np.ndarray], np.ndarray] | None = None
    _digest: "hashlib._Hash" = field(default_factory=hashlib.sha256, repr=False)

    @property
    def sha256(self) -> str:
        """Digest of the digests of all files read so far."""
        return self._digest.hexdigest()

    def __len__(self) -> int:
        return -(-len(self.paths) // self.batch)

    def __iter__(self) -> Iterator[Batch]:
        self._digest = hashlib.sha256()
        # the cores of the process, at least 2: decoding releases the GIL
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with ThreadPoolExecutor(self.workers or max(cores, 2)) as pool:
            waiting: deque[tuple[int, list[Future[_Read]]]] = deque()
            try:
                for first in range(0, len(self.paths), self.batch):
                    paths = self.paths[first : first + self.batch]
                    waiting.append((first, [pool.submit(_read, path, self.prepare, self.before) for path in paths]))
                    if len(waiting) > AHEAD:
                        yield self._gather(*waiting.popleft())
                while waiting:
                    yield self._gather(*waiting.popleft())
            finally:
                for task in chain.from_iterable(tasks for _, tasks in waiting):
                    task.cancel()

    def _gather(self, first: int, tasks: Sequence["Future[_Read]"]) -> Batch:
        found = [task.result() for task in tasks]
        for one in found:
            self._digest.update(one.digest)
        names = tuple(one.name for one in found)
        inputs = {}
        for judge in self.prepare:
            tensors = [one.inputs[judge] for one in found]
            odd = next((i for i, one in enumerate(tensors) if one.shape != tensors[0].shape), None)
            if odd is not None:
                got, expected = list(tensors[odd].shape), list(tensors[0].shape)
                raise ValueError(f"{names[odd]} is {got}, {names[0]} is {expected}: expected images of the same size")
            inputs[judge] = torch.stack(tensors)
        return Batch(first, inputs, tuple(one.prompt for one in found), names)


@dataclass(frozen=True)
class _Read:
    name: str
    digest: bytes
    prompt: str | None
    inputs: dict[str, Tensor]


def _read(path: Path, prepare: Mapping[str, Prepare], before: Callable[[np.ndarray], np.ndarray] | None) -> _Read:
    from PIL import Image, UnidentifiedImageError

    try:
        content = path.read_bytes()
        with Image.open(io.BytesIO(content)) as picture:
            facts = read_facts(picture)
            pixels = raw_size(np.array(picture.convert("RGB")), facts, path, is_lossless=picture.format == "PNG")
    except EnlargedError:
        raise
    except UnidentifiedImageError as error:  # its message has the address of a buffer
        raise ValueError(f"{path} is not a complete image: its format is not recognised") from error
    except (Image.DecompressionBombError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is not a complete image: {one_line(error)}") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(f"{path} is not a complete image: {one_line(error)}") from error
    pixels = before(pixels) if before else pixels
    inputs = {judge: one(pixels) for judge, one in prepare.items()}
    return _Read(path.name, hashlib.sha256(content).digest(), facts.get("prompt"), inputs)


class EnlargedError(ValueError):
    """An image file was enlarged by a filter or in a format that cannot be undone."""


def raw_size(pixels: np.ndarray, facts: Mapping[str, str], path: Path, *, is_lossless: bool) -> np.ndarray:
    """Return the pixels of the model for a PNG that `lantern-generate --scale` enlarged, others as they are.

    EnlargedError for an enlarged JPEG or WebP, and if the filter was not "nearest": pixels cannot be read back.
    """
    scale = facts.get("scale", "1")
    if not facts.get("Software", "").startswith("lantern") or not scale.isdecimal():
        return pixels
    if scale != "1" and not (is_lossless and facts.get("resample") == "nearest"):
        raise EnlargedError(
            f"{path} was enlarged {scale} times and metrics need the pixels of the model: make images for metrics"
            " with --scale 1"
        )
    return pixels[:: int(scale), :: int(scale)] if int(scale) > 1 else pixels


def raw(pixels: np.ndarray) -> Tensor:
    """Return an image as a tensor of bytes, 3 h w."""
    return torch.from_numpy(pixels).permute(2, 0, 1)


def find_pictures(folder: Path) -> list[Path]:
    """Return the images of a folder and its subfolders, sorted by path; ValueError if there are none."""
    found, folders = [], [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif not entry.name.startswith(".") and os.path.splitext(entry.name)[1].lower() in SUFFIXES:
                    found.append(entry.path)
    if not found:
        raise ValueError(f"{folder} has no images, expected files with suffix {', '.join(sorted(SUFFIXES))}")
    return [Path(path) for path in sorted(found)]


Resize = Callable[[np.ndarray], np.ndarray]


def resizing(name: str, size: int) -> Resize | None:
    """Return the resize of a protocol, which maps images (uint8, h w 3) to squares of `size` pixels.

    "none" is None: no resize before the network's own. "crop-lanczos" crops the central square and resizes it with
    Pillow's Lanczos filter, as in the evaluations of GigaGAN, LlamaGen and LANTERN. "bicubic" is PyTorch's without
    antialiasing, as in LlamaGen's evaluation of classes. An image of the right size is returned unchanged. ValueError
    for another name, and from "bicubic" for an image that is not square.
    """
    if name == "none":
        return None
    if name not in RESIZINGS:
        raise ValueError(f"resize is {name[:40]!r}, expected one of none, {', '.join(RESIZINGS)}")
    return partial(RESIZINGS[name], size=size)


def crop_lanczos(pixels: np.ndarray, *, size: int) -> np.ndarray:
    """Crop the central square and resize it with Pillow's Lanczos filter."""
    from PIL import Image

    height, width = pixels.shape[:2]
    side = min(height, width)
    # as in torchvision's centre crop, round half to even
    top, left = round((height - side) / 2), round((width - side) / 2)
    square = pixels[top : top + side, left : left + side]
    if side == size:
        return square
    return np.asarray(Image.fromarray(square).resize((size, size), Image.Resampling.LANCZOS))


def bicubic(pixels: np.ndarray, *, size: int) -> np.ndarray:
    """Resize with PyTorch's bicubic without antialiasing; values are truncated to bytes as in LlamaGen.

    ValueError for an image that is not square.
    """
    if pixels.shape[0] != pixels.shape[1]:
        raise ValueError(f"an image is {pixels.shape[1]} x {pixels.shape[0]}, expected a square one")
    if pixels.shape[0] == size:
        return pixels
    found = torch.nn.functional.interpolate(
        raw(pixels)[None].float(), (size, size), mode="bicubic", align_corners=False
    )
    return found[0].clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()


RESIZINGS: dict[str, Callable[..., np.ndarray]] = {"crop-lanczos": crop_lanczos, "bicubic": bicubic}
