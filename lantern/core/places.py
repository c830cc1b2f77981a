"""Where models lie: the embedded one, folders, and the hub's cache. Needs no torch."""

import os
import re
from pathlib import Path
from typing import Any

from lantern.core.config import hint_for, one_line

CONFIG_NAME = "config.json"
EMBEDDED_MODEL = "lantern-emoji"
HUB_PATTERNS = ("SHA256SUMS", "*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.md")


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
