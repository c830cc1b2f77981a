"""`python -m lantern.eval.equality`: do methods that promise plain decoding's pictures keep their word, code for code?

Every exact method that is verified by Gumbel match makes the same pictures as plain decoding, alone and in batches.
Differing codes are counted; where a picture parts from plain decoding's, how near a tie was there is told beside how
far rounding reaches. Results are written after every block of pictures, and a run goes on where one left off.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.catalog import METHODS, Engine, Method
from lantern.cli.command import DONE, FAILED, Command, run_command
from lantern.cli.values import integer, real

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from lantern.eval.margins import Margins
    from lantern.generate import Decoder
    from lantern.model_folder import Model
    from lantern.requests import Request

HERE = Path(__file__).resolve().parent
MAX_TIES = 64  # described one by one in a cell; all are counted


def main(argv: Sequence[str] | None = None) -> int:
    """Compare."""
    return run_command(COMMAND, argv, prog="python -m lantern.eval.equality")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    add = parser.add_argument
    add("--model", default="lantern-emoji", help="name, folder or hub id of the model")
    add("--methods", nargs="+", metavar="METHOD", help="NAME or NAME:SETTING=VALUE,...; all that make the promise")
    add("--seeds", type=integer(1, 10**6), default=64, help="so many, from 0 on")
    add("--prompts", type=integer(1, 10), default=4, help="the first so many of those that speed is measured on")
    add("--guidance", type=real(0, 1000), nargs="+", default=[1.0, 3.0, 7.5], help="one or several")
    add("--batch", type=integer(1, 4096), nargs="+", default=[1, 3], help="pictures that a method makes at a time")
    add("--plain-batch", type=integer(1, 4096), default=32, help="pictures that plain decoding makes at a time")
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="in fp32 a difference makes the run fail")
    add("--reproducible", action="store_true", help="promise the pictures in half precision too; differences fail")
    add("--compile", action="store_true", help="plain decoding and methods both compiled by torch.compile")
    add("--fused", action="store_true", help="plain decoding and methods both by fused passes (CPU)")
    add("--int8", action="store_true", help="plain decoding and methods both with 8-bit weights")
    add("--device", default="auto", help="cpu, cuda or auto")
    add("--threads", type=integer(1, 1024), help="CPU threads to compute on")
    add("--out", type=Path, default=HERE / "results" / "equality.json", help="file of the results")


def run(args: argparse.Namespace) -> int:
    """Compare all that was not compared before; 1 if a promise was broken."""
    import torch

    from lantern.eval.contenders import PROMPTS, method_of
    from lantern.io import write_json
    from lantern.model_folder import load_model
    from lantern.requests import Request

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    engine = Engine(reproducible=args.reproducible, compile=args.compile, fused=args.fused, int8=args.int8)
    model = load_model(args.model, device=args.device, dtype=args.dtype, parts=("text", "drafter"), engine=engine)
    methods = [method_of(model, spec) for spec in args.methods or promising(model)]
    plan = Plan(
        asked=[Request(prompt=p, seed=s) for s in range(args.seeds) for p in PROMPTS[: args.prompts]],
        what={"prompts": list(PROMPTS[: args.prompts]), "seeds": args.seeds, "dtype": args.dtype}
        | {"reproducible": args.reproducible, "device": model.device.type}
        | {name: True for name in ("compile", "fused", "int8") if getattr(args, name)},
        block=args.plain_batch,
    )
    report = read(args.out, model.fingerprint, name=model.name)
    cells = []
    for guidance in args.guidance:
        of_law = [
            Cell(method, plan.cell(report, method, guidance, batch)) for method in methods for batch in args.batch
        ]
        compare(model, plan, guidance, of_law, lambda: write_json(args.out, report))
        cells += [cell.results for cell in of_law]
    print("\n".join(map(line, cells)))
    is_promise = args.dtype == "fp32" or args.reproducible or args.fused
    return FAILED if is_promise and any(cell["differing_codes"] for cell in cells) else DONE


def promising(model: "Model") -> list[str]:
    """The methods that promise plain decoding's pictures and that a model has the parts of; "auto" is one of them."""
    exact = [m for m in METHODS.values() if m.exact and m.verifier == "gumbel" and m.drafter and m.name != "auto"]
    return [m.name for m in exact if all(part in model.trained for part in m.parts)]


