"""`lantern-generate`: pictures from prompts or class labels, by any method, with figures on request."""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lantern.catalog import METHODS
from lantern.cli.command import Command, run_command
from lantern.cli.engine import add_engine, advice, engine_of
from lantern.cli.values import integer, one_of, real, setting

SAMPLING = ("guidance", "guidance_interval", "temperature", "top_k", "top_p")
SETTINGS = (
    "k",
    "delta",
    "lambda_",
    "residual",
    "tree",
    "window",
    "init",
    "cap",
    "rounds",
    "width",
    "omega",
    "nu",
    "group",
    "p_radius",
    "d_radius",
    "samples",
)
OWN = "the model's own unless given"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on its own."""
    return run_command(COMMAND, argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    _what(parser.add_argument_group("what to draw"))
    _how(parser.add_argument_group("how"))
    _relaxation(parser.add_argument_group(f"what relaxed methods may do ({OWN})"))
    _law(parser.add_argument_group(f"the law that codes are drawn from ({OWN})"))
    _results(parser.add_argument_group("results"))


def _what(group: Any) -> None:
    group.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="what to show; may be repeated")
    group.add_argument(
        "--prompts-file", metavar="FILE", help="prompts, one a line (or .json, .jsonl, .tsv); - is stdin"
    )
    group.add_argument(
        "--class-label",
        type=integer(0, 10**9),
        action="append",
        default=[],
        metavar="N",
        help="class to show, for class-conditional models; may be repeated",
    )
    group.add_argument("-n", "--num-images", type=integer(1, 100_000), default=1, metavar="N", help="pictures of each")
    group.add_argument("--seed", type=integer(0, 2**63 - 1), default=0, help="same seed, same picture (default 0)")


def _how(group: Any) -> None:
    group.add_argument("--model", default="lantern-emoji", help="name, folder or hub id (default lantern-emoji)")
    group.add_argument(
        "--method", type=one_of(list(METHODS)), help=f"how codes are decoded: {', '.join(METHODS)} ({OWN})"
    )
    group.add_argument("--tree", metavar="NAME", help="draft tree, such as naive_extend_57 or chain_5")
    group.add_argument(
        "--window", type=integer(2, 10**6), metavar="N", help="sjd, scd, gumbel-jacobi: codes of a pass, up to all"
    )
    group.add_argument(
        "--init",
        type=one_of(("random", "repeat-left", "drafter")),
        help="sjd, scd, gumbel-jacobi: what a window's new places begin with",
    )
    group.add_argument(
        "--batch",
        type=integer(1, 4096),
        default=1,
        metavar="N",
        help="pictures at a time (default 1); halved where memory runs out, the pictures stay the same",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    group.add_argument(
        "--dtype", type=one_of(("auto", "fp32", "bf16", "fp16")), default="auto", help="auto: fp32 on a CPU, else bf16"
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        type=setting,
        metavar="NAME=VALUE",
        help="any other setting of the method, such as nodes=31; may be repeated",
    )
    add_engine(group)


def _relaxation(group: Any) -> None:
    group.add_argument(
        "--k", type=integer(0, 1024), help="bounded, lantern, lantern++: neighbours that count as alike; 0 is exact"
    )
    group.add_argument(
        "--delta", type=real(0, 1), help="bounded: probability that may be moved at a code; lantern: at a draft's test"
    )
    group.add_argument(
        "--cap", type=real(1, 1e6), metavar="C", help="bounded: no code is drawn more than C times as often"
    )
    group.add_argument("--rounds", type=integer(1, 100), metavar="N", help="bounded: rounds in which mass is asked for")
    group.add_argument("--width", type=integer(1, 10**6), metavar="N", help="bounded: codes that ask for mass")
    group.add_argument(
        "--lambda", dest="lambda_", type=real(1, 1e6), metavar="LAMBDA", help="lantern++: delta as a factor, from 1"
    )
    group.add_argument(
        "--residual", type=one_of(("paper", "released")), help="lantern, lantern++: what a refused draft leaves"
    )
    group.add_argument("--omega", type=real(0, 1e6), help="cool: how many times over a draft counts, in the mean")
    group.add_argument("--nu", type=real(0, 10), help="cool: how fast that falls with depth")
    group.add_argument("--group", type=integer(0, 10**6), metavar="G", help="grouped: codes of a group, beside its own")
    group.add_argument("--p-radius", type=real(0, 1), metavar="P", help="grouped: how far probabilities may differ")
    group.add_argument(
        "--d-radius", type=real(0, 1e6), metavar="D", help="grouped: how far codes' vectors may lie apart"
    )
    group.add_argument(
        "--samples", type=integer(1, 10**6), metavar="N", help="tolerance, vadusa: draws of the target; 1 is exact"
    )


def _law(group: Any) -> None:
    group.add_argument("--guidance", type=real(0, 1000), help="classifier-free guidance; 1 or less is none")
    group.add_argument(
        "--guidance-interval", type=integer(-1, 10**6), metavar="N", help="guide only codes 0 to N + 1; -1 guides all"
    )
    group.add_argument("--temperature", type=real(0, 100), help="0 is greedy")
    group.add_argument("--top-k", type=integer(0, 10**6), help="codes to choose from; 0 is all")
    group.add_argument("--top-p", type=real(0, 1), help="probability to choose from; 1 is all")


def _results(group: Any) -> None:
    group.add_argument("--out", type=Path, metavar="PATH", help="a .png file or a folder (default: here)")
    group.add_argument(
        "--tokens",
        type=Path,
        metavar="FILE",
        help="write the code grid as JSON; no picture unless --out; if interrupted, of the pictures that are done",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="print statistics as one JSON object on stdout; if interrupted, of the pictures that are done",
    )
    group.add_argument(
        "--compare", action="store_true", help="make each picture plain as well, and tell the difference"
    )
    group.add_argument(
        "--repeats", type=integer(1, 100), default=1, metavar="N", help="--compare: runs of each, medians are told"
    )
    group.add_argument(
        "--record", type=Path, metavar="FILE", help="write what was drafted and taken in every step, for tree policies"
    )
    group.add_argument("--no-prompt-in-metadata", action="store_true", help="leave the prompt out of the PNG's text")
    group.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")


def run(args: argparse.Namespace) -> int:
    """Check what costs nothing, load, make, save, tell."""
    prompts = _prompts(args)
    out, wants_pixels = _destinations(args)
    from lantern.cli.drawing import Job
    from lantern.generate import choose_method
    from lantern.model_folder import load_model
    from lantern.requests import requests
    from lantern.sampling import Sampling

    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    Sampling(**given)
    parts = _parts(args, bool(prompts), wants_pixels)
    model = load_model(args.model, device=args.device, dtype=args.dtype, parts=parts, engine=engine_of(args))
    settings = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None} | dict(args.set)
    sampling = model.sampling(**given)
    method = choose_method(model, args.method, settings, sampling=sampling, tell=_teller(args.quiet))
    settings = method.changed() | settings
    asked = requests(prompts=prompts, labels=args.class_label, seed=args.seed, count=args.num_images)
    job = Job(args, model, method, settings, sampling, asked, out if wants_pixels else None)
    status, hint = job.compare() if args.compare else job.draw(), advice(model)
    if status == 0 and hint is not None:
        _teller(args.quiet)(hint)
    return status


def _teller(is_quiet: bool) -> Callable[[str], None]:
    """Says on stderr what is worth knowing."""
    return lambda line: None if is_quiet else print(f"lantern: {line}", file=sys.stderr, flush=True)


def _prompts(args: argparse.Namespace) -> list[str]:
    """All prompts in order, checked; ValueError if there is nothing to draw, or both words and classes."""
    from lantern.prompts import check_prompt, read_prompts

    prompts = [check_prompt(prompt) for prompt in args.prompt]
    if args.prompts_file is not None:
        prompts += read_prompts(args.prompts_file)
    if prompts and args.class_label:
        raise ValueError("got prompts and class labels, wanted one of them: a model takes either words or classes")
    if not prompts and not args.class_label:
        raise ValueError('nothing to draw: give --prompt "a red apple", --prompts-file FILE or --class-label N')
    return prompts


def _destinations(args: argparse.Namespace) -> tuple[Path, bool]:
    """Where pictures go, and whether there are any; what cannot be written to is refused before anything is made."""
    if args.compare and args.tokens is not None:
        raise ValueError("--tokens writes one method's codes, --compare makes two: leave one of them out")
    if args.record is not None:
        check_record(args)
    if args.tokens is not None:
        if args.tokens.is_dir():
            raise ValueError(f"--tokens {args.tokens} is a folder, wanted a file")
        check_writable(args.tokens.parent)
    out = args.out if args.out is not None else Path(".")
    is_file = out.suffix.lower() == ".png" and not out.is_dir()
    if out.is_file() and not is_file:
        raise ValueError(f"--out {out} is a file without .png, wanted a .png file or a folder")
    if out.suffix.lower() in (".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff") and not out.is_dir():
        raise ValueError(f"--out {out} ends in {out.suffix}, wanted a .png file or a folder")
    wants_pixels = args.out is not None or args.tokens is None
    if wants_pixels:
        check_writable(out.parent if is_file else out)
    return out, wants_pixels


def check_record(args: argparse.Namespace) -> None:
    """ValueError where nothing could be recorded, before anything is made."""
    if args.compare:
        raise ValueError("--record is of one method's drafts, --compare makes pictures by two: leave one of them out")
    if args.record.is_dir():
        raise ValueError(f"--record {args.record} is a folder, wanted a file")
    if args.method == "plain":
        raise ValueError('method "plain" drafts nothing, so there is nothing to --record: choose one that drafts trees')
    check_writable(args.record.parent)


def check_writable(folder: Path) -> None:
    """OSError if nothing can be written to a folder, or if it cannot be made."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "cannot be written to", str(there))


def _parts(args: argparse.Namespace, has_prompts: bool, wants_pixels: bool) -> frozenset[Any]:
    """Which components this run needs beside the target."""
    parts = {"text"} if has_prompts else set()
    if args.method != "plain":
        parts |= {"drafter", "neighbours"}
    return frozenset(parts | ({"vq"} if wants_pixels else set()))


COMMAND = Command("generate", "Make pictures from prompts or class labels.", add_arguments, run)
