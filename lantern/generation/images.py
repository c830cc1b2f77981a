"""Finished images and their statistics; pixels as images, enlarged for the eye, on sheets, and as files; their names.

Names are made from a template, are distinct within a run, and never those of a file that exists.

The metadata of a file are the settings of the image and the marks of a generated image: "Source: AI generated" and
IPTC's digital source type. PNG files have them as text chunks, JPEG and WebP files as JSON in EXIF's UserComment; all
formats have the source type as XMP.
"""

import hashlib
import json
import math
import re
import string
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.core.config import check_number, hint_for
from lantern.methods import PROMISES
from lantern.methods.method import Promise

if TYPE_CHECKING:
    from jaxtyping import Int, UInt8
    from PIL.Image import Image
    from torch import Tensor

    from lantern.generation.requests import Request

SUFFIXES = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}
FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
READ_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")  # to read EPS, Pillow would run Ghostscript
MOST_SCANS = 256  # of a JPEG file: one of a few bytes takes milliseconds
MOST_EXIF = 1 << 16  # bytes; Pillow may copy them for each of their entries
RESAMPLINGS = ("lanczos", "nearest")
MAX_SCALE = 16
OTHER_SUFFIXES = (".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".jxl", ".svg", ".pdf", ".txt", ".json", ".zip")
MAX_SLUG, MAX_NAME = 60, 200
# `settings` are those that are not the defaults; `weights` has what is not full, `image` is a number
FIELDS = (
    *("prompt", "method", "settings", "model", "engine", "dtype", "weights"),
    *("guidance", "temperature", "top_k", "top_p", "seed", "image"),
)
TEMPLATE = "{prompt}-{method}-{settings}-{dtype}-{weights}-g{guidance}-seed{seed}-{image}"
SOURCE_TYPE = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
XMP = (
    '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description rdf:about="" xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/"'
    f' Iptc4xmpExt:DigitalSourceType="{SOURCE_TYPE}"/></rdf:RDF></x:xmpmeta><?xpacket end="w"?>'
)
EXIF_SOFTWARE, EXIF_DESCRIPTION, EXIF_IFD, EXIF_COMMENT = 0x0131, 0x010E, 0x8769, 0x9286
ASCII = b"ASCII\0\0\0"  # encoding of an EXIF comment
QUALITY = 90  # default of JPEG and WebP
GAP = 8  # pixels between the images of a sheet
LINES = 2  # most lines of a label
LINE, LETTER = 12, 6  # height of a line and mean width of a letter of a label, in pixels
MAX_SIDE = 16383  # pixels of a side of a sheet: the most that WebP holds


class NotFiniteError(FloatingPointError):
    """A distribution was NaN or infinite. `sound` are the images of the same batch that are not affected."""

    def __init__(self, message: str, sound: "Sequence[Picture]" = ()) -> None:
        super().__init__(message)
        self.sound = list(sound)


def measured(value: float | None) -> float | None:
    """Return a number rounded for a report, or None for NaN and None, which stand for what was not measured."""
    return None if value is None or math.isnan(value) else round(value, 6)


def cost_of(figures: Mapping[str, Any]) -> str:
    """Return what a relaxation cost by the figures of `totals`, after a comma; "" for an exact method."""
    if figures["exact"]:
        return ""
    spent = figures["total_variation"]
    return ", total variation not measured" if spent is None else f", total variation {spent:.3f} per token"


@dataclass(frozen=True)
class Statistics:
    """Statistics of one image.

    `accepted[d]` of `reached[d]` steps accepted a drafted token at depth d + 1. `relaxed` is the share of tokens that
    only a relaxation accepted, `total_variation` what it spent per token, `total_variation_max` the most that it spent
    on one token, each at most 1; both are NaN (null in JSON) if they were not measured. `latent_distance` is the
    probability mass it moved times the L2 distance between the tokens' vectors, per token; None where the model has no
    codebook. `excess` is the mean over tokens of max(total variation - bound, 0) where the rule has a bound, such as
    LANTERN's delta; else None. `seconds` are by phase; each image of a batch has an equal share. `method_reason` is why
    method "auto" chose this method; empty if it was given. `promise` is what the image has in common with plain
    decoding's of the same batch (`lantern.methods.PROMISES`), as far as the engine keeps it. It is None for an
    interrupted image: `tokens` then counts the decoded ones. `tokens` are the generated ones, `steps` the passes but
    those that only read the prompt or tokens kept from the start. `forced` other tokens were kept of an init image;
    those behind a generated one count as accepted drafts.
    """

    method: str
    is_exact: bool
    tokens: int
    steps: int
    accepted: tuple[int, ...]
    reached: tuple[int, ...]
    relaxed: float
    total_variation: float
    total_variation_max: float
    latent_distance: float | None
    seconds: Mapping[str, float]
    method_reason: str = ""
    excess: float | None = None
    promise: Promise | None = "distribution"
    forced: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step of the target."""
        return self.tokens / max(self.steps, 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON values; "forced_tokens" only where there are any.

        Acceptance is None at a depth that no step reached.
        """
        by_depth = zip(self.accepted, self.reached, strict=True)
        return {
            "method": self.method,
            "method_reason": self.method_reason or None,
            "exact": self.is_exact,
            "promise": self.promise,
            "tokens": self.tokens,
            "steps": self.steps,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "accepted_by_depth": [round(yes / all_, 4) if all_ else None for yes, all_ in by_depth],
            "relaxed_share": measured(self.relaxed),
            "total_variation": measured(self.total_variation),
            "total_variation_max": measured(self.total_variation_max),
            "latent_distance": measured(self.latent_distance),
            "total_variation_excess": measured(self.excess),
            "seconds": {phase: round(value, 4) for phase, value in self.seconds.items()},
            **({"forced_tokens": self.forced} if self.forced else {}),
        }


@dataclass(frozen=True)
class Picture:
    """A finished image: its request, tokens in raster order, pixels if they were requested, and statistics.

    `columns` is the number of tokens in a row, `batch` that of images that were made at once.
    """

    request: "Request"
    tokens: "Int[Tensor, ' n']"
    pixels: "UInt8[Tensor, 'h w 3'] | None"
    statistics: Statistics
    columns: int
    batch: int = 1

    @property
    def grid(self) -> list[list[int]]:
        """The tokens as rows."""
        return self.tokens.view(-1, self.columns).tolist()

    @property
    def latency(self) -> float:
        """Seconds from the start of the image's batch to its end."""
        return sum(self.statistics.seconds.values()) * self.batch

    def as_dict(self) -> dict[str, Any]:
        """Return request and statistics as JSON values; "negative_prompt" and "warning" only where there is one."""
        optional = {"negative_prompt": self.request.negative_prompt, "warning": self.request.warning}
        return (
            self.statistics.as_dict()
            | {
                "prompt": self.request.prompt,
                "label": self.request.label,
                "seed": self.request.seed,
                "image": self.request.number,
                "tokens_sha256": self.tokens_sha256,
                "batch": self.batch,
                "latency": round(self.latency, 4),
            }
            | {name: text for name, text in optional.items() if text is not None}
        )

    @property
    def tokens_sha256(self) -> str:
        """SHA-256 of the tokens as little-endian 32-bit integers."""
        return hashlib.sha256(self.tokens.cpu().numpy().astype("<i4").tobytes()).hexdigest()


def totals(done: Sequence[Statistics]) -> dict[str, Any]:
    """Return the statistics of several images of one method together."""
    tokens = sum(one.tokens for one in done)
    promises: list[Promise] = [one.promise for one in done if one.promise is not None]

    def mean(name: str) -> Any:
        """Return the mean over tokens of a field; None where an image lacks it."""
        values = [getattr(one, name) for one in done]
        return None if None in values else sum(v * one.tokens for v, one in zip(values, done, strict=True)) / tokens

    together = Statistics(
        method="",
        is_exact=all(one.is_exact for one in done),
        tokens=tokens,
        steps=sum(one.steps for one in done),
        accepted=tuple(map(sum, zip(*(one.accepted for one in done), strict=True))),
        reached=tuple(map(sum, zip(*(one.reached for one in done), strict=True))),
        **{name: mean(name) for name in ("relaxed", "total_variation", "latent_distance", "excess")},
        total_variation_max=max(one.total_variation_max for one in done),
        seconds={phase: sum(one.seconds[phase] for one in done) for phase in done[0].seconds},
        promise=max(promises, key=lambda one: list(PROMISES).index(one)) if len(promises) == len(done) else None,
        forced=sum(one.forced for one in done),
    )
    return {name: value for name, value in together.as_dict().items() if name not in ("method", "method_reason")}


def to_image(pixels: "UInt8[Tensor, 'h w 3']") -> "Image":
    """Return pixels as a PIL image."""
    from PIL import Image

    return Image.fromarray(pixels.cpu().numpy())


def enlarge(
    pixels: "UInt8[Tensor, '*b h w 3']", scale: int, resample: str = "lanczos"
) -> "UInt8[Tensor, '*b h2 w2 3']":
    """Return pixels `scale` times as wide and high, by Pillow's filter "lanczos" or "nearest"; 1 is the same pixels.

    ValueError for another scale or filter.
    """
    check_scale(scale, resample)
    if scale == 1:
        return pixels
    import numpy as np
    import torch
    from PIL.Image import Resampling

    height, width = pixels.shape[-3:-1]
    size, how = (width * scale, height * scale), Resampling[resample.upper()]
    made = [torch.from_numpy(np.array(to_image(one).resize(size, how))) for one in pixels.reshape(-1, height, width, 3)]
    return torch.stack(made).view(*pixels.shape[:-3], *made[0].shape).to(pixels.device)


def check_scale(scale: Any, resample: str = RESAMPLINGS[0]) -> None:
    """Raise ValueError for a scale that is no whole number from 1 to MAX_SCALE, and for an unknown filter."""
    check_number("scale", scale, 1, MAX_SCALE, kind=int)
    if resample not in RESAMPLINGS:
        raise ValueError(f"resample is {str(resample)[:40]!r}, wanted {' or '.join(RESAMPLINGS)}")


def read_image(file: bytes, formats: tuple[str, ...] = READ_FORMATS, *, most_side: int = 1 << 16) -> "Image":
    """Return the image of a file's bytes, turned as its EXIF says, with at most 8 bits a channel.

    ValueError for other formats, and for more than `most_side` pixels a side, MOST_SCANS, MOST_EXIF or two EXIF
    segments of JPEG; Pillow's errors, of every kind, for damaged files.
    """
    from PIL import Image, ImageOps

    if file.startswith(b"\xff\xd8") and (file.count(b"\xff\xda") > MOST_SCANS or file.count(b"Exif\0\0") > 2):
        raise ValueError(f"it has more than {MOST_SCANS} scans or 2 EXIF segments: save it again")
    try:
        with Image.open(BytesIO(file), formats=formats) as opened:
            if max(opened.size) > most_side:
                raise ValueError(f"it has {opened.width}x{opened.height} pixels, wanted at most {most_side} a side")
            opened.load()  # PNG files may have EXIF behind the pixels
            if any(len(opened.info.get(name, b"")) > MOST_EXIF for name in ("exif", "Raw profile type exif")):
                raise ValueError(f"its EXIF has more than {MOST_EXIF} bytes: save it again")
            return in_8_bits(ImageOps.exif_transpose(opened))
    except Image.UnidentifiedImageError as error:  # whose message has the address of a buffer
        raise ValueError(f"wanted a {', '.join(formats)} file") from error


def in_8_bits(image: "Image") -> "Image":
    """Return an image of at most 8 bits a channel: grey in 16 bits is divided by 256, `Image.convert` would clip it."""
    if not image.mode.startswith("I"):
        return image
    import numpy as np
    from PIL import Image

    return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))


