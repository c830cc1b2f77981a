"""`lantern-generate`: images from prompts or class labels, by any method, with statistics on request.

`generate` checks the arguments; an `ImageRun` makes, saves and reports the images.
"""

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern import __version__
from lantern.cli.command import (
    Group,
    OneOf,
    check_file,
    check_folder,
    command,
    explained,
    named,
    opt,
    printable,
    run_command,
    say,
)
from lantern.cli.options import MAX_SEED, METHOD, MODEL, OF_MODEL, Distribution, Placement
from lantern.core.config import read_json_object, resolve_model
from lantern.core.process import launched
from lantern.engines.engine import engine
from lantern.generation import images
from lantern.methods import METHODS, Method, check_parts
from lantern.methods.method import DRAFTER, check_same, split

if TYPE_CHECKING:
    from PIL.Image import Image

    from lantern.core.process import Stopping
    from lantern.core.sampling import Sampling
    from lantern.core.types import Step
    from lantern.drafters.records import Recorder
    from lantern.generation.comparison import Comparison
    from lantern.generation.requests import Request
    from lantern.models.folder import Model


STDOUT = Path("-")
PROMPTS_HELP = (
    "prompts, one per line without lines that begin with # (or those of .json, .jsonl, .tsv, .csv); - is stdin"
)
NEGATIVE_HELP = "text that guidance leads away from; once for all prompts, or repeated, one for each prompt in order"
NAME_HELP = f"names of the files of a folder, such as {{prompt}}-seed{{seed}}; fields: {', '.join(images.FIELDS)}"
GRID_HELP = "write one contact sheet of N columns, with prompts if they differ"
RESAMPLE_HELP = f"filter of --scale: {' or '.join(images.RESAMPLINGS)}"
SETTINGS = {option.label: option.flag for method in METHODS.values() for option in method.options.values()}
# options that go with none of some others, and why
ALONE = {
    "--skip-existing": ("keeps files of single images", ("--overwrite", "--grid", "--tokens", "--record")),
    "--compare": ("makes each image by two methods", ("--batch", "--grid", "--tokens", "--record")),
}
SETTING_HELP = "a setting of the method by its name, such as nodes=31; may be repeated"


class Content(Group):
    """More of what to make."""

    negative_prompt: list[str] = opt([], NEGATIVE_HELP, metavar="TEXT", action="append")
    size: tuple[int, int] | None = opt(None, "width and height in pixels, of models that make several")
    init_image: Path | None = opt(None, "image of which a part is kept, of the model's raw size", metavar="FILE")
    keep_rows: int | None = opt(None, "rows of tokens to keep of --init-image", 1, 10**6)
    mask: Path | None = opt(None, "image that is white where --init-image is generated anew", metavar="FILE")
    list_words: bool = opt(False, "print the words of the model's training captions, and make nothing")
    list_names: bool = opt(False, "print the names of things that the model generates recognisably")
    no_verify: bool = opt(False, "do not compare weight files with their SHA-256 (SHA256SUMS)")

    @property
    def kept(self) -> dict[str, Any]:
        """What is kept of an image, as `with_init_image` takes it."""
        return {"init_image": self.init_image, "keep_rows": self.keep_rows, "mask_image": self.mask}


