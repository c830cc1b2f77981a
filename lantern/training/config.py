"""Configs of trainings: JSON files with deprecated keys."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

from lantern.core.config import build_config, read_json_object


class TrainingConfig:
    """What all configs of trainings have. `OLD_NAMES` gives deprecated keys with their present names."""

    OLD_NAMES: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a JSON config; ValueError names the file and the wrong field, unknown ones with the nearest name.

        Deprecated keys are accepted with a line on stderr.
        """
        values = read_json_object(path)
        for old, new in cls.OLD_NAMES.items():
            if old in values:
                if new in values:
                    raise ValueError(f"{path}: {old!r} is the old name of {new!r}: remove {old!r}")
                print(f"{path}: key {old!r} is deprecated, use {new!r}", file=sys.stderr)
                values = {new if key == old else key: value for key, value in values.items()}
        return build_config(cls, values, source=path)
