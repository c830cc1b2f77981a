"""Feature extraction: each image is read once for all networks, and features are written to disk in a stream."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from lantern.eval.metrics.pictures import Batch, Stream, raw
from lantern.eval.metrics.weights import Found

Pair = Callable[[UInt8[Tensor, "b 3 h w"], UInt8[Tensor, "b 3 h w"]], Float[Tensor, " b"]]
RAW = "raw"


@dataclass(frozen=True)
class Judge:
    """A network that maps images to features.

    prepare: maps an image (uint8, h w 3) to the network's input, in reader threads. embed: maps prepared images to
    features on the CPU. read: maps prompts to features of the same space.
    """

    weights: Found
    prepare: Callable[[np.ndarray], Tensor]
    embed: Callable[[Tensor], Float[Tensor, "b c"]]
    read: Callable[[Sequence[str]], Float[Tensor, "b c"]] | None = None


@dataclass
class Seen:
    """The features of a set of images, by network; the tensors are memory-mapped files."""

    count: int
    features: dict[str, Float[Tensor, "n c"]] = field(default_factory=dict)
    prompts: list[str | None] = field(default_factory=list)
    sha256: str = ""


@dataclass(frozen=True)
class Extracted:
    """The features of both sets, and the measures of pairs."""

    ours: Seen
    theirs: Seen
    pairs: Mapping[str, Float[Tensor, " n"]]


@dataclass(frozen=True)
class Extraction:
    """An extraction: networks for the images, networks for the reference, and measures of pairs of both by position.

    folder: where features are written. batch: images at a time.
    before: a function applied to every image first. reads_prompts: each image must contain its prompt.
    """

    folder: Path
    ours: Mapping[str, Judge]
    theirs: Mapping[str, Judge]
    pairs: Mapping[str, Pair]
    batch: int = 32
    before: Callable[[np.ndarray], np.ndarray] | None = None
    reads_prompts: bool = False
    is_quiet: bool = False

    def run(self, pictures: Sequence[Path], reference: Sequence[Path]) -> Extracted:
        """Extract features of both sets and measures of pairs; ValueError for sets that do not pair up."""
        from tqdm import tqdm

        self._check_pairs(pictures, reference)
        sets = [Seen(len(pictures)), Seen(len(reference))]
        streams = []
        for paths, judges in ((pictures, self.ours), (reference, self.theirs)):
            prepare = {name: judge.prepare for name, judge in judges.items()} | ({RAW: raw} if self.pairs else {})
            streams.append(Stream(paths, prepare, self.batch, self.before))
        values: dict[str, list[Tensor]] = {name: [] for name in self.pairs}
        total = len(pictures) + len(reference)
        with tqdm(total=total, unit=" images", disable=True if self.is_quiet else None, leave=False) as bar:
            for batches in zip_longest(*streams):
                ours = batches[0]
                if self.reads_prompts and ours is not None and None in ours.prompts:
                    name = ours.names[ours.prompts.index(None)]
                    raise ValueError(f"{name} has no prompt in its file: give one per image with --prompts")
                for place, (batch, judges) in enumerate(zip(batches, (self.ours, self.theirs), strict=True)):
                    if batch is not None:
                        self._enter(sets[place], batch, judges, f"{place}")
                        bar.update(len(batch.names))
                for name, measure in self.pairs.items():
                    values[name].append(measure(*(batch.inputs[RAW] for batch in batches)))
        for seen, stream in zip(sets, streams, strict=True):
            seen.sha256 = stream.sha256
        return Extracted(*sets, pairs={name: torch.cat(found) for name, found in values.items()})

    def _check_pairs(self, pictures: Sequence[Path], reference: Sequence[Path]) -> None:
        if not self.pairs:
            return
        names = ", ".join(self.pairs)
        if len(pictures) != len(reference):
            got = f"{len(pictures)} images and {len(reference)} reference images"
            raise ValueError(f"{names}: got {got}, expected equal numbers")
        for one, other in zip(pictures, reference, strict=True):
            if one.stem != other.stem:
                raise ValueError(f"{names}: {one.name} is paired with {other.name}, expected pairs of the same name")

    def _enter(self, seen: Seen, batch: Batch, judges: Mapping[str, Judge], name: str) -> None:
        seen.prompts += batch.prompts
        for judge, network in judges.items():
            features = network.embed(batch.inputs[judge])
            if judge not in seen.features:
                path = self.folder / f"{name}-{judge.replace(':', '-')}.npy"
                shape = (seen.count, features.shape[1])
                seen.features[judge] = torch.from_numpy(np.lib.format.open_memmap(path, "w+", np.float32, shape))
            seen.features[judge][batch.first : batch.first + len(features)] = features
