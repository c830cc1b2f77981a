"""`lantern-generate`: pictures from prompts or class labels, by any method, with statistics on request."""

import argparse
import dataclasses
import errno
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.cli.command import DONE, Command, explained, run_command
from lantern.cli.options import (
    add_engine,
    add_method_options,
    add_set,
    advice,
    dtype_of,
    engine_of,
    integer,
    one_of,
    real,
    settings_of,
)
from lantern.methods.registry import METHODS

if TYPE_CHECKING:
    from lantern.core.sampling import Sampling
    from lantern.core.signals import Stopping
    from lantern.core.types import Callback, Step
    from lantern.drafters.policies.records import Recorder
    from lantern.generation.comparison import Comparison
    from lantern.generation.images import Picture
    from lantern.generation.progress import Progress
    from lantern.generation.requests import Request
    from lantern.methods.registry import Method
    from lantern.models.folder import Model

SAMPLING = ("guidance", "guidance_interval", "temperature", "top_k", "top_p")
OWN = "default: the model's"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on its own."""
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


def _how(group: Any) -> None:
    group.add_argument("--model", default="lantern-emoji", help="name, folder or hub id (default lantern-emoji)")
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
        "--dtype", type=_dtype, default="auto", help="auto (fp32 on a CPU, else bf16), fp32, bf16 or fp16"
    )
    add_set(group)
    add_engine(group)


def _dtype(text: str) -> str:
    """The dtype of a name of ours or of torch's."""
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    return one_of(("auto", "fp32", "bf16", "fp16"))(names.get(text, text))


def _distribution(group: Any) -> None:
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
        help="write the code grid as JSON; no picture unless --out; if interrupted, of the finished pictures",
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
    prompts = _prompts(args.prompt, args.prompts_file, args.class_label)
    results = Results(
        out=_destination(args.out, has_pixels=args.out is not None or args.tokens is None),
        tokens=args.tokens,
        record=args.record,
        has_prompt=not args.no_prompt_in_metadata,
        is_json=args.json,
        is_quiet=args.quiet,
    )
    _check_results(results, args.method, is_comparison=args.compare)
    from lantern.core.sampling import Sampling
    from lantern.generation.generator import choose_method
    from lantern.generation.requests import requests
    from lantern.models.folder import load_model

    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    Sampling(**given)
    if args.method not in (None, "auto"):
        settings_of(args, METHODS[args.method])  # refuses before the model is loaded
    parts = _parts(args.method, has_prompts=bool(prompts), has_pixels=results.out is not None)
    how: dict[str, Any] = {"device": args.device, "dtype": dtype_of(args), "engine": engine_of(args)}
    model = load_model(args.model, parts=parts, verify=not args.no_verify, **how)
    sampling = model.sampling(**given)
    method = choose_method(model, args.method, sampling=sampling, report=_reporter(args.quiet))
    settings = settings_of(args, method)
    method = method.with_options(**settings)
    settings = method.changed() | settings
    requested = requests(prompts=prompts, labels=args.class_label, seed=args.seed, count=args.num_images)
    job = Job(model, method, settings, sampling, requested, results, args.stopping)
    if args.compare:
        job.compare(repeats=args.repeats)
    else:
        job.make(batch=args.batch, debug=args.debug)
    if (hint := advice(model)) is not None:
        _reporter(args.quiet)(hint)
    return DONE


@dataclass(frozen=True)
class Results:
    """Where the results of a run go. `out` is a folder or a .png file, None for no pictures."""

    out: Path | None
    tokens: Path | None = None
    record: Path | None = None
    has_prompt: bool = True
    is_json: bool = False
    is_quiet: bool = False


