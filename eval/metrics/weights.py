"""Weights of the networks of metrics: from a given file, the cache folder, or the hub. None are shipped."""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lantern.core.config import read_json_object
from lantern.core.io import sha256_of, user_cache


@dataclass(frozen=True)
class WeightsSource:
    """Source of a network's weights: file name, sha256 (or its first digits), and how to get it.

    `file` "" means a folder of transformers. `hub` is a repository, of which `file` or everything is downloaded.
    """

    file: str = ""
    sha256: str = ""
    fetch: str = ""
    hub: str = ""


@dataclass(frozen=True)
class Found:
    """Weights on this machine."""

    path: Path
    sha256: str


@functools.cache
def sources() -> dict[str, WeightsSource]:
    """Return the sources of the weights by network."""
    found = read_json_object(Path(__file__).with_name("weights.json"))
    return {name: WeightsSource(**source) for name, source in found.items()}


def cache_folder() -> Path:
    """Return the default folder of weights: $LANTERN_CACHE, else `lantern` in the user's cache folder."""
    return Path(os.environ.get("LANTERN_CACHE") or user_cache())


def find_weights(name: str, given: Mapping[str, Path] | None = None, *, cache: Path | None = None) -> Found:
    """Return the weights of a network: the given file, else the file in the cache folder, else from the hub.

    Cached and downloaded files must have the known sha256. A given file need not, since figures record its sha256.
    FileNotFoundError names the missing file and its place.
    """
    source, cache = sources()[name], cache or cache_folder()
    if given and name in given:
        path = Path(given[name])
        if not path.exists():
            raise ValueError(f"--weights {name}={path}: no such file; wanted {source.file or 'a folder'}")
        return found_at(path)
    path = at = cache / (source.file or name)
    how, reason = source.fetch.format(folder=at.parent) or f"hub {source.hub}", ""
    if source.hub and not at.exists():
        try:
            path = _from_hub(source)
        except ConnectionError as error:
            reason = f"; {error}"
    if not path.exists():
        what = source.file or "config.json and model.safetensors"
        digest = f" (sha256 {source.sha256}{'...' if len(source.sha256) < 64 else ''})" if source.sha256 else ""
        raise FileNotFoundError(
            f"no weights of {name}: put {what}{digest} into {at.parent if source.file else at}, or give it with "
            f"--weights {name}=PATH; source: {how}{reason}"
        )
    found = found_at(path)
    if not found.sha256.startswith(source.sha256):
        raise ValueError(f"{path} has sha256 {found.sha256}, wanted {source.sha256}: delete it, get it again: {how}")
    return found


def found_at(path: Path) -> Found:
    """Return the weights in a file or a folder of transformers, with their sha256; ValueError for another folder."""
    for one in (path, path / "model.safetensors", path / "pytorch_model.bin"):
        if one.is_file():
            return Found(path, sha256_of(one))
    raise ValueError(f"{path} has neither model.safetensors nor pytorch_model.bin, wanted a folder of transformers")


def _from_hub(source: WeightsSource) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        if source.file:
            return Path(hf_hub_download(source.hub, source.file))
        return Path(snapshot_download(source.hub, allow_patterns=["*.json", "model.safetensors", "pytorch_model.bin"]))
    except (HfHubHTTPError, OSError, RuntimeError) as error:
        raise ConnectionError(f"download from the hub failed ({type(error).__name__})") from error
