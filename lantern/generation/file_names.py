"""Names of image files: from a template, distinct within a run, and never of a file that exists."""

import hashlib
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lantern.core.config import hint_for

SUFFIXES = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}
FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
RESAMPLINGS = ("lanczos", "nearest")
MAX_SCALE = 16
OTHER_SUFFIXES = (".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".jxl", ".svg", ".pdf", ".txt", ".json", ".zip")
MAX_SLUG, MAX_NAME = 60, 200
# `settings` are those that are not the defaults; `weights` is empty for the model's own, `image` a number
FIELDS = (
    *("prompt", "method", "settings", "model", "engine", "dtype", "weights"),
    *("guidance", "temperature", "top_k", "top_p", "seed", "image"),
)
TEMPLATE = "{prompt}-{method}-{settings}-{dtype}-{weights}-g{guidance}-seed{seed}-{image}"


@dataclass(frozen=True)
class Destination:
    """Where images are written: `out` is a file, or a folder of files with names of a template.

    suffix: of the files of a folder. overwrites: files that exist are replaced; otherwise only `out` itself is.
    """

    out: Path
    is_file: bool
    suffix: str = ".png"
    template: str = TEMPLATE
    overwrites: bool = False

    def paths(self, values: Sequence[Mapping[str, Any]]) -> list[Path]:
        """Return distinct paths for images with these values of FIELDS; ValueError if one exists or has no name.

        A name does not depend on the other images of the run, except where two names would be equal: the second one
        ends in ".2". With a file as `out`, several images are numbered after it.
        """
        if self.is_file and len(values) == 1:
            return [self.out]
        if self.is_file:
            found = [self.out.with_name(f"{self.out.stem}-{i}{self.out.suffix}") for i in range(len(values))]
        else:
            seen: Counter[str] = Counter()
            found = []
            for each in values:
                name = fill(self.template, each)
                seen[name] += 1
                found.append(self.out / f"{name}{f'.{seen[name]}' if seen[name] > 1 else ''}{self.suffix}")
        there = [path for path in found if not self.overwrites and path.exists()]
        if there:
            more = f" (and {len(there) - 1} more)" if len(there) > 1 else ""
            raise ValueError(f"{there[0]}{more} exists: give --overwrite to replace it, or another --out or --name")
        return found


def destination(
    out: Path | None, *, template: str | None = None, form: str | None = None, overwrites: bool = False
) -> Destination:
    """Return where images go for --out, --name and --format; ValueError if they are invalid or contradict.

    A template may hold FIELDS only, and names no folder.
    """
    place = out if out is not None else Path(".")
    ending = place.suffix.lower()
    is_file = ending in FORMATS and not place.is_dir()
    if str(place) == "-":
        raise ValueError("--out is -, wanted a file or a folder: images are not written to standard output")
    is_other = place.exists() or ending in OTHER_SUFFIXES
    if not is_file and not place.is_dir() and is_other:
        raise ValueError(f"--out is {place}, wanted a folder or a file that ends in {', '.join(FORMATS)}")
    if is_file:
        if template is not None:
            raise ValueError(f"--name names the files of a folder, and --out is the file {place}: give one of them")
        if form is not None and FORMATS[ending] != form:
            raise ValueError(f"--out ends in {ending}, --format is {form}: give one of them")
        return Destination(place, True, ending, overwrites=overwrites)
    template = TEMPLATE if template is None else template
    if "/" in template or "\0" in template:
        raise ValueError(f"--name is {template[:60]!r}, wanted the name of a file: give its folder with --out")
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"--name is {template[:60]!r}: {error}; fields are written {{prompt}}") from error
    for name in fields:
        if name not in FIELDS:
            raise ValueError(f"--name has the unknown field {{{name[:40]}}}; {hint_for(name, FIELDS)}")
    own = Path(template).suffix.lower()
    if own in FORMATS:
        if form is not None and FORMATS[own] != form:
            raise ValueError(f"--name ends in {own}, --format is {form}: give one of them")
        template, form = template[: -len(own)], FORMATS[own]
    return Destination(place, False, SUFFIXES[form or "png"], template, overwrites)


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Return a file name without suffix; an empty field leaves no hyphen. ValueError for an unusable name."""
    try:
        name = re.sub("-{2,}", "-", template.format_map(values)).strip("- ")
    except (ValueError, TypeError) as error:
        raise ValueError(f"--name is {template[:60]!r}: {error}") from error
    if name in ("", ".", "..") or len(name.encode("utf-8", "replace")) > MAX_NAME:
        raise ValueError(f"--name gives the file name {name[:40]!r}, wanted from 1 to {MAX_NAME} bytes")
    return name


def slug(text: str) -> str:
    """Return a short name of lower-case letters, digits and hyphens.

    Where the text cannot be read back from it, it ends in a digest of the text: different texts have different names.
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:MAX_SLUG].rstrip("-")
    if words and words.replace("-", " ") == text.lower():
        return words
    return f"{words or 'picture'}.{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:8]}"


def compact(values: Mapping[str, Any]) -> str:
    """Return settings as a part of a file name, such as "k10-delta0.2"; a digest if they are long."""
    parts = [f"{name.rstrip('_')}{value:g}" if isinstance(value, float) else f"{name.rstrip('_')}{value}"
             for name, value in sorted(values.items())]  # fmt: skip
    text = "-".join(parts)
    plain = re.sub(r"[^A-Za-z0-9.+_-]+", "", text)
    if plain == text and len(text) <= MAX_SLUG:
        return text
    return f"{plain[:MAX_SLUG]}.{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:8]}"