class Files(Group):
    """What is written and printed."""

    name: str | None = opt(None, NAME_HELP, metavar="TEMPLATE")
    overwrite: bool = opt(False, "replace files that exist; a file named by --out is always replaced")
    skip_existing: bool = opt(False, "keep files by name alone, such as those of an interrupted run; make the others")
    format: str | None = opt(None, f"one of {', '.join(images.SUFFIXES)} (default png)", type=OneOf(images.SUFFIXES))
    quality: int | None = opt(None, "quality of JPEG and WebP files, 1 to 100 (default 90)", 1, 100)
    scale: int | None = opt(None, f"enlarge images N times; 1 is the raw size {OF_MODEL}", 1, images.MAX_SCALE)
    resample: str = opt("lanczos", RESAMPLE_HELP, type=OneOf(images.RESAMPLINGS))
    grid: int | None = opt(None, GRID_HELP, 1, 1000, nargs="?", const=0)
    tokens: Path | None = opt(None, "write the token grid as JSON, - is stdout; no image unless --out", metavar="FILE")
    json: bool = opt(False, "print statistics as one JSON object on stdout; if interrupted, of the finished images")
    compare: bool = opt(False, "make each image by plain decoding as well, and print the difference")
    record: Path | None = opt(None, "write the drafts of all steps (safetensors), to train policies", metavar="FILE")
    no_prompt_in_metadata: bool = opt(False, "leave the prompt out of the metadata")
    quiet: bool = opt(False, "print only errors on stderr")

    @property
    def has_paths(self) -> bool:
        """Whether the paths of files are printed alone: not where stdout is JSON or has comparisons."""
        return not self.json and not self.compare and self.tokens != STDOUT

    def place(
        self, out: Path | None, inputs: Content, method: str | None, changed: Collection[str]
    ) -> images.Destination | None:
        """Return where images go, None for none; ValueError or OSError for what is unusable or contradicts."""
        place = None
        if out is not None or self.tokens is None:
            place = images.destination(out, template=self.name, form=self.format)
            check_folder(place.out.parent if place.is_file else place.out)
        for option, (what, others) in ALONE.items():
            if option in changed and (given := [other for other in others if other in changed]):
                raise ValueError(f"{option} {what}, and {given[0]} is given: leave one of them out")
        of_files = [name for name in ("--name", "--format", "--quality", "--scale", "--grid") if name in changed]
        if of_files and place is None:
            of = f"{'/'.join(of_files)} is an option of image files"
            raise ValueError(f"{of}, which --tokens alone does not write: give --out")
        if self.quality and place is not None and images.FORMATS[place.suffix] == "png":
            raise ValueError("--quality is an option of JPEG and WebP, and PNG is lossless: give --format jpeg or webp")
        if self.json and self.tokens == STDOUT:
            raise ValueError("--tokens - and --json both write to standard output: give --tokens a file")
        if self.record and method == "plain":
            raise ValueError('method "plain" drafts nothing, so there is nothing to --record: choose one that drafts')
        written = {"--record": self.record, "--tokens": None if self.tokens == STDOUT else self.tokens}
        for option, path in written.items():
            check_file(option, path)
        written["--out"] = place.out if place is not None and place.is_file else None
        taken: dict[str, str] = {}
        for option, path in {**written, "--init-image": inputs.init_image, "--mask": inputs.mask}.items():
            if path is None:
                continue
            if (other := taken.setdefault(os.path.realpath(path), option)) != option and other in written:
                raise ValueError(f"{other} and {option} are both {path}: give each a file of its own")
        return place


