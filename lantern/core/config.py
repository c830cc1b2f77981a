"""JSON configs and the folders of models: strict, and each fault is one line that names the file and the key.

    config = load_config(LoopConfig, "loop.json")

Types come from the annotations of the dataclass, bounds from its `__post_init__`. Models are the embedded one, folders,
and those in the hub's cache. The environment's one switch, LANTERN_DEBUG, is read here as well. Needs no torch.
"""

import dataclasses
import json
import math
import os
import re
import sys
import types
from collections.abc import Collection, Mapping
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

CONFIG_NAME = "config.json"
EMBEDDED_MODEL = "lantern-emoji"
HUB_PATTERNS = ("SHA256SUMS", "*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.md")
MAX_CONFIG_BYTES = 1 << 20
MAX_INTEGER = 1 << 31
LARGEST = sys.float_info.max  # a whole number beyond it is no float
MAX_NEIGHBOURS = 1024  # columns of a proximity table
MAX_NODES = 999  # drafted nodes of a tree
DEBUG_VARIABLE = "LANTERN_DEBUG"
# torch raises RuntimeError for all of these, so only the text identifies them
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "alloc_failed",
)
Weights = Literal["full", "int8", "int4"]  # how a target's weights are kept (`lantern.core.weights`)
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
KvCache = Literal["full", "fp8"]  # how keys and values are kept (`lantern.decoding.cache`)
KV_CACHES: tuple[KvCache, ...] = get_args(KvCache)

Config = TypeVar("Config")


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, kind: type = float) -> None:
    """Raise ValueError unless a setting is a finite number from `low` to `high`, and a whole one if `kind` is int."""
    is_number = isinstance(value, int | kind) and not isinstance(value, bool)
    if not is_number or not low <= value <= min(high, LARGEST):
        noun, most = "whole number" if kind is int else "number", f"to {high:g}" if high < math.inf else "on"
        raise ValueError(f"{name} is {value!r:.40}, wanted a {noun} from {low:g} {most}")


def check_key(seed: Any, number: Any) -> None:
    """Raise ValueError for a seed or an image number that is no whole number from 0 to 2**63 - 1."""
    for name, value in (("seed", seed), ("image number", number)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
            raise ValueError(f"{name} is {value}, wanted a whole number from 0 to 2**63 - 1")


def check_least(config: Any, **least: float) -> None:
    """Raise ValueError unless these fields of a config are finite numbers of at least the given ones."""
    for name, low in least.items():
        check_number(name, vars(config)[name], low)


def as_number(value: Any) -> Any:
    """Return a number of another kind, such as NumPy's, as Python's int or float; other values as they are."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def load_config(kind: type[Config], path: str | Path) -> Config:
    """Read a JSON file as the config dataclass `kind`; see `build_config` for what ValueError reports."""
    return build_config(kind, read_json_object(path), source=path)


def read_json_object(path: str | Path, *, most: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON object of at most `most` bytes from a regular file; ValueError names the file and the fault."""
    path = Path(path)
    try:
        if path.is_fifo():
            raise ValueError(f"cannot read {path}: it is a pipe, wanted a regular file")
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    if len(raw) > most:
        raise ValueError(f"{path} is larger than {most} bytes, too large for a config")
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, wanted an object")
    return value


def build_config(kind: type[Config], values: Mapping[str, Any], *, source: str | Path, prefix: str = "") -> Config:
    """Build the config dataclass `kind` from JSON values that were read from the file `source`.

    Objects become nested dataclasses where the annotation is one, lists become tuples, texts become paths where the
    annotation is Path. A value that is already an instance of the annotated dataclass is taken as it is. Integers are
    accepted for floats. ValueError names `source` and the key (`loop.steps` for a nested one), and reports an unknown
    key with its nearest valid name, a missing key, a value of the wrong type, an integer beyond MAX_INTEGER, a float
    that is not finite, and what the dataclass itself rejects. `prefix` is the path of the keys, such as "loop.".
    """
    given, missing = build_fields(kind, values, source=source, prefix=prefix), dataclasses.MISSING
    for field in dataclasses.fields(cast(Any, kind)):
        if field.init and field.name not in values and field.default is missing and field.default_factory is missing:
            raise ValueError(f"{source}: key {prefix + field.name!r} is missing")
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        where = f"{source}: {prefix.removesuffix('.')}" if prefix else source
        raise ValueError(f"{where}: {one_line(error)}") from error


def build_fields(kind: type[Any], values: Mapping[str, Any], *, source: str | Path, prefix: str = "") -> dict[str, Any]:
    """Return some fields of the config dataclass `kind` from JSON values, as `build_config` takes and refuses them."""
    known, given = [field.name for field in dataclasses.fields(kind) if field.init], dict[str, Any]()
    hints = get_type_hints(kind)
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"{source}: unknown key {prefix + name!r}; {hint_for(name, known)}")
        try:
            given[name] = _convert(value, hints[name], source, prefix + name)
        except _Misfit:
            wanted = describe_type(hints[name])
            raise ValueError(f"{source}: {prefix}{name} is {str(value)[:60]!r}, wanted {wanted}") from None
    return given


def nearest(name: str, known: Collection[str]) -> str:
    """Return "; did you mean 'x'?" for the known name closest to `name`, or nothing where none is close."""
    import difflib  # for messages only

    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def hint_for(name: str, known: Collection[str], otherwise: str = "") -> str:
    """Return "did you mean 'x'?" as `nearest` does; where no name is close `otherwise`, by default the list of all."""
    return nearest(name, known).removeprefix("; ") or otherwise or f"known are {', '.join(sorted(known))}"