class Job:
    """One run of the command after all choices are made."""

    def __init__(
        self,
        model: "Model",
        method: "Method",
        settings: Mapping[str, Any],
        sampling: "Sampling",
        requested: Sequence["Request"],
        results: Results,
        stopping: "Stopping",
    ) -> None:
        from lantern.generation.images import FileNames

        self.model, self.method, self.settings, self.sampling = model, method, dict(settings), sampling
        self.requested, self.results, self.stopping = requested, results, stopping
        self.names = None if results.out is None else FileNames(results.out, len(requested))
        self.paths: list[Path] = []
        self.halved: int | None = None

    def make(self, *, batch: int, debug: bool) -> None:
        """Make the pictures, save each when it is done, write the codes, print paths or statistics.

        After a signal or an error, codes and statistics are those of the finished pictures.
        """
        from lantern.generation.generator import generate

        recorder, done = self._recorder(), []
        try:
            with self._progress(1) as progress:
                for picture in generate(
                    self.model,
                    self.requested,
                    method=self.method,
                    sampling=self.sampling,
                    batch=batch,
                    with_pixels=self.names is not None,
                    callback=self._callback(progress),
                    on_halved=partial(self._report_halving, progress),
                    on_unknown=_reporter(self.results.is_quiet),
                    debug=debug,
                    record=recorder,
                ):
                    with self.stopping.shield():
                        self._save(picture)
                        done.append(picture)
        except (Exception, KeyboardInterrupt) as error:
            if done:
                self._finish(done, batch, recorder, error)
            raise
        self._finish(done, batch, recorder)

    def compare(self, *, repeats: int) -> None:
        """Make each picture by plain decoding and by the method, print the comparison, save both side by side."""
        from lantern.generation.comparison import compare

        reported: list[dict[str, Any]] = []
        try:
            with self._progress(2 * repeats) as progress:
                for comparison in compare(
                    self.model,
                    self.requested,
                    method=self.method,
                    sampling=self.sampling,
                    repeats=repeats,
                    callback=self._callback(progress),
                ):
                    with self.stopping.shield():
                        reported.append(self._report_pair(comparison))
        except (Exception, KeyboardInterrupt) as error:
            if reported and self.results.is_json:
                _print_json(self._head() | self._ending(error) | {"comparisons": reported})
            raise
        if self.results.is_json:
            _print_json(self._head() | self._ending() | {"comparisons": reported})

    def _recorder(self) -> "Recorder | None":
        if self.results.record is None:
            return None
        from lantern.core.io import weights_digest
        from lantern.drafters.policies.records import Recorder

        sampling = dataclasses.asdict(self.sampling)
        target = weights_digest(self.model.target.state_dict())
        return Recorder(method=self.method.name, settings=self.settings, sampling=sampling, target=target)

    def _progress(self, runs: int) -> "Progress":
        from lantern.generation.progress import Progress

        is_quiet = self.results.is_quiet or self.results.is_json
        return Progress(runs * len(self.requested), self.model.target.config.block_size, is_quiet=is_quiet)

    def _callback(self, progress: "Progress") -> "Callback":
        """Return the callback of a generation: it updates the bar, and stops if a signal's exception was swallowed."""

        def call(step: "Step") -> None:
            self.stopping.check()
            progress(step)

        return call

    def _report_halving(self, progress: "Progress", tried: int, fits: int) -> None:
        from lantern.generation.generator import halving_message

        self.halved = fits
        if not self.results.is_quiet:
            progress.say(f"lantern: {halving_message(tried, fits)}")

    def _save(self, picture: "Picture") -> None:
        if self.names is None or picture.pixels is None:
            return
        from lantern.generation.images import save_png, to_image

        request = picture.request
        path = self.names.of(request.subject, request.seed, request.number)
        save_png(to_image(picture.pixels), path, self._facts(picture))
        self.paths.append(path)
        if not self.results.is_json:
            _print(str(path))

    def _report_pair(self, comparison: "Comparison") -> dict[str, Any]:
        """Save both pictures side by side and print the comparison; return it as JSON values."""
        from lantern.generation.images import save_png, sheet, to_image

        assert self.names is not None
        pair = [picture.pixels for picture in (comparison.plain, comparison.other)]
        request = comparison.plain.request
        path = self.names.of(request.subject, request.seed, request.number)
        row = sheet([to_image(pixels) for pixels in pair if pixels is not None], columns=2, margin=0)
        save_png(row, path, self._facts(comparison.other) | {"layout": f"left plain, right {self.method.name}"})
        if not self.results.is_json:
            _print(f"{request.subject}, seed {request.seed}, image {request.number}")
            _print("\n".join([*comparison.lines(), f"  {path}"]))
        return comparison.as_dict() | {"path": str(path)}

    def _facts(self, picture: "Picture") -> dict[str, Any]:
        """Return the metadata of a PNG."""
        request, head = picture.request, self._head()
        return {
            "prompt": request.prompt if self.results.has_prompt else None,
            "class": request.label,
            "model": self.model.name,
            "method": self.method.name,
            "settings": self.settings or None,
            "seed": str(request.seed),
            "image": str(request.number),
            **{name: head[name] for name in ("sampling", "dtype", "engine", "versions")},
            "tokens_sha256": picture.tokens_sha256,
        }

    def _head(self) -> dict[str, Any]:
        """Return the JSON values that all pictures of the run share."""
        import torch

        from lantern import __version__

        return {
            "model": self.model.name,
            "method": self.method.name,
            "settings": self.settings,
            "seed": self.requested[0].seed,
            "sampling": dataclasses.asdict(self.sampling),
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "engine": self.model.engine.as_dict(),
            "versions": {"lantern": __version__, "torch": torch.__version__},
        }

    def _ending(self, error: BaseException | None = None) -> dict[str, Any]:
        """Return how many pictures were requested, and why the run ended before they were done."""
        stopped = explained(error) if isinstance(error, Exception) else str(error) if error is not None else None
        return {"asked": len(self.requested), "stopped": stopped}

    def _finish(
        self, done: list["Picture"], batch: int, recorder: "Recorder | None", error: BaseException | None = None
    ) -> None:
        """Write the codes and print the statistics; after an error they are printed only as JSON."""
        from lantern.generation.images import totals

        if self.results.tokens is not None:
            _write_tokens(self.results.tokens, done, is_list=len(self.requested) > 1)
        if recorder is not None and self.results.record is not None:
            recorder.records().save(self.results.record)
        figures = totals([picture.statistics for picture in done])
        seconds = max(sum(figures["seconds"].values()), 1e-9)
        speed = {
            "batch": batch,
            "batch_halved": self.halved,
            "latency": round(done[0].latency, 4),
            "images_per_second": round(len(done) / seconds, 4),
            "codes_per_second": round(figures["codes"] / seconds, 2),
        }
        if self.results.is_json:
            paths = [str(path) for path in self.paths]
            pictures = [picture.as_dict() | {"path": paths[i] if paths else None} for i, picture in enumerate(done)]
            digests = [picture.tokens_sha256 for picture in done]
            reported = {"tokens_sha256": digests, "paths": paths, "pictures": pictures}
            _print_json(self._head() | self._ending(error) | figures | speed | reported)
        elif error is None:
            if self.results.tokens is not None:
                _print(str(self.results.tokens))
            if not self.results.is_quiet:
                print(self._summary(figures, speed), file=sys.stderr)

    def _summary(self, figures: dict[str, Any], speed: dict[str, Any]) -> str:
        cost = "" if figures["exact"] else f"total variation {figures['total_variation']:.3f} per code, "
        return (
            f"{self.method.name} ({'exact' if figures['exact'] else 'relaxed'}): {figures['codes']} codes in "
            f"{figures['passes']} passes, {figures['step_compression']:.2f} codes per pass, {cost}"
            f"{sum(figures['seconds'].values()):.2f} s, {speed['images_per_second']:.2f} images and "
            f"{speed['codes_per_second']:.0f} codes per second"
        )