@dataclass(frozen=True)
class Plan:
    """The pictures to be compared, in order, `block` of them at a time, and `what` else the results depend on."""

    asked: "list[Request]"
    what: Mapping[str, Any]
    block: int

    def cell(self, report: dict[str, Any], method: Method, guidance: float, batch: int) -> dict[str, Any]:
        """The results of a method at a guidance in batches, as far as they are known; entered in the report."""
        of_method = {"name": method.name, "tree": method.tree, "mode": method.mode, "settings": dict(method.settings)}
        what = {"method": of_method, "guidance": guidance, "batch": batch, **self.what}
        for cell in report["cells"]:
            if cell["what"] == what:
                return cell
        fresh = {"what": what, "pictures": 0, "of": len(self.asked), "codes": 0, "seconds": 0.0}
        fresh |= {"differing_pictures": 0, "differing_codes": 0, "smallest_gap": None, "largest_gap_change": 0.0}
        fresh |= {"ties": [], "ties_beyond_rounding": 0, "largest_share_of_bound": None}
        fresh |= {"surroundings": {}, "commits": []}
        report["cells"].append(fresh)
        return fresh


@dataclass(frozen=True)
class Cell:
    """A method and its results at one guidance in batches of one size."""

    method: Method
    results: dict[str, Any]


def compare(model: "Model", plan: Plan, guidance: float, cells: Sequence[Cell], write: Callable[[], None]) -> None:
    """Brings all cells of one guidance to the end, block by block; `write` is called whenever there is more."""
    from lantern.eval.surroundings import surroundings
    from lantern.generate import Decoder

    sampling = model.sampling(guidance=guidance, temperature=1.0, top_k=0, top_p=1.0)
    here = surroundings(model.device)  # of the code that runs, whatever is committed meanwhile
    for first in range(0, len(plan.asked), plan.block):
        block = plan.asked[first : first + plan.block]
        pending = [cell for cell in cells if cell.results["pictures"] < first + len(block)]
        if not pending:
            continue
        plain = draw(Decoder(model, METHODS["plain"], sampling), block)
        for cell in pending:
            begun, found = time.perf_counter(), cell.results
            decoder, batch = Decoder(model, cell.method, sampling), found["what"]["batch"]
            for start in range(found["pictures"] - first, len(block), batch):
                enter(found, draw(decoder, block[start : start + batch]), plain, start, first)
            found["seconds"] = round(found["seconds"] + time.perf_counter() - begun, 1)
            # files from before commits were listed name the last one
            commits = found.setdefault("commits", [found["surroundings"].get("commit")])
            found |= {"surroundings": here, "commits": list(dict.fromkeys([*commits, here["commit"]]))}
            write()
            print(line(found), file=sys.stderr)


@dataclass(frozen=True)
class Made:
    """Codes of a batch and how near to ties they were drawn."""

    codes: "Int[Tensor, 'b n']"
    margins: "Margins"


def draw(decoder: "Decoder", asked: "Sequence[Request]") -> Made:
    """Makes pictures, watched."""
    from lantern.eval.margins import Margins
    from lantern.noise import Noise

    model, config = decoder.model, decoder.model.target.config
    keys = [(request.seed, request.number) for request in asked]
    noise = Noise(keys, positions=config.block_size, vocab_size=config.vocab_size, device=model.device)
    margins = Margins(decoder.sampling, noise, model.dtype, len(keys))
    return Made(decoder.decode(decoder.condition(asked), asked, margins).codes.cpu(), margins)


def enter(cell: dict[str, Any], made: Made, plain: Made, start: int, first: int) -> None:
    """Books a batch: image i of it is image start + i of the block, which is picture first + start + i."""
    from lantern.eval.margins import Place, first_difference, largest_change, smallest, tie

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
    """Four significant digits, in which a difference of rounding can be told."""
    return value if isinstance(value, int) else float(f"{value:.4g}")


def read(path: Path, fingerprint: str, *, name: str) -> dict[str, Any]:
    """The results so far; none where there are none yet or where they are of other weights."""
    empty: dict[str, Any] = {"model": name, "fingerprint": fingerprint, "cells": []}
    if not path.is_file():
        return empty
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): delete it") from error
    if not isinstance(report, dict) or not isinstance(report.get("cells"), list):
        raise ValueError(f"{path} holds no results of this command: delete it")
    if report.get("fingerprint") != fingerprint:
        print(f"{path} is of other weights: its results are dropped", file=sys.stderr)
        return empty
    return report


def line(cell: Mapping[str, Any]) -> str:
    """A cell in words."""
    what = cell["what"]
    return (
        f"{what['method']['name']}, {what['dtype']}, guidance {what['guidance']:g}, batch {what['batch']}: "
        f"{cell['pictures']} of {cell['of']} pictures, {cell['differing_pictures']} differ "
        f"in {cell['differing_codes']} of {cell['codes']} codes, {cell['ties_beyond_rounding']} beyond rounding"
    )


COMMAND = Command("equality", "Compare exact methods with plain decoding, code for code.", add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
