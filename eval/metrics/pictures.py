"""Images from files as a stream of batches: prepared in threads ahead of the network, each file read once."""

import hashlib
import io
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Shaped
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from lantern.core.config import one_line
from lantern.generation.images import READ_FORMATS, in_8_bits, read_facts

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
AHEAD = 2  # batches that are prepared while the network processes one
Change = Callable[[np.ndarray], np.ndarray]
Prepare = Mapping[str, Callable[[np.ndarray], Tensor]]
Read = tuple[bytes, str | None, dict[str, Tensor]]  # of one file: sha256, prompt, inputs by network


@dataclass(frozen=True)
class Batch:
    """A batch in the order of files: inputs by network, the prompt in each file, if any, and each file's sha256."""

    first: int
    inputs: Mapping[str, Shaped[Tensor, "b ..."]]
    prompts: tuple[str | None, ...]
    names: tuple[str, ...]
    digests: tuple[bytes, ...]


def stream(
    paths: Sequence[Path], prepare: Prepare, *, batch: int = 32, before: Change | None = None
) -> Iterator[Batch]:
    """Yield batches of images.

    before: a function applied to every image (uint8, h w 3). prepare: by network, a function from an image to a
    tensor. Both run in threads (Pillow and numpy release the GIL). ValueError for a file that is no image.
    """
    waiting, shapes = deque[tuple[int, Iterator[Read]]](), dict[str, torch.Size]()
    with ThreadPoolExecutor() as pool:
        try:
            for first in range(0, len(paths), batch):
                read = pool.map(partial(_read, prepare=prepare, before=before), paths[first : first + batch])
                waiting.append((first, read))
                if len(waiting) > AHEAD:
                    yield _gather(paths, shapes, *waiting.popleft())
            while waiting:
                yield _gather(paths, shapes, *waiting.popleft())
        finally:
            pool.shutdown(cancel_futures=True)


def _gather(paths: Sequence[Path], shapes: dict[str, torch.Size], first: int, tasks: Iterator[Read]) -> Batch:
    """Return a batch of images as large as the first of all, whose shapes by network are kept in `shapes`."""
    digests, prompts, read = zip(*tasks, strict=True)
    names, inputs = tuple(path.name for path in paths[first : first + len(read)]), {}
    for judge in read[0]:
        tensors = [one[judge] for one in read]
        for path, tensor in zip(paths[first:], tensors, strict=False):
            if tensor.shape != (expected := shapes.setdefault(judge, tensor.shape)):
                got = f"{path} is {list(tensor.shape)}, {paths[0]} is {list(expected)}"
                raise ValueError(f"{got}: wanted images of the same size")
        inputs[judge] = torch.stack(tensors)
    return Batch(first, inputs, prompts, names, digests)


def _read(path: Path, *, prepare: Prepare, before: Change | None) -> Read:
    try:
        content = path.read_bytes()
        with Image.open(io.BytesIO(content), formats=(*READ_FORMATS, "TIFF")) as picture:
            facts, is_lossless = read_facts(picture), picture.format == "PNG"
            pixels = np.array(in_8_bits(picture).convert("RGB"))
    except (Image.DecompressionBombError, SyntaxError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        is_unknown = isinstance(error, UnidentifiedImageError)  # whose message has the address of a buffer
        why = "its format is not recognised" if is_unknown else one_line(error)
        raise ValueError(f"{path} is not a complete image: {why}") from error
    scale = facts.get("scale", "1")
    if facts.get("Software", "").startswith("lantern") and scale.isdecimal() and scale != "1":
        # `lantern-generate --scale` enlarged it: metrics need the pixels of the model
        if not is_lossless or facts.get("resample") != "nearest":
            why = "metrics need the pixels of the model: make images for metrics with --scale 1"
            raise ValueError(f"{path} was enlarged {scale} times and {why}")
        step = max(int(scale), 1)
        pixels = pixels[::step, ::step]
    pixels = before(pixels) if before else pixels
    inputs = {judge: one(pixels) for judge, one in prepare.items()}
    return hashlib.sha256(content).digest(), facts.get("prompt"), inputs


def raw(pixels: np.ndarray) -> Tensor:
    """Return an image as a tensor of bytes, 3 h w."""
    return torch.from_numpy(pixels).permute(2, 0, 1)


def find_pictures(folder: Path) -> list[Path]:
    """Return the images below a folder, sorted by path, 2 before 10; ValueError if there are none."""
    named = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and not path.name.startswith("."))
    found = [path for path in named if not path.is_dir()]
    found.sort(key=lambda path: (re.sub("[0-9]+", lambda number: number[0].zfill(255), str(path)), path))
    if not found:
        raise ValueError(f"{folder} has no images, wanted files with suffix {', '.join(sorted(SUFFIXES))}")
    return found
