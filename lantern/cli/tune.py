"""`lantern tune`: measures this machine and writes down the fastest way of decoding for method "auto"."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.catalog import Engine
from lantern.cli.command import DONE, Command, run_command
from lantern.cli.generate import check_writable
from lantern.cli.values import existing, integer, one_of, real

if TYPE_CHECKING:
    from lantern.model_folder import Model
    from lantern.requests import Request
    from lantern.tuning.tuner import Candidate, Findings

SAMPLING = ("guidance", "guidance_interval", "temperature", "top_k", "top_p")
OWN = "the model's own unless given"
PROMPTS = (
    "a red apple",
    "a cat face",
    "a house",
    "a green tree",
    "a yellow banana",
    "a blue car",
    "a dog",
    "a smiling sun",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on its own."""
    return run_command(COMMAND, argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    what = parser.add_argument_group("what to measure")
    what.add_argument("--model", default="lantern-emoji", help="name, folder or hub id (default lantern-emoji)")
    what.add_argument("--prompts-file", metavar="FILE", help="prompts to measure on (default: eight everyday things)")
    what.add_argument(
        "--images", type=integer(1, 10_000), default=4, metavar="N", help="pictures that acceptance is counted on"
    )
    what.add_argument("--batch", type=integer(1, 4096), default=1, metavar="N", help="pictures at a time (default 1)")
    what.add_argument("--seed", type=integer(0, 2**63 - 1), default=0, help="of these pictures (default 0)")
    what.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    what.add_argument(
        "--dtype", type=one_of(("auto", "fp32", "bf16", "fp16")), default="auto", help="auto: fp32 on a CPU, else bf16"
    )
    what.add_argument(
        "--fused", action="store_true", help="passes as one C++ program (CPU): the profile is for --fused commands"
    )
    what.add_argument("--int8", action="store_true", help="8-bit weights: the profile is for --int8 commands")
    _bounds(parser.add_argument_group("what may be chosen (exact methods unless a bound is given)"))
    law = parser.add_argument_group(f"the law that codes are drawn from ({OWN})")
    law.add_argument("--guidance", type=real(0, 1000), help="classifier-free guidance; 1 or less is none")
    law.add_argument("--guidance-interval", type=integer(-1, 10**6), metavar="N", help="guide only codes 0 to N + 1")
    law.add_argument("--temperature", type=real(0, 100), help="0 is greedy")
    law.add_argument("--top-k", type=integer(0, 10**6), help="codes to choose from; 0 is all")
    law.add_argument("--top-p", type=real(0, 1), help="probability to choose from; 1 is all")
    results = parser.add_argument_group("results")
    results.add_argument(
        "--out", type=Path, metavar="FILE", help="the profile (default: beside the model, where `auto` finds it)"
    )
    results.add_argument("--json", action="store_true", help="print the profile as JSON instead of a table")
    results.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")


def _bounds(group: Any) -> None:
    group.add_argument(
        "--max-tv", type=real(0, 1), metavar="X", help="admit relaxed methods to this mean total variation a code"
    )
    group.add_argument("--max-kid", type=real(0, 10), metavar="X", help="admit relaxed methods to this drop in KID")
    group.add_argument(
        "--quality", type=existing, metavar="FILE", help='KID drops by method and knob: {"lantern++": {"2.0": 0.0004}}'
    )
    group.add_argument(
        "--max-nodes", type=integer(2, 256), default=32, metavar="N", help="nodes of a pass, root included (default 32)"
    )
    group.add_argument("--max-depth", type=integer(1, 16), default=8, metavar="N", help="depth of a tree (default 8)")
    group.add_argument(
        "--methods", nargs="+", default=[], metavar="NAME", help="measure these alone, beside plain decoding"
    )


def run(args: argparse.Namespace) -> int:
    """Check what costs nothing, load, measure, write, tell."""
    from lantern.config import read_json_object
    from lantern.tuning.candidates import Bounds

    if args.out is not None and args.out.is_dir():
        raise ValueError(f"--out {args.out} is a folder, wanted a file")
    if args.out is not None:
        check_writable(args.out.parent)
    bounds = Bounds(args.max_tv, args.max_kid, read_json_object(args.quality) if args.quality else {})
    from lantern.model_folder import load_model
    from lantern.tuning.measure import Setup
    from lantern.tuning.profile import write_profile
    from lantern.tuning.tuner import Effort, Tuner, profile_of

    parts: set[Any] = {"text", "drafter", "neighbours"} | ({"vq"} if bounds.admits_relaxed else set())
    engine = Engine(fused=args.fused, int8=args.int8)
    model = load_model(args.model, device=args.device, dtype=args.dtype, parts=parts, engine=engine)
    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    batches = -(-args.images // args.batch)
    setup = Setup(model, model.sampling(**given), _requests(args, model, batches * args.batch), args.batch)
    effort = Effort(args.max_nodes, args.max_depth, batches=batches, trials=min(batches, 3))
    tuner = Tuner(setup, effort, bounds, args.methods, _teller(args))
    found = tuner.run()
    profile = profile_of(tuner, found)
    path = write_profile(profile, model, args.out)
    if args.json:
        print(json.dumps(profile | {"path": str(path)}, sort_keys=True))
    else:
        print("\n".join([*table(found), f"profile: {path}"]))
    return DONE


def _requests(args: argparse.Namespace, model: "Model", count: int) -> "list[Request]":
    """The pictures to measure on: prompts in turn, or classes spread evenly; ValueError if the model cannot."""
    from lantern.prompts import read_prompts
    from lantern.requests import Request, check_requests

    if model.takes_prompts:
        prompts = read_prompts(args.prompts_file) if args.prompts_file is not None else list(PROMPTS)
        places = [(i % len(prompts), i // len(prompts)) for i in range(count)]
        asked = [Request(prompt=prompts[which], seed=args.seed, number=number) for which, number in places]
    elif args.prompts_file is not None:
        raise ValueError(f"model {model.name} takes class labels, not prompts: leave --prompts-file out")
    else:
        classes = model.target.config.num_classes
        asked = [Request(label=i * classes // count % classes, seed=args.seed, number=i) for i in range(count)]
    check_requests(model, asked)
    return asked


def _teller(args: argparse.Namespace) -> Callable[[str], None]:
    return lambda line: None if args.quiet else print(f"measuring: {line}", file=sys.stderr, flush=True)


def table(found: "Findings") -> list[str]:
    """Candidates with what was predicted and what was measured; the chosen one is marked."""
    rows = [("", "method", "codes/pass", "ms/code", "speedup", "measured", "total variation")]
    rows += [_row(found, candidate) for candidate in [found.plain, *_shown(found)]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        left = [row[i].ljust(widths[i]) for i in (0, 1)]
        right = [row[i].rjust(widths[i]) for i in range(2, len(row))]
        lines.append("  ".join([*left, *right]).rstrip())
    if "tree" in found.choice.settings:
        lines.append(f"tree: {found.choice.settings['tree']}")
    return lines


def _shown(found: "Findings") -> "list[Candidate]":
    """The ten best, and whatever was run."""
    return [one for i, one in enumerate(found.candidates) if i < 10 or one.run is not None]


def _row(found: "Findings", candidate: "Candidate") -> tuple[str, ...]:
    told = candidate.as_dict(found.plain)
    predicted, measured = told["predicted"], told["measured"]
    return (
        "*" if candidate == found.choice else "",
        candidate.label,
        f"{predicted['step_compression']:.2f}",
        f"{predicted['milliseconds_per_code']:.2f}",
        f"{predicted['speedup']:.2f}x",
        "-" if measured is None else f"{measured['speedup']:.2f}x",
        f"{(measured or predicted)['total_variation']:.3f}",
    )


COMMAND = Command("tune", "Measure this machine and find the fastest method for --method auto.", add_arguments, run)
