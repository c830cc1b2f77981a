"""`lantern-generate`: images from prompts or class labels, by any method, with statistics on request.

`run` checks the arguments; a `Job` makes, saves and reports the images.
"""

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.cli.command import (
    DONE,
    SAMPLING,
    Command,
    Names,
    add_distribution,
    add_engine,
    add_method_options,
    add_model,
    add_placement,
    add_set,
    advice,
    check_file,
    check_folder,
    distribution_of,
    explained,
    integer,
    one_of,
    placement_of,
    reporter,
    run_command,
    settings_of,
    size_of,
)
from lantern.generation.file_names import FIELDS, FORMATS, MAX_SCALE, RESAMPLINGS, SUFFIXES, destination
from lantern.methods import METHODS, Method, find

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from lantern.core.sampling import Sampling
    from lantern.core.signals import Stopping
    from lantern.core.types import Callback, Step
    from lantern.drafters.policies.records import Recorder
    from lantern.generation.comparison import Comparison
    from lantern.generation.file_names import Destination
    from lantern.generation.images import Picture
    from lantern.generation.progress import Progress
    from lantern.generation.requests import Request
    from lantern.models.folder import Model


STDOUT = Path("-")
LABEL_LINES = 2


@dataclass(frozen=True)
class Results:
    """Where the results of a run go, and in which form. `place` is None for no images.

    tokens: a file, or STDOUT. scale: None for the model's. columns: of a sheet of all images, 0 for about as many
    columns as rows, None for a file each.
    """

    place: "Destination | None"
    tokens: Path | None = None
    record: Path | None = None
    scale: int | None = None
    resample: str = "lanczos"
    quality: int | None = None
    columns: int | None = None
    has_prompt: bool = True
    is_json: bool = False
    is_quiet: bool = False

    @property
    def has_paths(self) -> bool:
        """Whether the paths of files are printed: not where stdout is JSON."""
        return not self.is_json and self.tokens != STDOUT


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
    add_distribution(parser.add_argument_group("the distribution that tokens are sampled from"), tuple(SAMPLING))
    _results(parser.add_argument_group("results"))


def _what(group: Any) -> None:
    add = group.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="prompt of an image; may be repeated")
    add(
        "--prompts-file",
        metavar="FILE",
        help="prompts, one per line without lines that begin with # (or .json, .jsonl, .tsv); - is stdin",
    )
    add(
        "--negative-prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that guidance leads away from, in place of the model's unconditional caption; once for all prompts, "
        "or repeated, one for each prompt in order",
    )
    add(
        "--class-label",
        type=integer(0, 10**9),
        action="append",
        default=[],
        metavar="N",
        help="class of an image, for class-conditional models; may be repeated",
    )
    add("-n", "--num-images", type=integer(1, 100_000), default=1, metavar="N", help="images of each prompt or class")
    add("--seed", type=integer(0, 2**63 - 1), default=0, help="seed of the noise (default 0)")
    add("--init-image", type=Path, metavar="FILE", help="image of which a part is kept, of the model's raw size")
    add("--keep-rows", type=integer(1, 10**6), metavar="N", help="rows of tokens to keep of --init-image")
    add("--mask", type=Path, metavar="FILE", help="image that is white where --init-image is generated anew")
    add("--list-words", action="store_true", help="print the words of the model's training captions, and make nothing")
    add("--list-names", action="store_true", help="print the names of things that the model generates recognisably")


def _how(group: Any) -> None:
    add = group.add_argument
    add_model(group)
    add("--size", type=size_of, metavar="WxH", help="width and height in pixels, of models that make several sizes")
    add("--no-verify", action="store_true", help="do not compare weight files with their SHA-256 (SHA256SUMS)")
    add(
        "--method",
        type=one_of(list(METHODS)),
        help=f"how tokens are decoded: {', '.join(METHODS)} (default: the model's)",
    )
    add(
        "--batch",
        type=integer(1, 4096),
        default=1,
        metavar="N",
        help="images at a time (default 1); halved if memory runs out, with the same images",
    )
    add_placement(group)
    add_set(group)
    add_engine(group)


