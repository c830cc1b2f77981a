"""Rounds of a sweep: the folder that stores them while it runs, and the figures computed from them.

sweep.json              what is measured; a folder of another sweep is rejected
rounds/00007.json       round 7: one image by every contender, with seconds
portraits/ab12cd.json   the shown images of one contender, with their acceptance maps

One file is written per round, so an interrupted sweep resumes.
"""

import base64
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from lantern.core.config import read_json_object
from lantern.core.io import write_json
from lantern.core.types import Generation
from lantern.eval.metrics.distances import Estimate, bootstrap, mean_estimate
from lantern.eval.metrics.reconstruction import decode
from lantern.eval.speed.contenders import Variant
from lantern.eval.speed.race import Spread, refusal, rounded
from lantern.models.folder import Model

HEADER = "sweep.json"
# fields of the surroundings that must be equal when a sweep resumes
SAME = ("lantern", "python", "torch", "torchao", "cpu", "cores", "threads", "device", "gpu")


@dataclass(frozen=True)
class SweepFolder:
    """The folder of one sweep; created by `open_folder`."""

    path: Path

    def rounds(self, images: int) -> dict[int, dict[str, Any]]:
        """Return the finished rounds with numbers below `images`."""
        found = {int(path.stem): path for path in (self.path / "rounds").glob("[0-9]*.json")}
        return {number: read_json_object(found[number]) for number in sorted(found) if number < images}

    def write_round(self, number: int, entry: Mapping[str, Any]) -> None:
        """Store a finished round."""
        write_json(self.path / "rounds" / f"{number:05}.json", entry)

    def portraits(self, contender: str) -> list[dict[str, Any]]:
        """Return the stored shown images of a contender."""
        path = self._portraits(contender)
        return read_json_object(path)["portraits"] if path.is_file() else []

    def write_portraits(self, contender: str, portraits: Sequence[Mapping[str, Any]]) -> None:
        """Store the shown images of a contender."""
        write_json(self._portraits(contender), {"contender": contender, "portraits": list(portraits)})

    def _portraits(self, contender: str) -> Path:
        name = hashlib.sha256(contender.encode()).hexdigest()[:16]
        return self.path / "portraits" / f"{name}.json"


def open_folder(path: Path, header: Mapping[str, Any]) -> SweepFolder:
    """Open the folder of a sweep, new or begun; ValueError for a folder of another sweep, naming what differs."""
    header = json.loads(json.dumps(header))
    kept = path / HEADER
    if kept.is_file():
        known = read_json_object(kept)
        differing = [name for name in {**known, **header} if known.get(name) != header.get(name)]
        if differing:
            raise ValueError(
                f"{path} holds a sweep that was begun with other {', '.join(differing)}: "
                "give another folder with --run, or delete this one"
            )
        return SweepFolder(path)
    if path.exists() and (not path.is_dir() or any(not entry.name.startswith(".") for entry in path.iterdir())):
        raise ValueError(f"{path} is not the folder of a sweep: give --run a new folder")
    write_json(kept, header)
    return SweepFolder(path)


Round = Mapping[str, Any]