def generate(
    prompt: list[str] = opt([], "prompt of an image; may be repeated", metavar="TEXT", action="append"),
    prompts_file: str | None = opt(None, PROMPTS_HELP, metavar="FILE"),
    class_label: list[int] = opt([], "class of an image, of models of classes", 0, 10**9, action="append"),
    num_images: int = opt(1, "images of each prompt or class", 1, 100_000, "-n --num-images"),
    seed: int = opt(0, "seed of the noise (default 0)", 0, MAX_SEED),
    model: str = MODEL,
    method: str | None = opt(None, f"how tokens are decoded {OF_MODEL}", type=METHOD),
    out: Path | None = opt(None, f"a file ({', '.join(images.FORMATS)}) or a folder (default: here)", flag="-o --out"),
    batch: int = opt(1, "images at a time; halved if memory runs out, with the same images", 1, 4096),
    *,
    settings: list[tuple[str, str]] = opt(
        [], SETTING_HELP, type=named(str, "VALUE"), flag="--set", action="append", names=[f"{one}=" for one in SETTINGS]
    ),
    inputs: Content,
    where: Placement,
    distribution: Distribution,
    files: Files,
    stopping: "Stopping",
    debug: bool,
    changed: list[str],
) -> None:
    """Make images from prompts or class labels.

    lantern methods lists the methods, lantern methods NAME the settings of one, such as --k or --tree.
    """
    if inputs.list_words or inputs.list_names:
        from lantern.models.llamagen.text import list_names, read_words

        listed = (read_words if inputs.list_words else list_names)(resolve_model(model))
        print("\n".join(map(printable, listed)))
        return
    prompts = _prompts(prompt, prompts_file, class_label)
    rank, processes = launched()
    if processes > 1 and (method in (None, "auto") or files.compare):
        raise ValueError(f"{processes} processes share a model and need one method: give --method, and no --compare")
    if rank > 0:  # the process of rank 0 writes and prints
        files = Files(quiet=True)
    place = files.place(out, inputs, method, changed) if rank == 0 else None
    texts = dict(settings)
    for name, text in settings:
        check_same(name, text, texts[name])
    how, given = where.options(), distribution.given()
    folder = resolve_model(model)
    chosen = _chosen(method, folder, texts)
    with stopping.shield():  # torch's import does not survive a signal
        from lantern.core.sampling import Sampling
        from lantern.generation.choice import choose_method
        from lantern.generation.generator import ready, watchable
        from lantern.generation.requests import check_init_image, requests_of_call
        from lantern.models.folder import load_model, may_have_profile

    Sampling(**given)
    check_init_image(**inputs.kept)
    needs = {  # by a profile "auto" may choose any method
        "text": bool(prompts),
        "vq": place is not None or inputs.init_image is not None,
        "drafter": DRAFTER in chosen.made.needs if chosen else may_have_profile(folder),
        "codebook": bool(chosen.made.asks("neighbours")) if chosen else may_have_profile(folder),
    }
    parts: Any = [part for part, is_needed in needs.items() if is_needed]
    loaded = load_model(model, parts=parts, verify=not inputs.no_verify, size=inputs.size, processes=processes, **how)
    if debug:  # before the report names the engine
        loaded = watchable(loaded)
    sampling = loaded.sampling(**given)
    notes: list[str] = []
    together = 1 if files.compare else min(batch, num_images * max(len(prompts), len(class_label)))
    own = chosen.chosen if chosen else {}
    decoded_by = choose_method(loaded, method, own, sampling=sampling, batch=together, report=notes.append)
    if chosen is None:
        own = _parsed(decoded_by, texts, is_named=False)
        decoded_by = decoded_by.with_options(**own)
    subjects = {"prompt": prompts or None, "class_labels": class_label or None}
    subjects |= {"negative_prompt": inputs.negative_prompt or None}
    requested = requests_of_call(loaded, sampling, **subjects, images=num_images, generator=seed)
    requested = ready(loaded, requested, with_pixels=place is not None, warn=notes.append, **inputs.kept)
    run = ImageRun(loaded, decoded_by, own, sampling, requested, batch, files, place, stopping)
    if run.requested:
        run.run(notes, debug)
    else:
        if files.json:
            print(json.dumps({"asked": 0, "stopped": None, "tokens": 0, "paths": [], "pictures": []}))
        say(f"all {len(requested)} images exist", files.quiet)
    if processes > 1:
        from torch import distributed

        distributed.destroy_process_group()
    if (hint := advice(loaded)) is not None:
        say(hint, files.quiet)


def _chosen(name: str | None, folder: Path, texts: Mapping[str, str]) -> Method | None:
    """Return the method with its settings, None for "auto"; ValueError for wrong settings and for missing parts."""
    index = folder / "model_index.json"
    found = read_json_object(index).get("generation") if index.is_file() else None
    default = found.get("method") if isinstance(found, dict) else None  # others are refused with the index
    name_of_default, own = split(str(default))
    chosen = METHODS.get(name or name_of_default)  # an unknown default is refused with the index
    if chosen is None or chosen.name == "auto":
        return None
    texts = texts if name else {**own, **texts}
    chosen = chosen.with_options(**_parsed(chosen, texts, is_named=name is not None))
    target = folder / "transformer" if (folder / "transformer").is_dir() else folder
    if any(target.glob("*.safetensors")):  # what is no model is refused when it is loaded
        read_json_object(target / "config.json")
        check_parts(chosen, folder)
    return chosen


def _parsed(method: Method, texts: Mapping[str, str], *, is_named: bool) -> dict[str, Any]:
    """Return the values of settings; ValueError names the methods that have one, if none was named."""
    try:
        return method.parsed(texts)
    except ValueError:
        labels = {one.label for one in method.options.values()}
        for name in () if is_named else texts:
            having = [one.name for one in METHODS.values() if name in {option.label for option in one.options.values()}]
            if name not in labels and having:
                known = ", ".join(having[:6] + ["..."] * (len(having) > 6))
                raise ValueError(f"{name} is a setting of {known}: name the method with --method") from None
        raise