def install_hint(extra: str) -> str:
    """Return how an extra is installed: from a clone, since `lantern` in a package index may be another project."""
    return f'in the clone of lantern run: pip install ".[{extra}]"'


def installed(name: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # few commands need it

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def is_debugging() -> bool:
    """Return whether LANTERN_DEBUG enables debug mode; an empty value and 0 do not."""
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that memory ran out: Python's, a GPU's, or that of torch's CPU allocator.

    On Linux a process that overcommits may be killed instead; then there is no error to catch.
    """
    if isinstance(error, MemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in message for sign in OUT_OF_MEMORY)


def one_line(error: BaseException | str, most: int = 300) -> str:
    """Return an error's message without line breaks, at most so many characters of it."""
    return " ".join(str(error).split())[:most] or type(error).__name__


class _Misfit(Exception):
    """A JSON value of another type than the annotated one."""


def _convert(value: Any, hint: Any, source: str | Path, key: str) -> Any:
    """Return a JSON value as its annotated type, with its lists, objects and paths converted.

    _Misfit for a value of another type; numbers must be finite and within bounds.
    """
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        for option in inner:
            with suppress(_Misfit):
                return _convert(value, option, source, key)
        raise _Misfit
    if kind in (tuple, list) or (hint is Any and isinstance(value, list | tuple)):
        is_fixed = kind is tuple and inner[-1] is not Ellipsis
        if not isinstance(value, list | tuple) or (is_fixed and len(value) != len(inner)):
            raise _Misfit
        options = inner if is_fixed else [inner[0] if inner else Any] * len(value)
        pairs = enumerate(zip(value, options, strict=True))
        return tuple(_convert(item, option, source, f"{key}[{i}]") for i, (item, option) in pairs)
    if isinstance(kind, type) and issubclass(kind, Mapping) and isinstance(value, Mapping):
        return {name: _convert(item, inner[1], source, f"{key}.{name}") for name, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build_config(cast(Any, hint), value, source=source, prefix=f"{key}.")
    if hint is Path and isinstance(value, str):
        return Path(value)
    if kind is Literal:
        fits = any(value == option and type(value) is type(option) for option in inner)
    elif hint is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    elif hint is int:
        fits = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INTEGER
    else:
        wanted: Any = kind or hint
        fits = hint is Any or not isinstance(wanted, type) or isinstance(value, wanted)
    if not fits:
        raise _Misfit
    return value


def describe_type(hint: Any) -> str:
    """Return an annotation as an error message names it, such as "int, or null"."""
    if hint is Any:
        return "any value"
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return ", or ".join(describe_type(option) for option in inner)
    if kind is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if kind is tuple and inner[-1] is not Ellipsis:
        return f"a list of {len(inner)}: {', '.join(map(describe_type, inner))}"
    if kind in (tuple, list):
        return f"a list of {describe_type(inner[0])}"
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return f"an object with values of {describe_type(inner[1])}"
    if dataclasses.is_dataclass(hint):
        return f"an object ({cast(Any, hint).__name__})"
    return {type(None): "null", str: "text", Path: "a path", bool: "true or false"}.get(hint) or hint.__name__


def resolve_model(name: str | Path, **hub: Any) -> Path:
    """Find the folder of a model given by name, folder or hub id.

    "lantern-emoji" is the embedded model; an existing folder is returned as it is; "owner/name" is
    downloaded from the hub into its cache, with the options `hub` of `snapshot_download`. ValueError for
    any other name, TypeError for what is no name, ConnectionError if the download fails.
    """
    if not isinstance(name, str | os.PathLike):
        raise TypeError(f"model is {str(name)[:40]}, wanted a name such as {EMBEDDED_MODEL!r}, a folder or a hub id")
    if str(name) == EMBEDDED_MODEL:
        return embedded_model()
    try:
        if str(name) and Path(name).is_dir():
            return Path(name)
    except OSError as error:
        raise ValueError(f"model {str(name)[:80]!r}: {error.strerror}") from error
    if os.path.isfile(name):
        raise ValueError(f"model {str(name)[:80]!r} is a file, wanted a folder: see lantern convert --help")
    if re.fullmatch(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", str(name)):
        return _download(str(name), hub)
    hint = hint_for(str(name), [EMBEDDED_MODEL])
    raise ValueError(f"model {str(name)[:80]!r} is neither a folder nor a hub id owner/name; {hint}")


def embedded_model() -> Path:
    """Return the folder of the embedded model. ValueError for an installation without it."""
    folder = shipped_folder("assets", EMBEDDED_MODEL)
    if not any(folder.glob(f"*/{CONFIG_NAME}")):
        raise ValueError(f"this installation has no embedded model {EMBEDDED_MODEL!r}; reinstall lantern")
    return folder


def shipped_folder(*parts: str) -> Path:
    """Return a folder that comes with lantern: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package.joinpath(*parts)
    return inside if inside.is_dir() else package.parent.joinpath(*parts)


def _download(repository: str, options: dict[str, Any]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(repository, allow_patterns=list(HUB_PATTERNS), **options))
    except HFValidationError as error:
        raise ValueError(f"model {repository!r}: {one_line(error)}") from error
    except (HfHubHTTPError, OSError) as error:
        why = f"no such folder is here, and {one_line(error)}"
        raise ConnectionError(f"cannot download model {repository!r} from the hub: {why}") from error
