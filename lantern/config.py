"""From a JSON file to a config dataclass, strictly: every fault is one line that names file and key."""

import dataclasses
import difflib
import json
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

MAX_CONFIG_BYTES = 1 << 20
MAX_INTEGER = 1 << 31

Config = TypeVar("Config")


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Read a JSON object of at most MAX_CONFIG_BYTES; ValueError names the file and the fault."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise ValueError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes, too large for a config")
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, wanted an object")
    return value


def build_config(kind: type[Config], values: Mapping[str, Any], *, source: str | Path) -> Config:
    """Build the config dataclass `kind` from JSON values read from the file `source`.

    Lists become tuples. ValueError names an unknown key with its nearest valid one, a missing key, a
    value of the wrong type, a number beyond MAX_INTEGER or not finite, and whatever the dataclass
    itself objects to.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    for name, value in values.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(fields))}"
            raise ValueError(f"{source}: unknown key {name!r}; {hint}")
        if not _fits(value, hints[name]):
            wanted = getattr(hints[name], "__name__", None) if isinstance(hints[name], type) else hints[name]
            raise ValueError(f"{source}: {name} is {str(value)[:60]!r}, wanted {wanted}")
    missing = dataclasses.MISSING
    for name, field in fields.items():
        if name not in values and field.default is missing and field.default_factory is missing:
            raise ValueError(f"{source}: key {name!r} is missing")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {one_line(error)}") from error


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value may stand in a field annotated `hint`; numbers must be finite and sane."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return any(_fits(value, option) for option in inner)
    if kind is Literal:
        return value in inner
    if kind in (tuple, list):
        return isinstance(value, list | tuple) and all(_fits(item, inner[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INTEGER
    return isinstance(value, kind or hint) if isinstance(kind or hint, type) else True


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks, at most 300 characters of it."""
    return " ".join(str(error).split())[:300] or type(error).__name__