class Progress:
    """Progress of `total` steps of a board on stderr: a bar on a terminal, else a line for each update."""

    def __init__(self, total: int, name: str, unit: str, *, is_quiet: bool) -> None:
        from tqdm import tqdm

        # with disable=None tqdm shows the bar only if stderr is a terminal
        hides = True if is_quiet else None
        self._bar: Any = tqdm(total=total, desc=name, unit=f" {unit}", disable=hides, leave=False, dynamic_ncols=True)
        self._total, self._name, self._unit, self._done = total, name, unit, 0
        self._prints_lines = self._bar.disable and not is_quiet

    def update(self, count: int = 1, what: str = "") -> None:
        """Count steps; `what` names what was done, for the line."""
        self._done += count
        self._bar.update(count)
        if self._prints_lines:
            done = f"{self._name}: {self._done} of {self._total} {self._unit}"
            print(f"{done}, {what}" if what else done, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


def pixels_of(model: Model, codes: Int[Tensor, "b n"]) -> UInt8[Tensor, "b 3 h w"]:
    """Decode codes to pixels; ValueError for a model without a tokenizer."""
    if model.vq is None:
        raise ValueError(f"model {model.name} has no vqvae/ folder, which quality figures need")
    return decode(model.vq, codes)


def records_of(rounds: Sequence[Round], contender: str) -> list[dict[str, Any]]:
    """Return the records of a contender by round; rounds without it are left out."""
    return [entry["made"][contender] for entry in rounds if contender in entry["made"]]


def seconds_of(rounds: Sequence[Round], contender: str) -> list[float]:
    """Return the seconds of a contender by round."""
    return [record["seconds"] for record in records_of(rounds, contender)]


def fastest(rounds: Sequence[Round], contenders: Sequence[str]) -> str:
    """Return the contender with the smallest median of seconds."""
    return min(contenders, key=lambda name: median(seconds_of(rounds, name)))


def speedup(rounds: Sequence[Round], baseline: str, contender: str) -> Estimate:
    """Return median seconds of the baseline over those of a contender; images are resampled for both together."""
    both = [entry["made"] for entry in rounds if baseline in entry["made"] and contender in entry["made"]]
    table = torch.tensor([[made[baseline]["seconds"], made[contender]["seconds"]] for made in both])
    return bootstrap(
        table.double(), lambda sampled: sampled[..., 0].quantile(0.5, -1) / sampled[..., 1].quantile(0.5, -1), seed=0
    )


def step_compression(records: Sequence[Mapping[str, Any]], codes: int) -> Estimate:
    """Return codes per target pass over all images."""
    passes = torch.tensor([[record["passes"]] for record in records], dtype=torch.float64)
    return bootstrap(passes, lambda sampled: codes / sampled[..., 0].mean(-1), seed=0)


def codes_ratio(mine: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> Estimate:
    """Return codes per pass of one method over the other's, on the same images."""
    table = torch.tensor([[float(b["passes"]), float(a["passes"])] for a, b in zip(mine, other, strict=True)])
    return bootstrap(table.double(), lambda sample: sample[..., 0].mean(-1) / sample[..., 1].mean(-1), seed=0)


def point_figures(rounds: Sequence[Round], baseline: str, contender: str, codes: int) -> dict[str, Any]:
    """Return the figures of a contender; "quality" has only "total-variation" until networks are added."""
    records = records_of(rounds, contender)
    sides = [Spread.of(seconds_of(rounds, name)) for name in (baseline, contender)]
    gain = speedup(rounds, baseline, contender)
    assert gain.low is not None and gain.high is not None
    spent = torch.tensor([record["total_variation"] / codes for record in records], dtype=torch.float64)
    return {
        "images": len(records),
        "seconds": sides[1].as_dict(),
        "speedup": as_dict(gain),
        "refusal": None if contender == baseline else refusal(sides[0], sides[1], (gain.low, gain.high), len(records)),
        "step_compression": as_dict(step_compression(records, codes)),
        "relaxed_share": rounded(sum(record["relaxed"] for record in records) / (codes * len(records))),
        "quality": {"total-variation": as_dict(mean_estimate(spent, seed=0))},
        "depths": by_depth(records),
    }


def by_depth(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each depth, how often a node with children was reached and how often a child was accepted."""
    sums = [
        [sum(column) for column in zip(*(r[name] for r in records), strict=True)] for name in ("reached", "accepted")
    ]
    return [{"reached": reached, "accepted": accepted} for reached, accepted in zip(*sums, strict=True) if reached]


def as_dict(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate for JSON."""
    return {name: rounded(value) if isinstance(value, float) else value for name, value in asdict(estimate).items()}


def name_of(spec: str, variant: Variant) -> str:
    """Return the name of a contender in the files of a sweep."""
    return f"{spec} | {variant}"


def record(made: Generation, seconds: float, number: int = 0) -> dict[str, Any]:
    """Return the record of image `number` of a batch."""
    return {
        "seconds": seconds,
        "passes": int(made.passes[number]),
        "total_variation": float(made.total_variation[number]),
        "relaxed": float(made.relaxed[number]),
        "reached": made.reached[number].tolist(),
        "accepted": made.accepted[number].tolist(),
        "codes": pack(made.codes[number]),
    }


def pack(codes: Int[Tensor, " n"]) -> str:
    """Encode codes as text: base64 of 32-bit little-endian numbers."""
    return base64.b64encode(codes.cpu().numpy().astype("<u4").tobytes()).decode("ascii")


def unpack(texts: Sequence[str]) -> Int[Tensor, "b n"]:
    """Decode the codes of several images from the text of `pack`."""
    rows = [np.frombuffer(base64.b64decode(text), dtype="<u4").astype(np.int64) for text in texts]
    return torch.from_numpy(np.stack(rows))
