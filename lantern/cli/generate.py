"""`lantern-generate`: pictures from prompts or class labels, by any method, with statistics on request."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lantern.cli.command import (
    DONE,
    Command,
    Names,
    add_engine,
    add_method_options,
    add_set,
    advice,
    check_file,
    check_folder,
    dtype_of,
    dtype_of_names,
    engine_of,
    integer,
    one_of,
    real,
    run_command,
    settings_of,
    size_of,
)
from lantern.cli.generate_job import STDOUT, Job, Results, reporter
from lantern.generation.file_names import FIELDS, FORMATS, MAX_SCALE, RESAMPLINGS, SUFFIXES, destination
from lantern.methods.registry import METHODS, Method, neighbour_columns, reads_drafter

SAMPLING = ("guidance", "guidance_interval", "temperature", "top_k", "top_p")
OWN = "default: the model's"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on its own."""
    if argv is None and "_ARGCOMPLETE" in os.environ:
        from lantern.cli.completion import complete

        complete("lantern-generate")
    return run_command(COMMAND, argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that all methods have; those of the chosen one follow when it is known."""
    parser.epilog = "lantern-generate --method NAME --help and lantern methods NAME list the settings of a method."
    _what(parser.add_argument_group("what to make"))
    _how(parser.add_argument_group("how"))
    _distribution(parser.add_argument_group(f"the distribution that codes are sampled from ({OWN})"))
    _results(parser.add_argument_group("results"))


def _what(group: Any) -> None:
    group.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="prompt of a picture; may be repeated"
    )
    group.add_argument(
        "--prompts-file", metavar="FILE", help="prompts, one per line (or .json, .jsonl, .tsv); - is stdin"
    )
    group.add_argument(
        "--class-label",
        type=integer(0, 10**9),
        action="append",
        default=[],
        metavar="N",
        help="class of a picture, for class-conditional models; may be repeated",
    )
    group.add_argument(
        "-n", "--num-images", type=integer(1, 100_000), default=1, metavar="N", help="pictures of each prompt or class"
    )
    group.add_argument("--seed", type=integer(0, 2**63 - 1), default=0, help="seed of the noise (default 0)")
    group.add_argument(
        "--list-words", action="store_true", help="print the words of the model's training captions, and make nothing"
    )


def _how(group: Any) -> None:
    group.add_argument("--model", default="lantern-emoji", help="name, folder or hub id (default lantern-emoji)")
    group.add_argument(
        "--size", type=size_of, metavar="WxH", help="width and height in pixels, of models that make several sizes"
    )
    group.add_argument(
        "--no-verify", action="store_true", help="do not compare weight files with their SHA-256 (SHA256SUMS)"
    )
    group.add_argument(
        "--method", type=one_of(list(METHODS)), help=f"how codes are decoded: {', '.join(METHODS)} ({OWN})"
    )
    group.add_argument(
        "--batch",
        type=integer(1, 4096),
        default=1,
        metavar="N",
        help="pictures at a time (default 1); halved if memory runs out, with the same pictures",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    group.add_argument(
        "--dtype",
        type=dtype_of_names("auto"),
        default="auto",
        help="auto (fp32 on a CPU, else bf16), fp32, bf16 or fp16",
    )
    add_set(group)
    add_engine(group)


def _distribution(group: Any) -> None:
    group.add_argument("--guidance", type=real(0, 1000), help="classifier-free guidance; 1 or less is none")
    group.add_argument(
        "--guidance-interval", type=integer(-1, 10**6), metavar="N", help="guide only codes 0 to N + 1; -1 guides all"
    )
    group.add_argument("--temperature", type=real(0, 100), help="0 is greedy")
    group.add_argument("--top-k", type=integer(0, 10**6), help="codes to choose from; 0 is all")
    group.add_argument("--top-p", type=real(0, 1), help="probability to choose from; 1 is all")


def _results(group: Any) -> None:
    group.add_argument(
        "--out", type=Path, metavar="PATH", help=f"a file ({', '.join(FORMATS)}) or a folder (default: here)"
    )
    group.add_argument(
        "--name",
        metavar="TEMPLATE",
        help=f"names of the files of a folder, such as {{prompt}}-seed{{seed}}; fields: {', '.join(FIELDS)}",
    )
    group.add_argument(
        "--overwrite", action="store_true", help="replace files that exist; a file named by --out is always replaced"
    )
    group.add_argument(
        "--format",
        type=Names(tuple(SUFFIXES), aliases={"jpg": "jpeg"}),
        metavar="NAME",
        help=f"of {', '.join(SUFFIXES)} (default png)",
    )
    group.add_argument("--quality", type=integer(1, 100), help="of JPEG and WebP, 1 to 100 (default 90)")
    group.add_argument(
        "--scale",
        type=integer(1, MAX_SCALE),
        metavar="N",
        help="enlarge pictures N times; 1 is the raw size (default: the model's)",
    )
    group.add_argument("--resample", choices=RESAMPLINGS, default="lanczos", help="filter of --scale (default lanczos)")
    group.add_argument(
        "--grid",
        type=integer(1, 1000),
        nargs="?",
        const=0,
        metavar="COLUMNS",
        help="write all pictures as one contact sheet, with their prompts if there are several",
    )
    group.add_argument(
        "--tokens",
        type=Path,
        metavar="FILE",
        help="write the code grid as JSON, - is stdout; no picture unless --out; if interrupted, of the finished ones",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="print statistics as one JSON object on stdout; if interrupted, of the finished pictures",
    )
    group.add_argument(
        "--compare", action="store_true", help="make each picture by plain decoding as well, and print the difference"
    )
    group.add_argument(
        "--repeats",
        type=integer(1, 100),
        default=1,
        metavar="N",
        help="--compare: runs of each (default 1)",
    )
    group.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write the drafts of every step, to train tree policies",
    )
    group.add_argument("--no-prompt-in-metadata", action="store_true", help="leave the prompt out of the metadata")
    group.add_argument("--quiet", action="store_true", help="print only errors on stderr")


def run(args: argparse.Namespace) -> int:
    """Check the arguments, load the model, make the pictures, save and report them."""
    if args.list_words:
        from lantern.core.io import resolve_model
        from lantern.models.folder import read_words

        print("\n".join(read_words(resolve_model(args.model))))
        return DONE
    prompts = _prompts(args.prompt, args.prompts_file, args.class_label)
    results = _results_of(args)
    from lantern.core.sampling import Sampling
    from lantern.generation.generator import choose_method
    from lantern.generation.requests import check_requests, requests, with_warnings
    from lantern.models.folder import load_model

    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    Sampling(**given)
    texts = settings_of(args)
    if args.method not in (None, "auto"):
        METHODS[args.method].parsed(texts)  # refuses before the model is loaded

    def parts(default: str) -> frozenset[Any]:
        chosen = METHODS[args.method or default]
        if chosen.name != "auto":
            chosen = chosen.with_options(**chosen.parsed(texts))
        return _parts(chosen, has_prompts=bool(prompts), has_pixels=results.place is not None)

    how: dict[str, Any] = {
        "device": args.device,
        "dtype": dtype_of(args.dtype, args.target_weights),
        "engine": engine_of(args),
    }
    model = load_model(args.model, parts=parts, verify=not args.no_verify, size=args.size, **how)
    sampling = model.sampling(**given)
    batch = 1 if args.compare else min(args.batch, args.num_images * max(len(prompts), len(args.class_label)))
    notes: list[str] = []  # printed when nothing can be refused any more
    usual = choose_method(model, args.method, sampling=sampling, batch=batch, report=notes.append)
    settings = usual.parsed(texts)
    method = usual.with_options(**settings)
    settings = method.changed() | settings
    requested = requests(prompts=prompts, labels=args.class_label, seed=args.seed, count=args.num_images)
    check_requests(model, requested)
    requested = with_warnings(model, requested, warn=notes.append)
    chosen = method, settings, sampling, requested
    job = Job(model, *chosen, results, args.stopping, usual=usual, is_comparison=args.compare)
    for note in notes:
        reporter(args.quiet)(note)
    if args.compare:
        job.compare(repeats=args.repeats)
    else:
        job.make(batch=args.batch, debug=args.debug)
    if (hint := advice(model)) is not None:
        reporter(args.quiet)(hint)
    return DONE


def _prompts(given: Sequence[str], file: str | None, labels: Sequence[int]) -> list[str]:
    """Return all prompts in order, checked; ValueError without prompts and classes, and for both."""
    from lantern.generation.requests import check_prompt, read_prompts

    prompts = [check_prompt(prompt) for prompt in given]
    if file is not None:
        prompts += read_prompts(file)
    if prompts and labels:
        raise ValueError("got prompts and class labels, wanted one of them: a model takes either words or classes")
    if not prompts and not labels:
        raise ValueError('no pictures requested: give --prompt "a red apple", --prompts-file FILE or --class-label N')
    return prompts


def _results_of(args: argparse.Namespace) -> Results:
    """Return where results go; checks before anything is made: ValueError or OSError for what is unusable."""
    place = None
    if args.out is not None or args.tokens is None:
        place = destination(args.out, template=args.name, form=args.format, overwrites=args.overwrite)
        check_folder(place.out.parent if place.is_file else place.out)
    _check_needed(args, place)
    _check_combinations(args)
    for option, path in (("--record", args.record), ("--tokens", args.tokens)):
        if path is not None and path != STDOUT:
            check_file(option, path)
    if args.quality is not None and place is not None and FORMATS[place.suffix] == "png":
        raise ValueError("--quality is an option of JPEG and WebP, and PNG is lossless: give --format jpeg or webp")
    return Results(
        place=place,
        tokens=args.tokens,
        record=args.record,
        scale=args.scale,
        resample=args.resample,
        quality=args.quality,
        columns=args.grid,
        has_prompt=not args.no_prompt_in_metadata,
        is_json=args.json,
        is_quiet=args.quiet,
    )


def _check_needed(args: argparse.Namespace, place: Any) -> None:
    """Raise ValueError for options of pictures where none is written."""
    given = {"--name": args.name, "--format": args.format, "--quality": args.quality, "--scale": args.scale}
    for option, value in (given | {"--grid": args.grid}).items():
        if value is not None and place is None:
            raise ValueError(f"{option} is an option of picture files, which --tokens alone does not write: give --out")


def _check_combinations(args: argparse.Namespace) -> None:
    """Raise ValueError for options that contradict each other."""
    if args.compare:
        for option, value in (("--tokens", args.tokens), ("--record", args.record)):
            if value is not None:
                raise ValueError(f"{option} is of one method, --compare runs two: leave one of them out")
        if args.grid is not None:
            raise ValueError("--compare puts two pictures side by side, --grid all on one sheet: leave one of them out")
    if args.tokens == STDOUT and args.json:
        raise ValueError("--tokens - and --json both write to standard output: give --tokens a file")
    if args.record is not None and args.method == "plain":
        raise ValueError('method "plain" drafts nothing, so there is nothing to --record: choose one that drafts trees')


def _parts(method: Method, *, has_prompts: bool, has_pixels: bool) -> frozenset[Any]:
    """Return the components that this run reads beside the target; "auto" may choose any method."""
    is_any = method.name == "auto"
    needs = {
        "text": has_prompts,
        "vq": has_pixels,
        "drafter": is_any or reads_drafter(method),
        "neighbours": is_any or neighbour_columns(method) > 0,
    }
    return frozenset(part for part, is_needed in needs.items() if is_needed)


COMMAND = Command(
    "generate", "Make pictures from prompts or class labels.", add_arguments, run, add_late=add_method_options
)