def _results(group: Any) -> None:
    add = group.add_argument
    add("--out", type=Path, metavar="PATH", help=f"a file ({', '.join(FORMATS)}) or a folder (default: here)")
    add(
        "--name",
        metavar="TEMPLATE",
        help=f"names of the files of a folder, such as {{prompt}}-seed{{seed}}; fields: {', '.join(FIELDS)}",
    )
    add("--overwrite", action="store_true", help="replace files that exist; a file named by --out is always replaced")
    add(
        "--format",
        type=Names(tuple(SUFFIXES)),
        metavar="NAME",
        help=f"file format, of {', '.join(SUFFIXES)} (default png)",
    )
    add("--quality", type=integer(1, 100), help="quality of JPEG and WebP files, 1 to 100 (default 90)")
    add(
        "--scale",
        type=integer(1, MAX_SCALE),
        metavar="N",
        help="enlarge images N times; 1 is the raw size (default: the model's)",
    )
    add("--resample", choices=RESAMPLINGS, default="lanczos", help="filter of --scale (default lanczos)")
    add(
        "--grid",
        type=integer(1, 1000),
        nargs="?",
        const=0,
        metavar="COLUMNS",
        help="write all images as one contact sheet, with their prompts if there are several",
    )
    add(
        "--tokens",
        type=Path,
        metavar="FILE",
        help="write the token grid as JSON, - is stdout; no image unless --out; if interrupted, of the finished ones",
    )
    add(
        "--json",
        action="store_true",
        help="print statistics as one JSON object on stdout; if interrupted, of the finished images",
    )
    add("--compare", action="store_true", help="make each image by plain decoding as well, and print the difference")
    add("--repeats", type=integer(1, 100), metavar="N", help="--compare: runs of each (default 1)")
    add("--record", type=Path, metavar="FILE", help="write the drafts of every step, to train tree policies")
    add("--no-prompt-in-metadata", action="store_true", help="leave the prompt out of the metadata")
    add("--quiet", action="store_true", help="print only errors on stderr")


def run(args: argparse.Namespace) -> int:
    """Check the arguments, load the model, make the images, save and report them.

    ValueError for options that cannot be combined.
    """
    if args.list_words or args.list_names:
        from lantern.core.io import resolve_model
        from lantern.models.folder import list_names, read_words

        print("\n".join((read_words if args.list_words else list_names)(resolve_model(args.model))))
        return DONE
    prompts = _prompts(args.prompt, args.prompts_file, args.class_label)
    if args.negative_prompt and args.class_label:
        raise ValueError("--negative-prompt is for prompts: a model of classes has no captions")
    rank, processes = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if processes > 1 and (args.method in (None, "auto") or args.compare):
        raise ValueError(f"{processes} processes share a model and need one method: give --method, and no --compare")
    args.quiet |= rank > 0
    # the process of rank 0 writes and prints
    results = _results_of(args) if rank == 0 else Results(place=None, is_quiet=True)
    from lantern.core.sampling import Sampling
    from lantern.generation.generator import choose_method
    from lantern.generation.requests import check_requests, requests, subjects_of_call, with_noise, with_warnings
    from lantern.models.folder import load_model

    given = distribution_of(args, tuple(SAMPLING))
    Sampling(**given)
    kept: dict[str, Any] = {"init_image": args.init_image, "keep_rows": args.keep_rows, "mask_image": args.mask}
    keeps_tokens = any(one is not None for one in kept.values())
    if keeps_tokens:
        from lantern.generation.init_image import check_init_image

        check_init_image(**kept)
    texts = settings_of(args)
    if args.method not in (None, "auto"):
        METHODS[args.method].parsed(texts)  # refuses before the model is loaded

    def parts(default: str) -> frozenset[Any]:
        chosen = find(args.method or default)
        if chosen.name != "auto":
            chosen = chosen.with_options(**chosen.parsed(texts))
        has_pixels = results.place is not None or args.init_image is not None
        return _parts(chosen, args.model, has_prompts=bool(prompts), has_pixels=has_pixels)

    how = placement_of(args)
    model = load_model(args.model, parts=parts, verify=not args.no_verify, size=args.size, processes=processes, **how)
    sampling = model.sampling(**given)
    batch = 1 if args.compare else min(args.batch, args.num_images * max(len(prompts), len(args.class_label)))
    notes: list[str] = []  # printed when nothing can be refused any more
    # --window replaces the window that would be reported
    report = (lambda note: None) if "window" in texts and args.method != "auto" else notes.append
    usual = choose_method(model, args.method, sampling=sampling, batch=batch, report=report)
    settings = usual.parsed(texts)
    method = usual.with_options(**settings)
    settings = method.changed() | settings
    requested = requests(prompts=prompts, labels=args.class_label, seed=args.seed, count=args.num_images)
    if args.negative_prompt:
        from lantern.generation.embeddings import with_conditions

        subjects = with_conditions(
            model, subjects_of_call(prompts, None), sampling, negative_prompt=args.negative_prompt
        )
        requested = with_noise(subjects, args.num_images, args.seed)
    check_requests(model, requested)
    requested = with_warnings(model, requested, warn=notes.append)
    if keeps_tokens:
        from lantern.generation.init_image import with_init_image

        requested = with_init_image(model, requested, **kept)
    job = Job(model, method, settings, sampling, requested, results, args.stopping, usual, args.compare)
    for note in notes:
        reporter(args.quiet)(note)
    if args.compare:
        job.compare(repeats=args.repeats or 1)
    else:
        job.make(batch=args.batch, debug=args.debug)
    if processes > 1:
        from lantern.models.transformers.parallel import finish

        finish()
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
        raise ValueError('no images requested: give --prompt "a red apple", --prompts-file FILE or --class-label N')
    return prompts


