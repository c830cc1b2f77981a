"""One run of `lantern-generate`, all of its choices made: draw or compare, save, tell."""

import argparse
import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lantern import __version__
from lantern.catalog import Method
from lantern.cli.command import DONE, explained
from lantern.compare import Comparison, compare
from lantern.generate import generate
from lantern.images import FileNames, save_png, side_by_side, to_image
from lantern.io import atomic_write, weights_digest
from lantern.memory import halving_in_words
from lantern.model_folder import Model
from lantern.picture import Picture
from lantern.progress import Progress
from lantern.records import Recorder
from lantern.requests import Request
from lantern.sampling import Sampling
from lantern.statistics import totals
from lantern.tuning.machine import passes
from lantern.types import Callback, Step


class Job:
    """One run of the command, all of its choices made."""

    def __init__(
        self,
        args: argparse.Namespace,
        model: Model,
        method: Method,
        settings: dict[str, Any],
        sampling: Sampling,
        asked: list[Request],
        out: Path | None,
    ) -> None:
        self.args, self.model, self.method, self.settings = args, model, method, settings
        self.sampling, self.asked = sampling, asked
        self.names = None if out is None else FileNames(out, len(asked))
        self.paths: list[Path] = []
        self.halved: int | None = None
        self.recorder = None if args.record is None else Recorder(**self._about_records())

    def _about_records(self) -> dict[str, Any]:
        sampling = dataclasses.asdict(self.sampling)
        target = weights_digest(self.model.target.state_dict())
        return {"method": self.method.name, "settings": self.settings, "sampling": sampling, "target": target}

    def draw(self) -> int:
        """Make the pictures, save each as it is done, write the codes, print where or how.

        If a signal or a failure comes between, codes and figures are those of the pictures that are done.
        """
        done: list[Picture] = []
        try:
            with self._progress(1) as progress:
                for picture in generate(
                    self.model,
                    self.asked,
                    method=self.method,
                    sampling=self.sampling,
                    batch=self.args.batch,
                    wants_pixels=self.names is not None,
                    callback=self._watching(progress),
                    on_halved=partial(self._halved, progress),
                    debug=self.args.debug,
                    record=self.recorder,
                ):
                    with self.args.stopping.shield():
                        self._save(picture)
                        done.append(picture)
        except (Exception, KeyboardInterrupt) as error:
            if done:
                self._finish(done, error)
            raise
        self._finish(done)
        return DONE

    def compare(self) -> int:
        """Make each picture plain and with the method, print the figures, save the two side by side."""
        told: list[dict[str, Any]] = []
        try:
            with self._progress(2 * self.args.repeats) as progress:
                for comparison in compare(
                    self.model,
                    self.asked,
                    method=self.method,
                    sampling=self.sampling,
                    repeats=self.args.repeats,
                    callback=self._watching(progress),
                ):
                    with self.args.stopping.shield():
                        told.append(self._tell_pair(comparison))
        except (Exception, KeyboardInterrupt) as error:
            if told and self.args.json:
                _print_json(self._head() | self._ending(error) | {"comparisons": told})
            raise
        if self.args.json:
            _print_json(self._head() | self._ending() | {"comparisons": told})
        return DONE

    def _progress(self, runs: int) -> Progress:
        is_quiet = self.args.quiet or self.args.json
        return Progress(runs * len(self.asked), self.model.target.config.block_size, is_quiet=is_quiet)

    def _watching(self, progress: Progress) -> Callback:
        """The callback of a generation: the bar, and an end where a signal asked for it and was not heard."""

        def see(step: Step) -> None:
            self.args.stopping.check()
            progress(step)

        return see

    def _halved(self, progress: Progress, tried: int, fits: int) -> None:
        self.halved = fits
        if not self.args.quiet:
            progress.say(f"lantern: {halving_in_words(tried, fits)}")

    def _save(self, picture: Picture) -> None:
        if self.names is None or picture.pixels is None:
            return
        request = picture.request
        path = self.names.of(request.subject, request.seed, request.number)
        save_png(to_image(picture.pixels), path, self._facts(picture))
        self.paths.append(path)
        if not self.args.json:
            _print(str(path))

    def _tell_pair(self, comparison: Comparison) -> dict[str, Any]:
        """Saves the two side by side and prints their figures."""
        assert self.names is not None
        pair = [picture.pixels for picture in (comparison.plain, comparison.other)]
        request = comparison.plain.request
        path = self.names.of(request.subject, request.seed, request.number)
        row = side_by_side([to_image(pixels) for pixels in pair if pixels is not None])
        save_png(row, path, self._facts(comparison.other) | {"layout": f"left plain, right {self.method.name}"})
        if not self.args.json:
            _print(f"{request.subject}, seed {request.seed}, image {request.number}")
            _print("\n".join([*comparison.lines(), f"  {path}"]))
        return comparison.as_dict() | {"path": str(path)}

    def _facts(self, picture: Picture) -> dict[str, Any]:
        """What a PNG says of itself."""
        request, head = picture.request, self._head()
        return {
            "prompt": None if self.args.no_prompt_in_metadata else request.prompt,
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
        """What holds for all pictures of the run."""
        return {
            "model": self.model.name,
            "method": self.method.name,
            "settings": self.settings,
            "seed": self.args.seed,
            "sampling": dataclasses.asdict(self.sampling),
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "engine": passes(self.model.engine),
            "versions": {"lantern": __version__, "torch": torch.__version__},
        }

    def _ending(self, error: BaseException | None = None) -> dict[str, Any]:
        """What was asked for, and why it ended before that was done."""
        stopped = explained(error) if isinstance(error, Exception) else str(error) if error is not None else None
        return {"asked": len(self.asked), "stopped": stopped}

    def _finish(self, done: list[Picture], error: BaseException | None = None) -> None:
        """Writes the codes and tells the figures; of a run that an error ended, the latter only as JSON."""
        if self.args.tokens is not None:
            _write_tokens(self.args.tokens, done, is_list=len(self.asked) > 1)
        if self.recorder is not None:
            self.recorder.records().save(self.args.record)
        figures = totals([picture.statistics for picture in done])
        seconds = max(sum(figures["seconds"].values()), 1e-9)
        speed = {
            "batch": self.args.batch,
            "batch_halved": self.halved,
            "latency": round(done[0].latency, 4),
            "images_per_second": round(len(done) / seconds, 4),
            "codes_per_second": round(figures["codes"] / seconds, 2),
        }
        if self.args.json:
            paths = [str(path) for path in self.paths]
            pictures = [picture.as_dict() | {"path": paths[i] if paths else None} for i, picture in enumerate(done)]
            digests = [picture.tokens_sha256 for picture in done]
            told = {"tokens_sha256": digests, "paths": paths, "pictures": pictures}
            _print_json(self._head() | self._ending(error) | figures | speed | told)
        elif error is None:
            if self.args.tokens is not None:
                _print(str(self.args.tokens))
            if not self.args.quiet:
                print(self._summary(figures, speed), file=sys.stderr)

    def _summary(self, figures: dict[str, Any], speed: dict[str, Any]) -> str:
        price = "" if figures["exact"] else f"total variation {figures['total_variation']:.3f} a code, "
        return (
            f"{self.method.name} ({'exact' if figures['exact'] else 'relaxed'}): {figures['codes']} codes in "
            f"{figures['passes']} passes, {figures['step_compression']:.2f} codes a pass, {price}"
            f"{sum(figures['seconds'].values()):.2f} s, {speed['images_per_second']:.2f} images and "
            f"{speed['codes_per_second']:.0f} codes a second"
        )


def _write_tokens(path: Path, done: list[Picture], *, is_list: bool) -> None:
    """The grid of one picture as rows of codes, or a list of such grids."""
    grids = [picture.grid for picture in done]
    try:
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(grids if is_list else grids[0]) + "\n", encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _print(text: str) -> None:
    """Print text that may hold what no encoding has: names of files, mostly."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, allow_nan=False), flush=True)
