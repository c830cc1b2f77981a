"""`python -m lantern.eval.speed.equality`: compare exact methods with plain decoding, code for code.

Every exact method with Gumbel verification makes the same images as plain decoding, alone and in batches. Differing
codes are counted. At the first difference of an image, the gap between the best two codes is compared with the
largest change that rounding can cause. Results are written after every block of images; a later run resumes.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.cli.command import DONE, FAILED, Command, integer, real, run_command
from lantern.core.config import read_json_object
from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.engines.engine import ENGINES, Weights
from lantern.engines.engine import engine as make_engine
from lantern.methods.registry import METHODS, Method, add_ons_of

if TYPE_CHECKING:
    from lantern.generation.generator import Generator
    from lantern.generation.requests import Request
    from lantern.models.folder import Model

# Units in the last place by which a logit of one row may differ between two passes over the same codes. In fp32, 11
# were observed through 16 layers. In half precision attention runs in fp32, and little but the last rounding differs.
ULPS = {torch.float32: 16, torch.bfloat16: 2, torch.float16: 2}


@dataclass(frozen=True)
class Tie:
    """Two passes that sampled different codes after the same prefix.

    `plain_gap` and `method_gap` are the gaps between the best two values of log p + g in each pass. `bound` is the
    largest change of a gap by rounding; `ulp` is one unit in the last place of the logits.
    """

    picture: int
    code: int
    plain_gap: float
    method_gap: float
    ulp: float
    bound: float

    @property
    def share(self) -> float:
        """The larger gap over `bound`: at most 1 if rounding can have swapped the codes."""
        return max(self.plain_gap, self.method_gap) / self.bound


class Margins:
    """Callback that records `gaps[i, j]` between the best two values of log p + g at code j of image i.

    `ulps[i, j]` is one unit in the last place, in the model's `dtype`, of the largest logit of the two codes.
    """

    def __init__(self, sampling: Sampling, noise: Noise, dtype: torch.dtype, images: int) -> None:
        self.sampling, self.noise, self.dtype = sampling, noise, dtype
        self.gaps = torch.zeros(images, noise.positions)
        self.ulps = torch.zeros(images, noise.positions)

    def __call__(self, step: Step) -> None:
        """Record the codes of a step."""
        assert step.scores is not None
        images = len(step.start)
        logits = step.scores.logits.unflatten(0, (images, -1))
        if step.verdict is not None:
            visited = torch.nn.functional.pad(step.verdict.path, (1, 0))
            logits = logits.gather(2, visited[:, None, :, None].expand(-1, logits.shape[1], -1, logits.shape[3]))
        steps = torch.arange(logits.shape[2], device=logits.device)
        places = step.start[:, None] + steps
        scores = self.sampling.log_probs(logits, places) + self.noise.gumbel(places)
        best = scores.topk(2, dim=-1)
        rows = logits.gather(3, best.indices[:, None].expand(-1, logits.shape[1], -1, -1)).abs().amax((1, 3))
        ulps = torch.finfo(self.dtype).eps * torch.exp2(rows.frexp().exponent - 1.0)
        image, column = (steps < step.counts[:, None]).nonzero(as_tuple=True)
        where = (image.cpu(), places[image, column].cpu())
        self.gaps[where] = (best.values[..., 0] - best.values[..., 1])[image, column].cpu()
        self.ulps[where] = ulps[image, column].cpu()


@dataclass(frozen=True)
class Place:
    """One image of a recorded batch."""

    margins: Margins
    image: int


def tie(picture: int, code: int, plain: Place, method: Place) -> Tie:
    """Describe the code at which two passes first differ.

    Guidance s combines two rows as s c - (s - 1) u: an error of e in each becomes (2 s - 1) e, divided by the
    temperature. The gap between two codes changes by at most twice that; e is at most `ULPS` units in the last place.
    """
    sampling = plain.margins.sampling
    gain = (2 * float(sampling.guidance) - 1) if sampling.rows == 2 else 1.0
    ulp = max(float(place.margins.ulps[place.image, code]) for place in (plain, method))
    return Tie(
        picture=picture,
        code=code,
        plain_gap=float(plain.margins.gaps[plain.image, code]),
        method_gap=float(method.margins.gaps[method.image, code]),
        ulp=ulp,
        bound=2 * gain * ULPS[plain.margins.dtype] * ulp / float(sampling.temperature or 1.0),
    )


def first_difference(one: Int[Tensor, "b n"], other: Int[Tensor, "b n"]) -> list[int | None]:
    """Return the first differing code of each image, or None."""
    differs = one != other
    first = differs.long().argmax(1)
    return [int(j) if bool(row.any()) else None for j, row in zip(first, differs, strict=True)]


def smallest(gaps: Float[Tensor, "b n"]) -> float:
    """Return the smallest gap."""
    return float(gaps.min())


def largest_change(plain: Place, method: Place, *, codes: int | None) -> float:
    """Return the largest change of the gap over the first `codes` codes (None: all).

    These codes have the same prefix in both passes, so the change is due to rounding.
    """
    change = (plain.margins.gaps[plain.image] - method.margins.gaps[method.image]).abs()[:codes]
    return float(change.max()) if len(change) else 0.0


RESULTS = Path(__file__).resolve().parents[1] / "results"
MAX_TIES = 64  # ties that a cell describes; all are counted


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return run_command(COMMAND, argv, prog="python -m lantern.eval.speed.equality")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--model", default="lantern-emoji", help="name, folder or hub id of the model")
    add("--methods", nargs="+", metavar="METHOD", help="NAME or NAME:SETTING=VALUE,... (default: all exact)")
    add("--seeds", type=integer(1, 10**6), default=64, help="number of seeds, from 0 on (default 64)")
    add("--prompts", type=integer(1, 10), default=4, help="number of bench prompts (default 4)")
    add("--guidance", type=real(0, 1000), nargs="+", default=[1.0, 3.0, 7.5], help="guidance scales (default 1 3 7.5)")
    add("--batch", type=integer(1, 4096), nargs="+", default=[1, 3], help="batch sizes of the methods (default 1 3)")
    add(
        "--plain-batch",
        type=integer(1, 4096),
        default=32,
        help="of plain decoding (default 32; graph: as the methods)",
    )
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="default fp32: a difference is a failure")
    add("--engine", choices=tuple(ENGINES), default="eager", help="how passes are run (default eager)")
    add("--reproducible", action="store_true", help="reproducible engine; a difference is always a failure")
    add("--int8", action="store_true", help="8-bit weights for plain decoding and methods")
    add("--device", default="auto", help="cpu, cuda or auto")
    add("--threads", type=integer(1, 1024), help="CPU threads to compute on")
    add("--out", type=Path, default=RESULTS / "equality.json", help="file of the results, which a later run extends")
    add("--anew", action="store_true", help="replace the results of the file instead of extending them")


def run(args: argparse.Namespace) -> int:
    """Compare what is missing; return 1 if a code differs where none may."""
    from lantern.core.io import write_json
    from lantern.eval.speed.contenders import PROMPTS, method_of
    from lantern.generation.requests import Request
    from lantern.models.folder import load_model

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    weights: Weights = "int8" if args.int8 else "full"
    engine = make_engine(args.engine, weights=weights, reproducible=args.reproducible)
    model = load_model(args.model, device=args.device, dtype=args.dtype, parts=("text", "drafter"), engine=engine)
    methods = [method_of(model, spec) for spec in args.methods or promising(model)]
    plan = Plan(
        requested=[Request(prompt=p, seed=s) for s in range(args.seeds) for p in PROMPTS[: args.prompts]],
        what={"prompts": list(PROMPTS[: args.prompts]), "seeds": args.seeds, "dtype": args.dtype}
        | {"reproducible": args.reproducible, "device": model.device.type}
        | {"engine": model.engine.name, "weights": weights},
        block=args.plain_batch,
    )
    report = read(args.out, model.fingerprint, name=model.name, anew=args.anew)
    cells = []
    for guidance in args.guidance:
        of_distribution = [
            Cell(method, plan.cell(report, method, guidance, batch)) for method in methods for batch in args.batch
        ]
        compare(model, plan, guidance, of_distribution, lambda: write_json(args.out, report))
        found = [cell.results for cell in of_distribution]
        print("\n".join(map(line, found)), flush=True)
        cells += found
    is_promised = [args.dtype == "fp32" or cell.get("promise") == "codes" for cell in cells]
    differs = any(cell["differing_codes"] for cell, is_promise in zip(cells, is_promised, strict=True) if is_promise)
    return FAILED if differs else DONE


def promising(model: "Model") -> list[str]:
    """Return the exact methods with Gumbel verification whose trained parts the model has, without "auto"."""
    exact = [m for m in METHODS.values() if m.is_identical and m.name != "auto"]
    return [m.name for m in exact if all(part in model.add_ons for part in add_ons_of(m))]


@dataclass(frozen=True)
class Plan:
    """The images to compare, in blocks of `block`, and the settings `what` that the results depend on."""

    requested: "list[Request]"
    what: Mapping[str, Any]
    block: int

    def cell(self, report: dict[str, Any], method: Method, guidance: float, batch: int) -> dict[str, Any]:
        """Return the results so far of a method at a guidance and batch size; a new cell is added to the report."""
        of_method = {
            "name": method.name,
            "tree": method.tree,
            "mode": method.spec.mode,
            "settings": dict(method.settings),
        }
        what = {"method": of_method, "guidance": guidance, "batch": batch, **self.what}
        for cell in report["cells"]:
            if cell["what"] == what:
                return cell
        fresh = {"what": what, "pictures": 0, "of": len(self.requested), "codes": 0, "seconds": 0.0}
        fresh |= {"differing_pictures": 0, "differing_codes": 0, "smallest_gap": None, "largest_gap_change": 0.0}
        fresh |= {"ties": [], "ties_beyond_rounding": 0, "largest_share_of_bound": None}
        fresh |= {"surroundings": {}, "commits": []}
        report["cells"].append(fresh)
        return fresh


@dataclass(frozen=True)
class Cell:
    """A method and its results at one guidance and batch size."""

    method: Method
    results: dict[str, Any]


def compare(model: "Model", plan: Plan, guidance: float, cells: Sequence[Cell], write: Callable[[], None]) -> None:
    """Complete all cells of one guidance block by block; `write` is called after each block."""
    from lantern.eval.speed.surroundings import surroundings
    from lantern.generation.generator import Generator

    sampling = model.sampling(guidance=guidance, temperature=1.0, top_k=0, top_p=1.0)
    here = surroundings(model.device)  # before the run, since a commit may follow during it
    for first in range(0, len(plan.requested), plan.block):
        block = plan.requested[first : first + plan.block]
        pending = [cell for cell in cells if cell.results["pictures"] < first + len(block)]
        if not pending:
            continue
        plain: dict[int, Made] = {}  # by batch size
        for cell in pending:
            begun, found = time.perf_counter(), cell.results
            decoder, batch = Generator(model, cell.method, sampling), found["what"]["batch"]
            found["promise"] = decoder.parts.promise(batch)
            size = plain_batch(decoder, batch, plan.block)
            if size not in plain:
                plain[size] = draw_all(Generator(model, METHODS["plain"], sampling), block, size)
            for start in range(found["pictures"] - first, len(block), batch):
                enter(found, draw(decoder, block[start : start + batch]), plain[size], start, first)
            found["seconds"] = round(found["seconds"] + time.perf_counter() - begun, 1)
            # older files have only the last commit, in surroundings
            commits = found.setdefault("commits", [found["surroundings"].get("commit")])
            found |= {"surroundings": here, "commits": list(dict.fromkeys([*commits, here["commit"]]))}
            write()
            if found["pictures"] < found["of"]:  # `run` prints the complete line
                print(line(found), file=sys.stderr)


@dataclass(frozen=True)
class Made:
    """Codes of a batch and the gaps at which they were sampled."""

    codes: Int[Tensor, "b n"]
    margins: Margins


def draw(decoder: "Generator", requested: "Sequence[Request]") -> Made:
    """Decode images and record gaps."""
    model, config = decoder.model, decoder.model.target.config
    keys = [(request.seed, request.number) for request in requested]
    noise = Noise(keys, positions=config.block_size, vocab_size=config.vocab_size, device=model.device)
    margins = Margins(decoder.sampling, noise, model.dtype, len(keys))
    return Made(decoder.decode(decoder.condition(requested), requested, margins).codes.cpu(), margins)


def plain_batch(decoder: "Generator", batch: int, block: int) -> int:
    """Return the batch size of plain decoding: that of the method where its promise holds for equal batches only."""
    is_of_equal_batches = decoder.parts.promise(batch) == "codes" and not (
        decoder.parts.engine.name == "cpu" or decoder.parts.engine.rounds_wide
    )
    return batch if is_of_equal_batches else block


def draw_all(decoder: "Generator", requested: "Sequence[Request]", batch: int) -> Made:
    """Decode images in batches, and return them as one."""
    made = [draw(decoder, requested[start : start + batch]) for start in range(0, len(requested), batch)]
    margins = copy.copy(made[0].margins)
    margins.gaps = torch.cat([one.margins.gaps for one in made])
    margins.ulps = torch.cat([one.margins.ulps for one in made])
    return Made(torch.cat([one.codes for one in made]), margins)


def enter(cell: dict[str, Any], made: Made, plain: Made, start: int, first: int) -> None:
    """Add a batch to a cell: its image i is image start + i of the block and image first + start + i."""
    count = len(made.codes)
    expected = plain.codes[start : start + count]
    cell["pictures"] += count
    cell["codes"] += made.codes.numel()
    cell["differing_codes"] += int((made.codes != expected).sum())
    nearest = smallest(plain.margins.gaps[start : start + count])
    cell["smallest_gap"] = min(nearest, cell["smallest_gap"] if cell["smallest_gap"] is not None else nearest)
    for i, code in enumerate(first_difference(made.codes, expected)):
        change = largest_change(Place(plain.margins, start + i), Place(made.margins, i), codes=code)
        cell["largest_gap_change"] = rounded(max(cell["largest_gap_change"], change))
        if code is None:
            continue
        cell["differing_pictures"] += 1
        found = tie(first + start + i, code, Place(plain.margins, start + i), Place(made.margins, i))
        cell["ties_beyond_rounding"] += found.share > 1
        cell["largest_share_of_bound"] = rounded(max(found.share, cell["largest_share_of_bound"] or 0.0))
        if len(cell["ties"]) < MAX_TIES:
            cell["ties"].append({name: rounded(value) for name, value in asdict(found).items()})


def rounded(value: float | int) -> float | int:
    """Round to four significant digits."""
    return value if isinstance(value, int) else float(f"{value:.4g}")


def read(path: Path, fingerprint: str, *, name: str, anew: bool = False) -> dict[str, Any]:
    """Return the results so far; empty if there are none, if they belong to other weights, or with `anew`.

    ValueError for a file of another kind.
    """
    empty: dict[str, Any] = {"model": name, "fingerprint": fingerprint, "cells": []}
    if anew or not path.is_file():
        return empty
    report = read_json_object(path)
    if not isinstance(report.get("cells"), list):
        raise ValueError(f"{path} is not a result file of this command: delete it")
    if report.get("fingerprint") != fingerprint:
        print(f"{path} belongs to other weights: its results are dropped", file=sys.stderr)
        return empty
    return report


def line(cell: Mapping[str, Any]) -> str:
    """Return a one-line summary of a cell."""
    what = cell["what"]
    return (
        f"{what['method']['name']}, {what['dtype']}, guidance {what['guidance']:g}, batch {what['batch']}: "
        f"{cell['pictures']} of {cell['of']} images, {cell['differing_pictures']} differ "
        f"in {cell['differing_codes']} of {cell['codes']} codes, {cell['ties_beyond_rounding']} beyond rounding"
    )


COMMAND = Command("equality", "Compare exact methods with plain decoding, code for code.", add_arguments, run)


if __name__ == "__main__":
    sys.exit(main())