def _results_of(args: argparse.Namespace) -> Results:
    """Return where results go; checks before anything is made: ValueError or OSError for what is unusable."""
    place = None
    if args.out is not None or args.tokens is None:
        place = destination(args.out, template=args.name, form=args.format, overwrites=args.overwrite)
        check_folder(place.out.parent if place.is_file else place.out)
    _check_combinations(args, place)
    files = {"--record": args.record, "--tokens": args.tokens}
    for option, path in files.items():
        if path is not None and path != STDOUT:
            check_file(option, path)
    files["--out"] = place.out if place is not None and place.is_file else None
    taken: dict[Path, str] = {}
    for option, path in files.items():
        if path is not None and (other := taken.setdefault(path.resolve(), option)) != option:
            raise ValueError(f"{other} and {option} are both {path}: give each a file of its own")
    for option, path in {"--init-image": args.init_image, "--mask": args.mask}.items():
        if path is not None and (other := taken.get(path.resolve())):
            raise ValueError(f"{other} is {path}, which {option} reads: give another file")
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


def _check_combinations(args: argparse.Namespace, place: "Destination | None") -> None:
    """Raise ValueError for options of images where none is written, and for those that contradict each other."""
    given = {"--name": args.name, "--format": args.format, "--quality": args.quality, "--scale": args.scale}
    for option, value in (given | {"--grid": args.grid}).items():
        if value is not None and place is None:
            raise ValueError(f"{option} is an option of image files, which --tokens alone does not write: give --out")
    if args.compare:
        for option, value in (("--tokens", args.tokens), ("--record", args.record)):
            if value is not None:
                raise ValueError(f"{option} is of one method, --compare runs two: leave one of them out")
        if args.grid is not None:
            raise ValueError("--compare puts two images side by side, --grid all on one sheet: leave one of them out")
    elif args.repeats is not None:
        raise ValueError("--repeats is an option of --compare: give both, or leave it out")
    if args.tokens == STDOUT and args.json:
        raise ValueError("--tokens - and --json both write to standard output: give --tokens a file")
    if args.record is not None and args.method == "plain":
        raise ValueError('method "plain" drafts nothing, so there is nothing to --record: choose one that drafts trees')


def _parts(method: Method, model: str, *, has_prompts: bool, has_pixels: bool) -> frozenset[Any]:
    """Return the components that this run reads beside the target; by a profile, "auto" may choose any method."""
    from lantern.core.io import resolve_model
    from lantern.models.folder import may_have_profile

    is_any = method.name == "auto" and may_have_profile(resolve_model(model))
    needs = {
        "text": has_prompts,
        "vq": has_pixels,
        "drafter": is_any or method.made.reads_drafter,
        "neighbours": is_any or bool(method.made.asks("neighbours")),
    }
    return frozenset(part for part, is_needed in needs.items() if is_needed)


