"""Checksums of weight files: written when a component is saved, verified when it is loaded.

A component folder holds `SHA256SUMS` in the format of `sha256sum`, one line a file, so that `sha256sum -c SHA256SUMS`
verifies it as well. Files that are not listed, and folders without the list, load unverified.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

SUMS_NAME = "SHA256SUMS"
MAX_SUMS_BYTES = 1 << 16


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_checksums(folder: str | Path) -> dict[str, str]:
    """Return {file name: SHA-256} as listed in a folder, empty without a list; ValueError for a damaged one."""
    path = Path(folder) / SUMS_NAME
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            lines = file.read(MAX_SUMS_BYTES).decode("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a list of checksums: {error}") from error
    sums = {}
    for line in filter(None, lines):
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or set(digest) - set("0123456789abcdef") or not name:
            raise ValueError(f"{path}: line {line[:40]!r} is no SHA-256 with a file name: copy the folder again")
        sums[name] = digest
    return sums


def format_checksums(sums: dict[str, str]) -> str:
    """Return the text of a `SHA256SUMS` file."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def verify_files(folder: str | Path, names: Iterable[str]) -> None:
    """Compare files of a folder with its list of checksums; ValueError names the first file that differs."""
    folder, sums = Path(folder), read_checksums(folder)
    for name in names:
        if name in sums and (folder / name).is_file() and sha256_of(folder / name) != sums[name]:
            raise ValueError(
                f"{folder / name} is damaged: its SHA-256 is not the one in {SUMS_NAME}; copy it again, or delete "
                f"{SUMS_NAME} if the file was changed on purpose"
            )
