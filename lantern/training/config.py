"""Configs of trainings: JSON files with deprecated keys, and command-line overrides."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from lantern.core.config import build_config, read_json_object

Config = TypeVar("Config")


def load_training_config(kind: type[Config], path: Path, *, old_names: Mapping[str, str] | None = None) -> Config:
    """Read a JSON config; ValueError as from `build_config`.

    Deprecated keys, which `old_names` gives with their present names, are accepted with a line on stderr.
    """
    values = read_json_object(path)
    for old, new in (old_names or {}).items():
        if old in values:
            if new in values:
                raise ValueError(f"{path}: {old!r} is the old name of {new!r}: remove {old!r}")
            print(f"{path}: key {old!r} is deprecated, use {new!r}", file=sys.stderr)
            values = {new if key == old else key: value for key, value in values.items()}
    return build_config(kind, values, source=path)


def with_overrides(config: Config, **changes: object) -> Config:
    """Return a config with the given fields changed; None leaves a field as it is."""
    return dataclasses.replace(config, **{k: v for k, v in changes.items() if v is not None})  # type: ignore[type-var]