@dataclass
class Job:
    """One run of the command after all choices are made; ValueError if a file would be overwritten.

    `usual` is the method without the settings of the call.
    """

    model: "Model"
    method: Method
    settings: dict[str, Any]
    sampling: "Sampling"
    requested: "Sequence[Request]"
    results: Results
    stopping: "Stopping"
    usual: Method
    is_comparison: bool

    def __post_init__(self) -> None:
        requested, results = self.requested, self.results
        self.scale = self.model.scale if results.scale is None else results.scale
        self.planned: dict[Request, list[Path]] = {}
        if results.place is not None:
            values = [self._values(request) for request in requested]
            if results.columns is not None:
                self._check_sheet()
                values = [self._sheet_values(values)]
            paths = results.place.paths(values)
            for request, path in zip(requested, paths * (len(requested) // len(paths)), strict=True):
                self.planned.setdefault(request, []).append(path)
        self.paths: list[Path] = []
        self.halved: int | None = None

    def make(self, *, batch: int, debug: bool) -> None:
        """Make the images, save each when it is done, write the tokens, print paths or statistics.

        After a signal or an error, tokens and statistics are those of the finished images.
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
                    with_pixels=bool(self.planned),
                    callback=self._callback(progress),
                    on_halved=partial(self._report_halving, progress),
                    debug=debug,
                    record=recorder,
                ):
                    with self.stopping.shield():
                        done.append(self._save(picture))
        except (Exception, KeyboardInterrupt) as error:
            if done:
                self._finish(done, batch, recorder, error)
            raise
        self._finish(done, batch, recorder)

    def compare(self, *, repeats: int) -> None:
        """Make each image by plain decoding and by the method, print the comparison, save both side by side."""
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
        from lantern.drafters.policies.records import Recorder

        sampling = dataclasses.asdict(self.sampling)
        return Recorder(
            method=self.method.name, settings=self.settings, sampling=sampling, target=self.model.weights_digest
        )

    def _progress(self, runs: int) -> "AbstractContextManager[Progress | None]":
        """Return the bar of a run; None, as a context, with --quiet."""
        if self.results.is_quiet:
            return nullcontext()
        from lantern.generation.progress import Progress

        pictures, tokens = runs * len(self.requested), self.model.target.config.block_size
        return Progress(pictures, tokens, is_quiet=self.results.is_json)

    def _callback(self, progress: "Progress | None") -> "Callback":
        """Return the callback of a generation: it updates the bar, and stops if a signal's exception was swallowed."""

        def call(step: "Step") -> None:
            self.stopping.check()
            if progress is not None:
                progress(step)

        return call

    def _report_halving(self, progress: "Progress | None", tried: int, fits: int) -> None:
        from lantern.generation.generator import halving_message

        self.halved = fits
        if progress is not None:
            progress.say(f"lantern: {halving_message(tried, fits)}")

    def _values(self, request: "Request") -> dict[str, Any]:
        """Return the values of the fields of file names."""
        from lantern.generation.file_names import compact, slug
        from lantern.models.folder import DTYPES

        sampling, weights = dataclasses.asdict(self.sampling), self.model.engine.weights
        return {
            "prompt": slug(request.subject),
            "method": f"plain-and-{self.method.name}" if self.is_comparison else self.method.name,
            "settings": compact(self._changed()),
            "model": slug(self.model.name),
            "engine": self.model.engine.name,
            "dtype": next((name for name, dtype in DTYPES.items() if dtype == self.model.dtype), str(self.model.dtype)),
            "weights": "" if weights == "full" else weights,
            **{name: f"{sampling[name]:g}" for name in ("guidance", "temperature", "top_p")},
            "top_k": self.sampling.top_k,
            "seed": request.seed,
            "image": request.number,
        }

    def _changed(self) -> dict[str, Any]:
        """Return what the call chose of the method's settings and the sampling, guidance apart, beside the defaults."""
        chosen = {**self.method.settings} | dataclasses.asdict(self.sampling)
        default = {**self.usual.settings} | dataclasses.asdict(self.model.sampling())
        return {name: chosen[name] for name in chosen if name != "guidance" and chosen[name] != default[name]}

    def _sheet_values(self, values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the values of the fields of a sheet's name."""
        from lantern.generation.file_names import slug

        subjects = dict.fromkeys(request.subject for request in self.requested)
        return dict(values[0]) | {"prompt": slug(", ".join(subjects)), "image": f"grid{len(values)}"}

    def _check_sheet(self) -> None:
        """Raise ValueError if the sheet would be too large for an image file."""
        from lantern.generation.images import MAX_SIDE, sheet_size

        assert self.model.vq is not None
        raster, side = self.model.target.config.raster, self.model.vq.config.downsample * self.scale
        cell = raster.columns * side, raster.rows * side
        size = sheet_size(cell, len(self.requested), self._columns(len(self.requested)), lines=self._lines)
        if max(size) > MAX_SIDE:
            raise ValueError(
                f"the sheet would have {size[0]} x {size[1]} pixels, wanted at most {MAX_SIDE} a side: make fewer"
                " images, or give --grid COLUMNS or --scale 1"
            )

    def _columns(self, pictures: int) -> int:
        return self.results.columns or math.ceil(math.sqrt(pictures))

    @property
    def _lines(self) -> int:
        """Lines of the labels of a sheet: prompts, where there are several."""
        return LABEL_LINES if self.results.has_prompt and len({one.subject for one in self.requested}) > 1 else 0

    def _image(self, pixels: "Tensor") -> "Image":
        from lantern.generation.images import enlarge, to_image

        return to_image(enlarge(pixels, self.scale, self.results.resample))

    def _write(self, image: "Image", path: Path, facts: dict[str, Any]) -> None:
        """Write an image or sheet and remember its path."""
        from lantern.generation.images import QUALITY, save_image

        enlarged = {"scale": str(self.scale), "resample": self.results.resample} if self.scale > 1 else {}
        save_image(image, path, facts | enlarged, quality=self.results.quality or QUALITY)
        self.paths.append(path)

    def _save(self, picture: "Picture") -> "Picture":
        """Save an image, unless it goes to a sheet; return it, without pixels that are not needed any more."""
        if picture.pixels is None or self.results.columns is not None:
            return picture
        path = self.planned[picture.request].pop(0)
        self._write(self._image(picture.pixels), path, self._facts(picture))
        if self.results.has_paths:
            _print(str(path))
        return dataclasses.replace(picture, pixels=None)

    def _save_sheet(self, done: Sequence["Picture"]) -> None:
        """Save the finished images on one sheet, with their prompts if there are several."""
        from lantern.generation.images import sheet

        path = self.planned[self.requested[0]][0]
        labels = [picture.request.subject for picture in done] if self._lines else []
        columns = self._columns(len(done))
        images = [self._image(picture.pixels) for picture in done if picture.pixels is not None]
        whole = sheet(images, columns=columns, labels=labels, lines=LABEL_LINES)
        facts = self._facts(done[0]) | {"pictures": str(len(done)), "layout": f"sheet of {columns} columns"}
        several = len({picture.request.subject for picture in done}) > 1
        for name in ("image", "prompt_sha256", *(("prompt", "negative_prompt", "class") if several else ())):
            del facts[name]
        self._write(whole, path, facts)
        if self.results.has_paths:
            _print(str(path))

    def _report_pair(self, comparison: "Comparison") -> dict[str, Any]:
        """Save both images side by side and print the comparison; return it as JSON values."""
        from lantern.generation.images import sheet

        pair = [picture.pixels for picture in (comparison.plain, comparison.other)]
        request = comparison.plain.request
        path = self.planned[request].pop(0)
        row = sheet([self._image(pixels) for pixels in pair if pixels is not None], columns=2, margin=0)
        self._write(row, path, self._facts(comparison.other) | {"layout": f"left plain, right {self.method.name}"})
        if not self.results.is_json:
            _print(f"{request.subject}, seed {request.seed}, image {request.number}")
            _print("\n".join([*comparison.lines(), f"  {path}"]))
        return comparison.as_dict() | {"path": str(path)}

    def _facts(self, picture: "Picture") -> dict[str, Any]:
        """Return the metadata of an image's file."""
        request, head = picture.request, self._head()
        return {
            "prompt": request.prompt if self.results.has_prompt else None,
            "negative_prompt": request.negative_prompt if self.results.has_prompt else None,
            "class": request.label,
            "model": self.model.name,
            "method": self.method.name,
            "settings": self.settings or None,
            "seed": str(request.seed),
            "image": str(request.number),
            **{name: head[name] for name in ("sampling", "dtype", "engine", "versions")},
            "prompt_sha256": picture.prompt_sha256,
            "forced_tokens": str(picture.statistics.forced) if picture.statistics.forced else None,
        }

    def _head(self) -> dict[str, Any]:
        """Return the JSON values that all images of the run share."""
        import torch

        from lantern import __version__

        return {
            "model": self.model.name,
            "method": self.method.name,
            "method_reason": self.method.reason or None,
            "settings": self.settings,
            "seed": self.requested[0].seed,
            "sampling": dataclasses.asdict(self.sampling),
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "engine": self.model.engine.as_dict(),
            "warnings": list(dict.fromkeys(one.warning for one in self.requested if one.warning is not None)),
            "versions": {"lantern": __version__, "torch": torch.__version__},
        }

    def _ending(self, error: BaseException | None = None) -> dict[str, Any]:
        """Return how many images were requested, and why the run ended before they were done."""
        stopped = explained(error) if isinstance(error, Exception) else str(error) if error is not None else None
        return {"asked": len(self.requested), "stopped": stopped}

    def _finish(
        self, done: list["Picture"], batch: int, recorder: "Recorder | None", error: BaseException | None = None
    ) -> None:
        """Write the tokens and print the statistics; after an error they are printed only as JSON."""
        from lantern.generation.images import totals

        if self.planned and self.results.columns is not None:
            self._save_sheet(done)
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
            "tokens_per_second": round(figures["tokens"] / seconds, 2),
        }
        if self.results.is_json:
            paths = [str(path) for path in self.paths]
            # a sheet is the file of all pictures
            places = [None] * len(done) if not paths else paths * (len(done) // len(paths))
            pictures = [one.as_dict() | {"path": place} for one, place in zip(done, places, strict=True)]
            digests = [picture.prompt_sha256 for picture in done]
            reported = {"prompt_sha256": digests, "paths": paths, "pictures": pictures}
            _print_json(self._head() | self._ending(error) | figures | speed | reported)
        elif error is None:
            if self.results.tokens is not None and self.results.has_paths:
                _print(str(self.results.tokens))
            if not self.results.is_quiet:
                print(self._summary(figures, speed), file=sys.stderr)

    def _summary(self, figures: dict[str, Any], speed: dict[str, Any]) -> str:
        cost = "" if figures["exact"] else f"total variation {figures['total_variation']:.3f} per token, "
        kind = f"exact in {figures['promise']}" if figures["exact"] else "relaxed"
        return (
            f"{self.method.name} ({kind}): {figures['tokens']} tokens in "
            f"{figures['steps']} passes, {figures['tokens_per_step']:.2f} tokens per step, {cost}"
            f"{sum(figures['seconds'].values()):.2f} s, {speed['images_per_second']:.2f} images and "
            f"{speed['tokens_per_second']:.0f} tokens per second"
        )


def _write_tokens(path: Path, done: Sequence["Picture"], *, is_list: bool) -> None:
    """Write the token grid of one image as rows of tokens, or a list of such grids, to a file or standard output."""
    from lantern.core.io import atomic_write

    grids = [picture.grid for picture in done]
    text = json.dumps(grids if is_list else grids[0])
    if path == STDOUT:
        _print(text)
        return
    try:
        with atomic_write(path) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _print(text: str) -> None:
    """Print text that may hold characters the terminal's encoding lacks, such as file names."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, allow_nan=False), flush=True)


COMMAND = Command(
    "generate", "Make images from prompts or class labels.", add_arguments, run, add_late=add_method_options
)