def _prompts(given: Sequence[str], file: str | None, labels: Sequence[int]) -> list[str]:
    """Return all prompts in order, checked; ValueError without prompts and classes, and for both."""
    if bool(labels) == bool(given or file is not None):
        got = "both, and a model takes either words or classes" if labels else "neither"
        options = 'give --prompt "a red apple", --prompts-file FILE or --class-label N'
        raise ValueError(f"wanted prompts or class labels, got {got}: {options}")
    from lantern.generation.requests import check_prompt, read_prompts

    return [check_prompt(prompt) for prompt in given] + ([] if file is None else read_prompts(file))


def advice(model: "Model") -> str | None:
    """Return how to get a faster engine, if `auto` chose eager only because the C++ library is not built."""
    if model.device.type != "cpu" or model.engine.name != "eager" or not model.engine.reason:
        return None
    from lantern.engines.cpu import build

    # with --debug the library was not chosen although it is built
    cpu = engine("cpu", weights=model.engine.weights, kv_cache=model.engine.kv_cache)
    if build.missing() is None or cpu.why_not(model.target) is not None:
        return None
    return "`lantern doctor --build` or `--engine cpu` builds the C++ engine, which is several times as fast here"


@dataclass
class ImageRun:
    """One run of the command after all choices are made; ValueError if a file would be overwritten.

    `own` are the settings that the call gave, beside those that were chosen for it.
    """

    model: "Model"
    method: Method
    own: Mapping[str, Any]
    sampling: "Sampling"
    requested: "Sequence[Request]"
    batch: int
    files: Files
    place: images.Destination | None
    stopping: "Stopping"

    def __post_init__(self) -> None:
        self.settings = self.method.changed() | dict(self.own)
        self.scale = self.files.scale or self.model.scale
        self.planned: dict[Request, list[Path]] = {}
        self.paths: list[Path] = []
        self.is_new = False
        self.halved: int | None = None
        self.recorder: Recorder | None = None
        self.columns = self.files.grid or math.ceil(math.sqrt(len(self.requested)))
        subjects = dict.fromkeys(request.subject for request in self.requested)
        self.has_several = len(subjects) > 1
        self.has_labels = self.has_several and not self.files.no_prompt_in_metadata
        if self.place is None:
            return
        values = [self._values(request) for request in self.requested]
        if self.files.grid is not None:
            height, width = self.model.size
            cell = width * self.scale, height * self.scale
            images.sheet_size(cell, len(values), self.columns, has_labels=self.has_labels)  # ValueError for a large one
            values = [values[0] | {"prompt": images.slug(", ".join(subjects)), "image": f"grid{len(values)}"}]
        may_exist = self.files.overwrite or self.files.skip_existing
        paths = self.place.paths(values, may_exist=may_exist)
        self.is_new = not may_exist and paths != [self.place.out]  # `paths` has refused files that exist
        planned = list(zip(self.requested, paths * (len(self.requested) // len(paths)), strict=True))
        if self.files.skip_existing:
            planned = [(request, path) for request, path in planned if not path.exists()]
            self.requested = [request for request, _ in planned]
        for request, path in planned:
            self.planned.setdefault(request, []).append(path)

    def run(self, notes: Sequence[str], debug: bool) -> None:
        """Make the images, or pairs of them, save each when it is done, and report them.

        `notes` are printed once nothing can be refused any more. After a signal or an error the report is of the images
        that are finished.
        """
        from lantern.generation.generator import HALVED, INTERVAL, Generator, Progress, make_batches

        files, done = self.files, list[Any]()
        if files.record is not None:
            from lantern.drafters.records import Recorder

            about = {"sampling": dataclasses.asdict(self.sampling), "target": self.model.weights_digest}
            self.recorder = Recorder(method=self.method.name, settings=self.settings, **about)
        pictures = len(self.requested) * (2 if files.compare else 1)
        bar = Progress(pictures, self.model.target.config.block_size, is_quiet=files.json or files.quiet)

        def watch(step: "Step") -> None:
            self.stopping.check()  # code of others may have swallowed the exception of a signal
            bar(step)

        def report_halved(tried: int, fits: int) -> None:
            self.halved = fits
            if not files.quiet:
                bar.say(f"lantern: {HALVED.format(tried, fits)}")

        how: dict[str, Any] = {"interval": INTERVAL}
        if files.compare:
            from lantern.generation.comparison import compare

            how |= {"method": self.method, "sampling": self.sampling, "callback": watch}
            made, save = compare(self.model, self.requested, **how), self._save_pair
        else:
            how |= {"batch": self.batch, "on_halved": report_halved, "debug": debug, "record": self.recorder}
            generator, save = Generator(self.model, self.method, self.sampling, **how), self._save
            made = make_batches(generator, self.requested, with_pixels=bool(self.planned), callback=watch)
        for note in () if files.quiet else notes:
            bar.say(f"lantern: {note}")
        try:
            with bar.bar:
                for one in made:
                    with self.stopping.shield(raises=False):  # the images of a batch are saved together
                        done.append(save(one))  # type: ignore[arg-type]
                self.stopping.check()
        except (Exception, KeyboardInterrupt) as error:
            if done:
                self._report(done, explained(error) if isinstance(error, Exception) else str(error))
            raise
        self._report(done)

    def _values(self, request: "Request") -> dict[str, Any]:
        """Return the values of the fields of file names."""
        sampling, engine = dataclasses.asdict(self.sampling), self.model.engine
        kept = (engine.weights, f"kv-{engine.kv_cache}")
        # no name depends on what was chosen by times that were measured
        changed = {name: value for name, value in self.own.items() if value != self.method.options[name].default}
        usual = dataclasses.asdict(self.model.sampling())
        changed |= {name: sampling[name] for name in sampling if name != "guidance" and sampling[name] != usual[name]}
        method = "auto" if self.method.reason else self.method.name
        return {
            "prompt": images.slug(request.subject),
            "method": f"plain-and-{method}" if self.files.compare else method,
            "settings": images.compact(changed),
            "model": images.slug(self.model.name),
            "engine": self.model.engine.name,
            "dtype": self.model.dtype_name,
            "weights": "-".join(one for one in kept if not one.endswith("full")),
            **{name: f"{sampling[name]:g}" for name in ("guidance", "temperature", "top_p")},
            "top_k": self.sampling.top_k,
            "seed": request.seed,
            "image": request.number,
        }

    def _image(self, picture: images.Picture) -> "Image":
        """Return the image of a picture, enlarged."""
        assert picture.pixels is not None
        return images.to_image(images.enlarge(picture.pixels, self.scale, self.files.resample))

    def _write(self, image: "Image", path: Path, facts: dict[str, Any]) -> None:
        """Write an image or sheet, remember its path and print it."""
        enlarged = {"scale": str(self.scale), "resample": self.files.resample} if self.scale > 1 else {}
        how = {"quality": self.files.quality or images.QUALITY, "is_new": self.is_new}
        try:
            images.save_image(image, path, facts | enlarged, **how)
        except FileExistsError as error:
            why = "another run wrote it meanwhile: give --overwrite or --skip-existing"
            raise FileExistsError(error.errno, why, str(path)) from error
        self.paths.append(path)
        if self.files.has_paths:
            print(str(path))

    def _save(self, picture: images.Picture) -> images.Picture:
        """Save an image, unless it goes to a sheet; return it, without pixels that are not needed any more."""
        if picture.pixels is None or self.files.grid is not None:
            return picture
        self._write(self._image(picture), self.planned[picture.request].pop(0), self._facts(picture))
        return replace(picture, pixels=None)

    def _save_sheet(self, done: Sequence[images.Picture]) -> None:
        """Save the finished images on one sheet, with their prompts if there are several."""
        from lantern.models.llamagen.text import named_emoji

        subjects = [picture.request.subject for picture in done] if self.has_labels else []
        labels = [" ".join(named_emoji(one, lambda _: True).split()) for one in subjects]  # the font has no emoji
        whole = images.sheet([self._image(one) for one in done], columns=self.columns, labels=labels)
        of_one = ("image", "tokens_sha256", *(("prompt", "negative_prompt", "class") if self.has_several else ()))
        facts = self._facts(done[0]) | dict.fromkeys(of_one)
        facts |= {"pictures": str(len(done)), "layout": f"sheet of {self.columns} columns"}
        self._write(whole, self.planned[self.requested[0]][0], facts)

    def _save_pair(self, comparison: "Comparison") -> dict[str, Any]:
        """Save both images side by side and print the comparison; return it as JSON values."""
        request = comparison.plain.request
        path = self.planned[request].pop(0)
        row = images.sheet([self._image(comparison.plain), self._image(comparison.other)], columns=2, margin=0)
        self._write(row, path, self._facts(comparison.other) | {"layout": f"left plain, right {self.method.name}"})
        if not self.files.json:
            print(f"{request.subject}, seed {request.seed}, image {request.number}")
            print("\n".join([*comparison.lines(), f"  {path}"]))
        return comparison.as_dict() | {"path": str(path)}

    def _facts(self, picture: images.Picture) -> dict[str, Any]:
        """Return the metadata of an image's file."""
        request, head, has_prompt = picture.request, self._head(), not self.files.no_prompt_in_metadata
        return {
            "prompt": request.prompt if has_prompt else None,
            "negative_prompt": request.negative_prompt if has_prompt else None,
            "class": request.label,
            **{name: head[name] for name in ("model", "method", "sampling", "dtype", "versions")},
            "engine": {name: one for name, one in head["engine"].items() if name != "reason"},  # which may name paths
            "settings": self.settings or None,
            "seed": str(request.seed),
            "image": str(request.number),
            "tokens_sha256": picture.tokens_sha256,
            "forced_tokens": str(picture.statistics.forced) if picture.statistics.forced else None,
        }

    def _head(self) -> dict[str, Any]:
        """Return the JSON values that all images of the run share."""
        import torch

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

    def _report(self, done: list[Any], stopped: str | None = None) -> None:
        """Write the sheet, the tokens and the drafts, and print figures; if `stopped`, only as JSON."""
        from lantern.core.io import write_text

        files, head = self.files, self._head() | {"asked": len(self.requested), "stopped": stopped}
        if files.compare:
            if files.json:
                print(json.dumps(head | {"comparisons": done}, allow_nan=False))
            return
        if self.planned and files.grid is not None:
            self._save_sheet(done)
        if files.tokens is not None:
            tokens = json.dumps([one.grid for one in done] if len(self.requested) > 1 else done[0].grid)
            if files.tokens == STDOUT:
                print(tokens)
            else:
                write_text(files.tokens, f"{tokens}\n")
        if self.recorder is not None and files.record is not None:
            self.recorder.records().save(files.record)
        figures = images.totals([picture.statistics for picture in done])
        seconds = max(sum(figures["seconds"].values()), 1e-9)
        figures |= {
            "batch": self.batch,
            "batch_halved": self.halved,
            "latency": round(done[0].latency, 4),
            "images_per_second": round(len(done) / seconds, 4),
            "tokens_per_second": round(figures["tokens"] / seconds, 2),
        }
        if files.json:
            paths = [str(path) for path in self.paths]
            # a sheet is the file of all images
            places = [None] * len(done) if not paths else paths * (len(done) // len(paths))
            figures |= {
                "tokens_sha256": [picture.tokens_sha256 for picture in done],
                "paths": paths,
                "pictures": [one.as_dict() | {"path": place} for one, place in zip(done, places, strict=True)],
            }
            print(json.dumps(head | figures, allow_nan=False))
        elif stopped is None:
            for path in filter(None, (files.tokens, files.record) if files.has_paths else ()):
                print(str(path))
            kind = f"exact in {figures['promise']}" if figures["exact"] else "relaxed"
            summary = (
                f"{figures['tokens']} tokens in {figures['steps']} steps, "
                f"{figures['tokens_per_step']:.2f} tokens per step{images.cost_of(figures)}, {seconds:.2f} s, "
                f"{figures['images_per_second']:.2f} images and {figures['tokens_per_second']:.0f} tokens per second"
            )
            say(summary, files.quiet, name=f"{self.method.name} ({kind})")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting of a method, which --help leaves to `lantern methods NAME`."""
    hidden: dict[str, Any] = {"dest": "settings", "action": "append", "help": argparse.SUPPRESS}
    for label, flag in SETTINGS.items():
        try:
            parser.add_argument(flag, type=lambda text, label=label: (label, text), **hidden)
        except argparse.ArgumentError:
            names = [name for name, one in METHODS.items() if flag in {option.flag for option in one.options.values()}]
            fault = f"{flag} of method {names[0]} is an option of lantern-generate too"
            raise ValueError(f"{fault}: give the setting another name") from None


COMMAND = command(generate, is_brief=True, more=add_settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on its own."""
    if argv is None and "_ARGCOMPLETE" in os.environ:
        from lantern.cli.main import complete

        complete("lantern-generate")
    return run_command(COMMAND, argv)