def convert(pixels: "UInt8[Tensor, 'b h w 3']", form: str) -> Any:
    """Return pixels in one of diffusers' forms: "pil", "pt" (b 3 h w, in [0, 1]) or "np" (b h w 3, in [0, 1])."""
    if form == "pil":
        return [to_image(one) for one in pixels]
    unit = pixels.float() / 255
    return unit.cpu().numpy() if form == "np" else unit.permute(0, 3, 1, 2)


def sheet(pictures: Sequence["Image"], *, columns: int, labels: Sequence[str] = (), margin: int = GAP) -> "Image":
    """Return images of one size in rows of `columns` on white, GAP pixels apart and `margin` from the edge.

    With `labels` each image has its label below it, in at most LINES lines.
    """
    from PIL import Image, ImageDraw, ImageFont

    columns, cell = min(columns, len(pictures)), pictures[0].size
    size = sheet_size(cell, len(pictures), columns, has_labels=bool(labels), margin=margin)
    result = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(result), ImageFont.load_default()
    width, height = cell[0] + GAP, cell[1] + GAP + (LINES * LINE if labels else 0)
    for i, picture in enumerate(pictures):
        left, top = margin + (i % columns) * width, margin + (i // columns) * height
        result.paste(picture, (left, top))
        if labels and labels[i]:
            lines = textwrap.wrap(labels[i], max(cell[0] // LETTER, 8), max_lines=LINES, placeholder=" ...")
            for row, line in enumerate(lines):
                draw.text((left, top + cell[1] + 1 + row * LINE), line, fill="black", font=font)
    return result


def sheet_size(
    cell: tuple[int, int], count: int, columns: int, *, has_labels: bool = False, margin: int = GAP
) -> tuple[int, int]:
    """Return width and height in pixels of a sheet of `count` images of (width, height) `cell`.

    ValueError if a side has more than MAX_SIDE pixels.
    """
    columns = min(columns, count)
    rows, text = -(-count // columns), LINES * LINE if has_labels else 0
    width, height = columns * (cell[0] + GAP) - GAP + 2 * margin, rows * (cell[1] + text + GAP) - GAP + 2 * margin
    if max(width, height) > MAX_SIDE:
        raise ValueError(
            f"the sheet would have {width} x {height} pixels, wanted at most {MAX_SIDE} a side: make fewer images, or"
            " give --grid COLUMNS or --scale 1"
        )
    return width, height


def save_image(
    image: "Image", path: str | Path, facts: Mapping[str, Any], *, quality: int = QUALITY, is_new: bool = False
) -> None:
    """Write an image atomically in the format of its suffix, with the metadata of `save_options`.

    `quality` is that of JPEG and WebP, from 1 to 100. OSError names `path`, with `is_new` also where it exists.
    """
    from lantern.core.io import atomic_write

    # not to the file itself, where Pillow's JPEG encoder takes a short write, as of a full disk, for a whole one
    image.save(whole := BytesIO(), **save_options(FORMATS[Path(path).suffix.lower()], facts, quality=quality))
    with atomic_write(path, is_new=is_new) as temporary:
        temporary.write_bytes(whole.getvalue())


def save_options(form: str, facts: Mapping[str, Any], *, quality: int = QUALITY) -> dict[str, Any]:
    """Return the options of Pillow's `save` for a format, with `facts` and the marks of a generated image."""
    from lantern import __version__

    marks = {
        "Software": f"lantern {__version__}",
        "Source": "AI generated",
        "Comment": "AI generated: this image was made by a generative model",
        "DigitalSourceType": SOURCE_TYPE,
    }
    texts = marks | {name: _text(value) for name, value in facts.items() if value is not None}
    options: dict[str, Any] = {"format": form.upper()}
    if form == "png":
        from PIL.PngImagePlugin import PngInfo

        info = PngInfo()
        for name, text in texts.items():
            info.add_text(name, text)
        info.add_itxt("XML:com.adobe.xmp", XMP)
        options["pnginfo"] = info
    else:
        from PIL.Image import Exif

        exif = Exif()
        exif[EXIF_SOFTWARE], exif[EXIF_DESCRIPTION] = texts["Software"], texts["Comment"]
        exif.get_ifd(EXIF_IFD)[EXIF_COMMENT] = ASCII + json.dumps(texts).encode("ascii")
        options |= {"exif": exif, "xmp": XMP.encode(), "quality": quality}
        options |= {"subsampling": 0} if form == "jpeg" else {"method": 6}
    return options


def read_facts(image: "Image") -> dict[str, str]:
    """Return the texts that `save_image` wrote beside the pixels, by name; those of another program, if it has any."""
    import struct

    facts: Any = image.info
    if image.format != "PNG":
        try:
            facts = json.loads(bytes(image.getexif().get_ifd(EXIF_IFD)[EXIF_COMMENT]).removeprefix(ASCII))
        except (KeyError, SyntaxError, TypeError, ValueError, struct.error):  # none, another program's, or broken
            facts = None
    return {str(name): text for name, text in facts.items() if isinstance(text, str)} if isinstance(facts, dict) else {}


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    # a NUL would end the chunk's text; a lone surrogate cannot be encoded
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


@dataclass(frozen=True)
class Destination:
    """Where images are written: `out` is a file, or a folder of files with names of a template.

    suffix: of the files of a folder.
    """

    out: Path
    is_file: bool
    suffix: str = ".png"
    template: str = TEMPLATE

    def paths(self, values: Sequence[Mapping[str, Any]], *, may_exist: bool = False) -> list[Path]:
        """Return distinct paths for images with these values of FIELDS; ValueError if one has no name, or exists.

        `out` itself may exist, with `may_exist` all of them.

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
        there = [path for path in found if not may_exist and path.exists()]
        if there:
            more = f" (and {len(there) - 1} more)" if len(there) > 1 else ""
            instead = "give --overwrite to replace it, --skip-existing to keep it, or another --out or --name"
            raise ValueError(f"{there[0]}{more} exists: {instead}")
        return found


def destination(out: Path | None, *, template: str | None = None, form: str | None = None) -> Destination:
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
        return Destination(place, True, ending)
    template = TEMPLATE if template is None else template
    if "/" in template or "\0" in template:
        raise ValueError(f"--name is {template[:60]!r}, wanted the name of a file: give its folder with --out")
    try:
        fields = [(name, spec or "") for _, name, spec, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"--name is {template[:60]!r}: {error}; fields are written {{prompt}}") from error
    for name, spec in fields:
        if name not in FIELDS:
            raise ValueError(f"--name has the unknown field {{{name[:40]}}}; {hint_for(name, FIELDS)}")
        if re.search(r"\d{4}|[{c]", spec):  # the text could take all memory; c writes a slash as well
            wanted = "wanted a width below 1000, no field within it and no c"
            raise ValueError(f"--name has the field {{{name}:{spec[:40]}}}, {wanted}")
    own = Path(template).suffix.lower()
    if own in FORMATS:
        if form is not None and FORMATS[own] != form:
            raise ValueError(f"--name ends in {own}, --format is {form}: give one of them")
        template, form = template[: -len(own)], FORMATS[own]
    return Destination(place, False, SUFFIXES[form or "png"], template)


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

    Where the text cannot be read back from it, it ends in a digest of the text: texts that differ in more than
    case have different names.
    """
    import unicodedata

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
