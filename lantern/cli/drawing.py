"""One run of `lantern-generate`, all of its choices made: draw or compare, save, tell."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from lantern import __version__
from lantern.catalog import Method
from lantern.cli.command import DONE
from lantern.compare import Comparison, compare
from lantern.generate import Picture, generate
from lantern.images import FileNames, save_png, side_by_side, to_image
from lantern.io import atomic_write
from lantern.model_folder import Model
from lantern.progress import Progress
from lantern.requests import Request
from lantern.sampling import Sampling
from lantern.statistics import totals


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

    def draw(self) -> int:
        """Make the pictures, save each as it is done, write the codes, print where or how."""
        done = []
        with self._progress(1) as progress:
            for picture in generate(
                self.model,
                self.asked,
                method=self.method,
                sampling=self.sampling,
                batch=self.args.batch,
                wants_pixels=self.names is not None,
                callback=progress,
            ):
                self._save(picture)
                done.append(picture)
        if self.args.tokens is not None:
            _write_tokens(self.args.tokens, done)
        self._tell(done)
        return DONE

    def compare(self) -> int:
        """Make each picture plain and with the method, print the figures, save the two side by side."""
        told = []
        with self._progress(2 * self.args.repeats) as progress:
            for comparison in compare(
                self.model,
                self.asked,
                method=self.method,
                sampling=self.sampling,
                repeats=self.args.repeats,
                callback=progress,
            ):
                path = self._save_pair(comparison)
                if not self.args.json:
                    request = comparison.plain.request
                    _print(f"{request.subject}, seed {request.seed}, image {request.number}")
                    _print("\n".join([*comparison.lines(), f"  {path}"]))
                told.append(comparison.as_dict() | {"path": str(path)})
        if self.args.json:
            _print_json(self._head() | {"comparisons": told})
        return DONE

    def _progress(self, runs: int) -> Any:
        return Progress(
            runs * len(self.asked) * self.model.target.config.block_size, is_quiet=self.args.quiet or self.args.json
        )

    def _save(self, picture: Picture) -> None:
        if self.names is None or picture.pixels is None:
            return
        request = picture.request
        path = self.names.of(request.subject, request.seed, request.number)
        save_png(to_image(picture.pixels), path, self._facts(picture))
        self.paths.append(path)
        if not self.args.json:
            _print(str(path))

    def _save_pair(self, comparison: Comparison) -> Path:
        assert self.names is not None
        pair = [picture.pixels for picture in (comparison.plain, comparison.other)]
        request = comparison.plain.request
        path = self.names.of(request.subject, request.seed, request.number)
        row = side_by_side([to_image(pixels) for pixels in pair if pixels is not None])
        save_png(row, path, self._facts(comparison.other) | {"layout": f"left plain, right {self.method.name}"})
        return path

    def _facts(self, picture: Picture) -> dict[str, Any]:
        """What a PNG says of itself."""
        request = picture.request
        return {
            "prompt": None if self.args.no_prompt_in_metadata else request.prompt,
            "class": request.label,
            "model": self.model.name,
            "method": self.method.name,
            "settings": self.settings or None,
            "seed": str(request.seed),
            "image": str(request.number),
            "sampling": self._head()["sampling"],
            "versions": self._head()["versions"],
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
            "versions": {"lantern": __version__, "torch": torch.__version__},
        }

    def _tell(self, done: list[Picture]) -> None:
        figures = totals([picture.statistics for picture in done])
        if self.args.json:
            pictures = [
                picture.statistics.as_dict()
                | {
                    "prompt": picture.request.prompt,
                    "label": picture.request.label,
                    "seed": picture.request.seed,
                    "image": picture.request.number,
                    "tokens_sha256": picture.tokens_sha256,
                    "path": str(self.paths[i]) if self.paths else None,
                }
                for i, picture in enumerate(done)
            ]
            digests = [picture.tokens_sha256 for picture in done]
            paths = [str(path) for path in self.paths]
            _print_json(self._head() | figures | {"tokens_sha256": digests, "paths": paths, "pictures": pictures})
            return
        if self.args.tokens is not None:
            _print(str(self.args.tokens))
        if not self.args.quiet:
            price = "" if figures["exact"] else f"total variation {figures['total_variation']:.3f} a code, "
            print(
                f"{self.method.name} ({'exact' if figures['exact'] else 'relaxed'}): {figures['codes']} codes in "
                f"{figures['passes']} passes, {figures['step_compression']:.2f} codes a pass, {price}"
                f"{sum(figures['seconds'].values()):.2f} s",
                file=sys.stderr,
            )


def _write_tokens(path: Path, done: list[Picture]) -> None:
    """The grid of one picture as rows of codes, or a list of such grids."""
    grids = [picture.grid for picture in done]
    try:
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(grids[0] if len(grids) == 1 else grids) + "\n", encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _print(text: str) -> None:
    """Print text that may hold what no encoding has: names of files, mostly."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, allow_nan=False), flush=True)
