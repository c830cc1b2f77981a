"""`python -m studies.auto_choice --shape B`: is method "auto" ever slower than plain decoding, without a profile?

For each model, or size of LlamaGen (random weights), and engine, prints what "auto" chooses by T(n), and its speedup
over plain decoding of the same engine at given codes per step. The seconds of a step with a window do not depend on how
many of its codes are accepted, so a step is timed once, and the speedup at tau codes per step is

    tau, but at most the window,  x  seconds of a plain step / seconds of a step with the window,

except where the method gives the window up after its first steps (`least`) and decodes the rest plainly.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lantern.cli.bench import SHAPES
from lantern.cli.command import DONE, FAILED, Command, integer, one_of, real, run_command
from lantern.core.io import write_json
from lantern.core.types import Condition, Step
from lantern.decoding.loop import now
from lantern.drafters.windows.jacobi import TRIAL
from lantern.engines.engine import engine
from lantern.eval.speed.contenders import DoneError, Job
from lantern.eval.speed.race import Spread, interleave
from lantern.eval.speed.shapes import ShapeOptions, random_model
from lantern.eval.speed.surroundings import load_average, surroundings
from lantern.generation.generator import choose_method
from lantern.methods.registry import METHODS, Decoder, Method, build_decoder
from lantern.models.folder import DTYPES, Model, load_model, pick_device


@dataclass(frozen=True)
class Row:
    """A choice with the milliseconds of a step, plain and chosen, and the spread (p90 / p10) of the wider one.

    `codes` is the number of codes of an image.
    """

    shape: str
    engine: str
    method: Method
    plain_ms: float
    chosen_ms: float
    spread: float
    codes: int

    def speedup(self, tau: float) -> float:
        """Return the speedup over plain decoding at `tau` codes per step; 1 if plain decoding was chosen."""
        if self.method.is_plain:
            return 1.0
        settings = self.method.settings
        done, cost = min(tau, settings["window"]), self.chosen_ms / self.plain_ms
        if done >= settings["least"]:
            return done / cost
        trial = TRIAL * done
        return self.codes / (TRIAL * cost + self.codes - trial)

    def holds(self, tau: float) -> bool:
        """Return whether the choice is not slower than plain decoding by more than the spread."""
        return self.speedup(tau) * self.spread >= 1

    def as_dict(self, taus: Sequence[float]) -> dict[str, Any]:
        """Return the row for a result file."""
        figures = {"plain_ms": self.plain_ms, "chosen_ms": self.chosen_ms, "spread": self.spread}
        return {
            "model": self.shape,
            "engine": self.engine,
            "method": self.method.label,
            "reason": self.method.reason,
            **{name: round(value, 4) for name, value in figures.items()},
            "speedup": {f"{tau:g}": round(self.speedup(tau), 3) for tau in taus},
            "holds": all(self.holds(tau) for tau in taus),
        }


def measure(model: Model, shape: str, *, steps: int, rounds: int) -> Row:
    """Return the row of a model with its engine; `shape` is its name."""
    sampling = model.sampling(guidance=7.5, top_k=1000)
    method = choose_method(model, "auto", sampling=sampling, report=lambda line: None)
    methods = [METHODS["plain"]] if method.is_plain else [METHODS["plain"], method]
    decoders = [build_decoder(one, model.target, sampling=sampling, engine=model.engine) for one in methods]
    job = Job(_condition(model), [(0, 0)])
    runs = [lambda _, one=one: step_seconds(one, job, steps) for one in decoders]
    for run in runs:
        run(0)
    _, found = interleave(runs, rounds, device=model.device)
    plain, chosen = found[0], found[-1]
    width = max(Spread.of(seconds).width for seconds in found)
    codes = model.target.config.block_size
    return Row(shape, model.engine.name, method, 1e3 * min(plain), 1e3 * min(chosen), width, codes)


def step_seconds(decoder: Decoder, job: Job, steps: int) -> float:
    """Return the mean seconds of the first `steps` steps after the prompt; ValueError for an image of fewer."""
    device, begin = job.condition.device, 0.0

    def watch(step: Step) -> None:
        nonlocal begin
        if step.index == 0:
            begin = now(device)
        if step.index == steps:
            raise DoneError((now(device) - begin) / steps)

    try:
        decoder.generate(job.condition, keys=job.keys, callback=watch)
    except DoneError as done:
        return done.seconds
    raise ValueError(f"the image has fewer than {steps} steps: give fewer")


def _condition(model: Model) -> Condition:
    words = torch.randn(1, 4, model.target.config.caption_dim, generator=torch.Generator().manual_seed(0))
    return Condition(embeddings=words, mask=torch.ones(1, 4, dtype=torch.bool)).to(model.device)


def table(rows: Sequence[Row], taus: Sequence[float]) -> list[str]:
    """Return the rows as aligned lines; "slower" marks a choice that is slower than plain by more than the spread."""
    from lantern.eval.speed.bench_table import aligned

    header = ("shape", "engine", "auto is", "plain ms", "step ms", "spread", *(f"at {tau:g}" for tau in taus))
    lines: list[tuple[str, ...]] = [header]
    for row in rows:
        speedups = [f"{row.speedup(tau):.2f}x" + ("" if row.holds(tau) else " slower") for tau in taus]
        figures = (f"{row.plain_ms:.2f}", f"{row.chosen_ms:.2f}", f"{row.spread:.2f}")
        lines.append((row.shape, row.engine, row.method.label, *figures, *speedups))
    return aligned(lines, left=3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--shape", nargs="*", type=one_of(SHAPES), default=["B"], help="sizes of LlamaGen (default B)")
    add("--model", nargs="*", default=[], help="names, folders or hub ids of models (default none)")
    add("--engine", nargs="+", default=["auto"], help="engines (default auto)")
    add("--tau", nargs="+", type=real(1, 64), default=[1.5, 2.5, 3.5], help="codes per step (default 1.5 2.5 3.5)")
    add("--dtype", choices=tuple(DTYPES), default="bf16", help="default bf16")
    add("--steps", type=integer(1, 1000), default=8, help="steps of a round (default 8)")
    add("--rounds", type=integer(1, 1000), default=5, help="rounds (default 5)")
    add("--threads", type=integer(1, 1024), help="CPU threads to compute on")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--out", type=Path, help="JSON file of the results")


def run(args: argparse.Namespace) -> int:
    """Measure, print; return 1 if a choice is slower than plain decoding by more than the spread."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device, rows, before = pick_device(args.device), list[Row](), load_average()
    for name in args.model:
        for kind in args.engine:
            model = load_model(name, device=device, dtype=args.dtype, parts=(), engine=kind)
            rows.append(measure(model, model.name, steps=args.steps, rounds=args.rounds))
    for shape in args.shape:
        options = ShapeOptions(shape=shape)
        for kind in args.engine:
            model = random_model(options.config, "eagle1", device, DTYPES[args.dtype])
            made: Any = Model(name=shape, target=model.target, engine=engine(kind))
            rows.append(measure(made, shape, steps=args.steps, rounds=args.rounds))
    print("\n".join(table(rows, args.tau)))
    if args.out is not None:
        found = {"dtype": args.dtype, "steps": args.steps, "rounds": args.rounds, "surroundings": surroundings(device)}
        load = {"begin": before, "end": load_average()}
        write_json(args.out, found | {"load_average": load, "rows": [row.as_dict(args.tau) for row in rows]})
    return DONE if all(row.holds(tau) for row in rows for tau in args.tau) else FAILED


COMMAND = Command("auto_choice", 'Compare method "auto" without a profile with plain decoding.', add_arguments, run)

if __name__ == "__main__":
    sys.exit(run_command(COMMAND, prog="python -m studies.auto_choice"))
