"""`python -m studies.reading`: whether reading keeps Inception busy, and the time to read 30,000 PNGs.

Backs eval/results/reading.json: feature extraction is limited by the network, not by reading, and reading time is
linear in the number of images. "busy" is the time of bare forward passes over the time of a whole extraction of the
same images, interleaved over several rounds. By CPU time it is a lower bound, as if reading never overlapped with the
network; other work on the machine does not affect it. Listing and reading are timed at n and n / 2 images, with peak
memory, and extrapolated linearly to 30,000.
"""

import argparse
import io
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from lantern.cli.command import DONE, Command, existing, integer, run_command
from lantern.core.io import write_json
from lantern.eval.metrics.extraction import Extraction
from lantern.eval.metrics.inception import Inception, load_inception
from lantern.eval.metrics.pictures import Stream, find_pictures
from lantern.eval.speed.surroundings import load_average, surroundings
from lantern.models.folder import pick_device

TARGET = 30_000
DIFFERENT = 32  # different pictures; the others are copies, since making takes longer than reading


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--weights", type=existing, metavar="FILE", help="Inception; without it, busy is not measured")
    add("--pictures", type=integer(2, 10**6), default=2000, help="PNGs to list and read (default 2000)")
    add("--busy-pictures", type=integer(1, 10**6), default=64, help="PNGs to send through Inception (default 64)")
    add("--side", type=integer(8, 4096), default=256, help="height and width of the PNGs (default 256)")
    add("--rounds", type=integer(1, 1000), default=3, help="rounds of bare passes and whole extraction (default 3)")
    add("--batch", type=integer(1, 4096), default=16, help="pictures at a time (default 16)")
    add("--workers", type=integer(0, 1024), default=0, help="reading threads, 0 for as many as cores")
    add("--threads", type=integer(1, 1024), help="CPU threads of the network")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--out", type=Path, metavar="FILE", help="write the figures to a JSON file as well")


def run(args: argparse.Namespace) -> int:
    """Make images, read them, run some through the network, print the figures."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    with tempfile.TemporaryDirectory(prefix="lantern-reading-") as name:
        folder = Path(name)
        make_pictures(folder / "pictures", args.pictures, side=args.side)
        found: dict[str, Any] = {"what": "reading", "side": args.side, "workers": args.workers}
        found["reading"] = reading(folder / "pictures", args)
        print(json.dumps(found["reading"]), file=sys.stderr)
        if args.weights is not None:
            network = load_inception(args.weights, device=device)
            paths = find_pictures(folder / "pictures")[: args.busy_pictures]
            found["busy"] = busy(network, paths, args, folder)
    load = load_average()
    found |= {"load_average": load, "surroundings": surroundings(device)}
    if load is not None and load[0] > (os.cpu_count() or 1):
        # wall-clock times are invalid on a busy machine; CPU times remain valid
        found["void"] = "wall-clock times: the load average exceeds the number of cores"
    print(json.dumps(found, allow_nan=False))
    if args.out is not None:
        write_json(args.out, found)
    return DONE


def make_pictures(folder: Path, count: int, *, side: int) -> None:
    """PNGs of smooth images with grain, of about a photograph's size, in one folder, as a run leaves them."""
    from PIL import Image

    folder.mkdir(parents=True)
    random, contents = np.random.default_rng(0), []
    for _ in range(min(count, DIFFERENT)):
        smooth = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((side, side))
        grain = random.integers(0, 8, (side, side, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(np.minimum(np.array(smooth), 247) + grain).save(buffer, "PNG")
        contents.append(buffer.getvalue())
    for number in range(count):
        (folder / f"prompt_{number}.png").write_bytes(contents[number % DIFFERENT])


def reading(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return seconds of listing and of reading half and all, peak memory, and the extrapolation to 30,000."""
    before = Seconds.now()
    paths = find_pictures(folder)
    listed = Seconds.now() - before
    times, peaks = [], []
    for part in (paths[: len(paths) // 2], paths):
        before = Seconds.now()
        for _ in Stream(part, {"clean": clean_only}, batch=args.batch, workers=args.workers):
            pass
        times.append(Seconds.now() - before)
        peaks.append(peak_mib())
    half, whole = times
    scale = TARGET / len(paths)
    return {
        "pictures": len(paths),
        "listing_seconds": round(listed.wall, 4),
        "seconds_of_half_and_all": [round(half.wall, 3), round(whole.wall, 3)],
        "cpu_seconds_of_half_and_all": [round(half.cpu, 3), round(whole.cpu, 3)],
        "all_over_half_by_cpu_time": round(whole.cpu / half.cpu, 3),
        "peak_mib_at_half_and_all": peaks,
        f"seconds_at_{TARGET}": round((whole.wall + listed.wall) * scale, 1),
        f"cpu_seconds_at_{TARGET}": round((whole.cpu + listed.cpu) * scale, 1),
    }


def clean_only(pixels: np.ndarray) -> torch.Tensor:
    """Return the image after the default resize, without a network."""
    from lantern.eval.metrics.inception import RESIZERS

    return RESIZERS["clean"](pixels)


def busy(network: Inception, paths: Sequence[Path], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the share of bare forward passes in an extraction, interleaved, after one warm-up round."""
    stream = Stream(paths, {"inception": network.prepare}, args.batch, args.workers)
    prepared = [batch.inputs["inception"] for batch in stream]
    work = Extraction(folder, {"inception": network}, {}, {}, batch=args.batch, workers=args.workers, is_quiet=True)
    bare: list[Seconds] = []
    whole: list[Seconds] = []
    for number in range(args.rounds + 1):
        before = Seconds.now()
        for inputs in prepared:
            network.embed(inputs)  # copies features to the CPU, which waits for the device
        middle = Seconds.now()
        work.run(paths, ())
        if number:
            bare.append(middle - before)
            whole.append(Seconds.now() - middle)
        print(f"round {number} of {args.rounds}: bare {(middle - before).wall:.2f} s", file=sys.stderr)
    return {
        "pictures": len(paths),
        "rounds": args.rounds,
        "bare_seconds": [round(one.wall, 3) for one in bare],
        "extraction_seconds": [round(one.wall, 3) for one in whole],
        "bare_cpu_seconds": [round(one.cpu, 3) for one in bare],
        "extraction_cpu_seconds": [round(one.cpu, 3) for one in whole],
        "busy": round(median(a.wall / b.wall for a, b in zip(bare, whole, strict=True)), 4),
        "busy_by_cpu_time": round(median(a.cpu / b.cpu for a, b in zip(bare, whole, strict=True)), 4),
        "pictures_per_second": round(len(paths) / median(one.wall for one in whole), 2),
    }


@dataclass(frozen=True)
class Seconds:
    """A time or duration: wall clock, and CPU time of this process."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Seconds":
        """Return the current times."""
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


def peak_mib() -> float:
    """Return the peak memory of this process in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)


COMMAND = Command("reading", "Measure whether reading images keeps Inception busy.", add_arguments, run)

if __name__ == "__main__":
    sys.exit(run_command(COMMAND, prog="python -m studies.reading"))
