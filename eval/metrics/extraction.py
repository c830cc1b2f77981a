"""Feature extraction: each image is read once for all networks, and features are written to disk in a stream."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lantern.eval.metrics.judges import Judge, Pair
from lantern.eval.metrics.pictures import Batch, Stream, raw

RAW = "raw"


@dataclass
class Seen:
    """The features of a set of `count` images, by network; the tensors are files in `folder`, mapped to memory."""

    count: int
    folder: Path
    features: dict[str, Float[Tensor, "n c"]] = field(default_factory=dict)
    prompts: list[str | None] = field(default_factory=list)
    sha256: str = ""

    def enter(self, batch: Batch, judges: Mapping[str, Judge]) -> None:
        """Write the features of a batch."""
        self.prompts += batch.prompts
        for name, judge in judges.items():
            features = judge.embed(batch.inputs[name])
            if name not in self.features:
                path, shape = self.folder / f"{name.replace(':', '-')}.npy", (self.count, features.shape[1])
                self.folder.mkdir(exist_ok=True)
                self.features[name] = torch.from_numpy(np.lib.format.open_memmap(path, "w+", np.float32, shape))
            self.features[name][batch.first : batch.first + len(features)] = features


@dataclass(frozen=True)
class Extracted:
    """The features of both sets, and the measures of pairs."""

    ours: Seen
    theirs: Seen
    pairs: Mapping[str, Float[Tensor, " n"]]


def extract(
    folder: Path,
    sets: Sequence[tuple[Sequence[Path], Mapping[str, Judge]]],
    pairs: Mapping[str, Pair],
    *,
    batch: int = 32,
    before: Callable[[np.ndarray], np.ndarray] | None = None,
    reads_prompts: bool = False,
    is_quiet: bool = False,
) -> Extracted:
    """Extract features of two sets, images and reference with their networks, and measures of pairs by position.

    folder: where features are written. batch: images at a time. before: a function applied to every image first.
    reads_prompts: each image must contain its prompt. ValueError for sets that do not pair up.
    """
    from tqdm import tqdm

    if pairs:
        _check_pairs(", ".join(pairs), *(paths for paths, _ in sets))
    seen, streams = [], []
    for place, (paths, judges) in enumerate(sets):
        seen.append(Seen(len(paths), folder / str(place)))
        prepare = {name: judge.prepare for name, judge in judges.items()} | ({RAW: raw} if pairs else {})
        streams.append(Stream(paths, prepare, batch, before))
    values: dict[str, list[Tensor]] = {name: [] for name in pairs}
    total = sum(one.count for one in seen)
    with tqdm(total=total, unit=" images", disable=True if is_quiet else None, leave=False) as bar:
        for batches in zip_longest(*streams):
            ours = batches[0]
            if reads_prompts and ours is not None and None in ours.prompts:
                name = ours.names[ours.prompts.index(None)]
                raise ValueError(f"{name} has no prompt in its file: give one per image with --prompts")
            for one, some, (_, judges) in zip(seen, batches, sets, strict=True):
                if some is not None:
                    one.enter(some, judges)
                    bar.update(len(some.names))
            for name, measure in pairs.items():
                values[name].append(measure(*(some.inputs[RAW] for some in batches)))
    for one, stream in zip(seen, streams, strict=True):
        one.sha256 = stream.sha256
    return Extracted(*seen, pairs={name: torch.cat(found) for name, found in values.items()})


def _check_pairs(names: str, pictures: Sequence[Path], reference: Sequence[Path]) -> None:
    if len(pictures) != len(reference):
        got = f"{len(pictures)} images and {len(reference)} reference images"
        raise ValueError(f"{names}: got {got}, expected equal numbers")
    for one, other in zip(pictures, reference, strict=True):
        if one.stem != other.stem:
            raise ValueError(f"{names}: {one.name} is paired with {other.name}, expected pairs of the same name")
