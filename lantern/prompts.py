"""Prompts from files: one a line, or the JSON, JSON-lines and tab-separated forms that prompt sets come in."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lantern.config import one_line

MAX_PROMPT = 2000
MAX_FILE_BYTES = 64 << 20
COLUMNS = ("prompt", "caption", "text")


def check_prompt(prompt: str) -> str:
    """Return the prompt; ValueError if nothing is in it or if it is longer than MAX_PROMPT characters."""
    if not prompt.strip():
        raise ValueError("the prompt is empty, wanted a few words such as 'a red apple'")
    if len(prompt) > MAX_PROMPT:
        raise ValueError(f"the prompt {prompt[:20]!r}... has {len(prompt)} characters, wanted at most {MAX_PROMPT}")
    return prompt


def read_prompts(path: str) -> list[str]:
    """Read a prompt file, or standard input for "-"; blank lines are skipped, every prompt is checked.

    .json holds a list, .jsonl one value a line: texts, or objects with "prompt", "caption" or "text". .tsv has a
    header with such a column. Anything else holds one prompt a line. ValueError names the file and the line.
    """
    name = "standard input" if path == "-" else path
    form = {".json": _from_json, ".jsonl": _from_json_lines, ".tsv": _from_table}.get(Path(path).suffix.lower(), _lines)
    prompts = []
    for place, prompt in form(_read(path, name), name):
        try:
            prompts.append(check_prompt(prompt))
        except ValueError as error:
            raise ValueError(f"{name}, {place}: {error}") from error
    if not prompts:
        raise ValueError(f"{name} holds no prompts, wanted one a line")
    return prompts


def _read(path: str, name: str) -> str:
    try:
        if path == "-":
            raw = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with open(path, "rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read {name}: {error.strerror or error}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"{name} is larger than {MAX_FILE_BYTES >> 20} MiB, too large for prompts")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {one_line(error)}") from error


def _lines(text: str, name: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield f"line {number}", line.strip()


def _from_json(text: str, name: str) -> Iterator[tuple[str, str]]:
    values = _parsed(text, name)
    if not isinstance(values, list):
        raise ValueError(f"{name} holds a JSON {type(values).__name__}, wanted a list of prompts")
    for number, value in enumerate(values, start=1):
        yield f"entry {number}", _prompt_of(value, f"{name}, entry {number}")


def _from_json_lines(text: str, name: str) -> Iterator[tuple[str, str]]:
    for place, line in _lines(text, name):
        yield place, _prompt_of(_parsed(line, f"{name}, {place}"), f"{name}, {place}")


def _from_table(text: str, name: str) -> Iterator[tuple[str, str]]:
    rows = list(_lines(text, name))
    header = [cell.strip().lower() for cell in rows[0][1].split("\t")] if rows else []
    column = next((header.index(known) for known in COLUMNS if known in header), None)
    if column is None:
        raise ValueError(f"{name} has no column {', '.join(COLUMNS)} in its first line")
    for place, line in rows[1:]:
        cells = line.split("\t")
        yield place, cells[column] if column < len(cells) else ""


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON: {one_line(error)}") from error


def _prompt_of(value: Any, place: str) -> str:
    if isinstance(value, dict):
        value = next((value[known] for known in COLUMNS if known in value), None)
    if not isinstance(value, str):
        raise ValueError(f'{place} is no prompt: wanted a text, or an object with "prompt"')
    return value
