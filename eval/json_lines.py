"""Append-only JSON lines: a header with a fingerprint, then one object per line, flushed to disk.

A file has one writer at a time, locked until it is closed. An incomplete last line, left by a kill, is ignored by
readers and removed when the next writer opens the file.
"""

import errno
import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class JsonLines(AbstractContextManager["JsonLines"]):
    """A file of JSON lines, open for appending; a context manager.

    `lines` are those that it had when it was opened. ValueError for a file of another fingerprint. BlockingIOError if
    another process writes the file.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Any]) -> None:
        import fcntl  # not on Windows

        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - open until close()
        try:
            try:  # until the file is closed or the process ends
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                why = "another process is writing it: wait for it, or stop it"
                raise BlockingIOError(error.errno, why, str(path)) from error
            except OSError as error:  # a file system without locks
                raise OSError(error.errno, f"cannot be locked: {error.strerror}", str(path)) from error
            self.lines = read_lines(path, fingerprint)[1]
            self._file.seek(0)
            self._size = self._file.read().rfind(b"\n") + 1  # without an incomplete last line
            self._file.truncate(self._size)
            if not self._size:
                self.append({"fingerprint": fingerprint})
        except BaseException:
            self._file.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, value: Mapping[str, Any]) -> None:
        """Append one line; on OSError the file is unchanged."""
        line = json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            if self._file.write(line) != len(line):  # a nearly full disk accepts a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(self._size)
            raise OSError(error.errno, error.strerror or str(error), str(self.path)) from error
        self._size += len(line)

    def close(self) -> None:
        """Close the file and release the lock."""
        self._file.close()


def read_lines(path: Path, fingerprint: Mapping[str, Any] | None = None) -> tuple[Line, list[Line]]:
    """Return the fingerprint and the lines after it. An incomplete last line is left out.

    ValueError for a damaged line, a file without a fingerprint, and one of another fingerprint, with the difference.
    """
    lines = list[Line]()
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        value = None
        with suppress(ValueError, RecursionError):
            value = json.loads(line)
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {number} is damaged: delete that line")
        lines.append(value)
    if not lines:
        return {}, []
    if joined := [number for number, line in enumerate(lines[1:], start=2) if "fingerprint" in line]:
        raise ValueError(f"{path}, line {joined[0]} begins another file: take the files one by one")
    there = lines[0].get("fingerprint")
    if not isinstance(there, dict):
        raise ValueError(f"{path}, line 1 has no fingerprint: the file is of another kind, choose another one")
    was, now = _flat(there), _flat(there if fingerprint is None else json.loads(json.dumps(fingerprint)))
    if differ := [name for name in was.keys() | now.keys() if was.get(name) != now.get(name)]:
        shown = {name: (_short(was.get(name)), _short(now.get(name))) for name in differ}
        name = min(differ, key=lambda one: (shown[one][0] == shown[one][1], not one.endswith(".name"), one))
        changed = "{} was begun with {} {}, now it is {}".format(path, name, *shown[name])
        raise ValueError(f"{changed}: use another --out or the same settings")
    return there, lines[1:]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def _short(value: Any) -> str:
    return "none" if value is None else str(value)[:40]