def _reporter(is_quiet: bool) -> Callable[[str], None]:
    """Return a function that prints a line on stderr, unless `is_quiet`."""
    return lambda line: None if is_quiet else print(f"lantern: {line}", file=sys.stderr, flush=True)


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


def _destination(given: Path | None, *, has_pixels: bool) -> Path | None:
    """Return the folder or .png file for pictures, None without pictures; ValueError or OSError if it is unusable."""
    out = given if given is not None else Path(".")
    is_file = out.suffix.lower() == ".png" and not out.is_dir()
    if out.is_file() and not is_file:
        raise ValueError(f"--out {out} is a file without .png, wanted a .png file or a folder")
    if out.suffix.lower() in (".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff") and not out.is_dir():
        raise ValueError(f"--out {out} ends in {out.suffix}, wanted a .png file or a folder")
    if not has_pixels:
        return None
    check_writable(out.parent if is_file else out)
    return out


def _check_results(results: Results, method: str | None, *, is_comparison: bool) -> None:
    """Check the files of codes and records before anything is made; ValueError or OSError if one is unusable."""
    if is_comparison and results.tokens is not None:
        raise ValueError("--tokens writes the codes of one method, --compare runs two: leave one of them out")
    if is_comparison and results.record is not None:
        raise ValueError("--record writes the drafts of one method, --compare runs two: leave one of them out")
    if results.record is not None and method == "plain":
        raise ValueError('method "plain" drafts nothing, so there is nothing to --record: choose one that drafts trees')
    for option, path in (("--record", results.record), ("--tokens", results.tokens)):
        if path is not None:
            if path.is_dir():
                raise ValueError(f"{option} {path} is a folder, wanted a file")
            check_writable(path.parent)


def check_writable(folder: Path) -> None:
    """Raise OSError if a folder cannot be written to or made."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "cannot be written to", str(there))


def _parts(method: str | None, *, has_prompts: bool, has_pixels: bool) -> frozenset[Any]:
    """Return the components that this run needs beside the target."""
    parts = {"text"} if has_prompts else set()
    if method != "plain":
        parts |= {"drafter", "neighbours"}
    return frozenset(parts | ({"vq"} if has_pixels else set()))


def _write_tokens(path: Path, done: Sequence["Picture"], *, is_list: bool) -> None:
    """Write the code grid of one picture as rows of codes, or a list of such grids."""
    from lantern.core.io import atomic_write

    grids = [picture.grid for picture in done]
    try:
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(grids if is_list else grids[0]) + "\n", encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _print(text: str) -> None:
    """Print text that may hold characters the terminal's encoding lacks, such as file names."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, allow_nan=False), flush=True)


COMMAND = Command(
    "generate", "Make pictures from prompts or class labels.", add_arguments, run, add_late=add_method_options
)
