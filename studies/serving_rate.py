"""`python -m studies.serving_rate`: images per second of a server's model thread and of `lantern-generate`.

Backs the table of rates in docs/serving.md. One process makes the same images in three ways, in turns: in batches as
`lantern-generate` does, by the model thread of `lantern serve` with images that join those under way, and by it with
waves. Each image has a prompt of its own. All images wait in the queue at first. Files, HTTP and encoding are not
included. Rates are medians of the runs. `of_lantern_generate` is the ratio of rates within a run: the median and a 95 %
interval of it by resampling the runs. Both are given by the wall clock and by the processor time of the process, which
other programs disturb less; with several threads it includes their waiting.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lantern.cli.command import DONE, Command, integer, run_command
from lantern.core.io import write_json
from lantern.eval.speed.surroundings import load_average, surroundings
from lantern.generation.generator import generate
from lantern.generation.requests import requests
from lantern.generation.serving.worker import Job, Worker
from lantern.models.folder import Model, load_model

COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "brown", "black")
THINGS = ("apple", "heart", "car", "book", "flower", "cat", "star", "house")
SAMPLES = 10_000  # of an interval
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--model", default="lantern-emoji", help="name, folder or hub id")
    parser.add_argument("--methods", nargs="+", default=["plain", "gumbel-jacobi", "eagle1"], help="methods")
    parser.add_argument(
        "--pictures",
        type=integer(1, len(COLOURS) * len(THINGS)),
        default=16,
        metavar="N",
        help="pictures a run (default 16)",
    )
    parser.add_argument("--batch", type=integer(1, 4096), default=8, metavar="N", help="pictures at once (default 8)")
    parser.add_argument("--runs", type=integer(1, 100), default=3, metavar="N", help="runs of each (default 3)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="result file")


def prompts(count: int) -> list[str]:
    """Return different prompts, at most len(COLOURS) * len(THINGS)."""
    return [f"a {colour} {thing}" for thing in THINGS for colour in COLOURS][:count]


def in_batches(model: Model, method: str, args: argparse.Namespace) -> None:
    """Make the images as `lantern-generate` does."""
    requested = requests(prompts=prompts(args.pictures), seed=7)
    assert len(list(generate(model, requested, method=method, batch=args.batch))) == args.pictures


def served(model: Model, method: str, args: argparse.Namespace, *, waves: bool) -> None:
    """Make the images by the model thread of a server."""
    made = list[Any]()

    def send(kind: str, value: Any, index: int | None) -> None:
        if kind == "failed":
            raise value
        made.append(value)

    worker = Worker(model, batch=args.batch, waiting=args.pictures, waves=waves)
    requested = requests(prompts=prompts(args.pictures), seed=7)
    worker.submit([Job(one, method, model.sampling(), send) for one in requested])
    while worker.queued or worker.running:
        worker.step()
    assert len(made) == args.pictures


def ratio(reference: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return the median ratio of the rates of runs, and the ends of its 95 % interval."""
    found = torch.tensor(reference) / torch.tensor(seconds)
    picks = torch.randint(len(found), (SAMPLES, len(found)), generator=torch.Generator().manual_seed(0))
    ends = found[picks].quantile(0.5, 1).quantile(torch.tensor([0.025, 0.975]))
    return [float(found.quantile(0.5)), *ends.tolist()]


def run(args: argparse.Namespace) -> int:
    """Measure, print and write the rates."""
    before, model = load_average(), load_model(args.model)
    ways: dict[str, Callable[[str], None]] = {
        "lantern-generate": lambda method: in_batches(model, method, args),
        "rows": lambda method: served(model, method, args, waves=False),
        "waves": lambda method: served(model, method, args, waves=True),
    }
    rates: dict[str, dict[str, dict[str, float]]] = {clock: {} for clock in CLOCKS}
    ratios: dict[str, dict[str, dict[str, list[float]]]] = {clock: {} for clock in CLOCKS}
    for method in args.methods:
        seconds: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in ways} for clock in CLOCKS}
        for turn in range(args.runs + 1):  # the first one warms up
            for name, make in ways.items():
                begun = {clock: read() for clock, read in CLOCKS.items()}
                make(method)
                for clock, read in CLOCKS.items():
                    if turn:
                        seconds[clock][name].append(read() - begun[clock])
        for clock, times in seconds.items():
            reference = times["lantern-generate"]
            rates[clock][method] = {name: args.pictures / statistics.median(times[name]) for name in ways}
            ratios[clock][method] = {name: ratio(reference, times[name]) for name in ("rows", "waves")}
            print(method, clock, rates[clock][method], ratios[clock][method])
    result = {
        "what": "serving_rate",
        "model": args.model,
        "engine": model.engine.resolve(model.target).name,
        "pictures": args.pictures,
        "batch": args.batch,
        "runs": args.runs,
        "pictures_per_second": rates,
        "of_lantern_generate": ratios,
        "surroundings": surroundings(torch.device("cpu")),
        "load_average": {"before": before, "after": load_average()},
    }
    write_json(args.out, result)
    return DONE


COMMAND = Command("serving-rate", "Compare the image rates of a server and of batches.", add_arguments, run)

if __name__ == "__main__":
    sys.exit(run_command(COMMAND, prog="python -m studies.serving_rate"))
