"""A folder with all that training a target needs, small enough to copy to a machine without network and images.

It holds codes instead of images, compressed records, the VQ tokenizer, the text encoder and the config. Features of
captions are not in it, since they are much larger than the text encoder: training computes them once.
"""

import dataclasses
import gzip
import shutil
from dataclasses import dataclass
from pathlib import Path

from lantern.core.io import load_component, write_json
from lantern.models.llamagen.vqvae import VQVAE, VQConfig
from lantern.training.data import PACKED_RECORDS, Prepared, read_records
from lantern.training.features import codes_name, picture_codes
from lantern.training.target import TargetConfig

__all__ = ["PackSummary", "TargetConfig", "pack"]
CONFIG = "target.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "spiece.model")


@dataclass(frozen=True)
class PackSummary:
    """Size of a packed folder in bytes, and the command that trains from it."""

    size: int
    command: str

    def __str__(self) -> str:
        return f"{self.size / 2**20:.1f} MiB; train with\n{self.command}"


def pack(
    config: TargetConfig,
    *,
    out: Path,
    data: Path,
    vq: Path,
    text_encoder: Path | None = None,
    tokenizer: Path | None = None,
    init: Path | None = None,
) -> PackSummary:
    """Write what `lantern train target` needs to `out`, a new or packed folder; images are encoded if they were not.

    ValueError if `out` holds something else, or if a model of captions has no text encoder.
    """
    if out.exists() and any(out.iterdir()) and not (out / CONFIG).is_file():
        raise ValueError(f"{out} exists and is no packed folder: choose another one or remove it")
    if config.model.model_type == "t2i" and text_encoder is None:
        raise ValueError("the target takes captions, got no text encoder: give --text-encoder")
    prepared = Prepared.open(data)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / CONFIG, dataclasses.asdict(config))
    picture_codes(load_component(VQVAE, VQConfig, vq), prepared, vq_folder=vq, cache=out, unify=False)
    if (data / (name := codes_name(vq, prepared))).is_file():  # packed again
        shutil.copyfile(data / name, out / name)
    (out / PACKED_RECORDS).write_bytes(gzip.compress(read_records(data), mtime=0))
    write_json(out / "summary.json", prepared.summary | {"sha256": prepared.digest})
    words = ["lantern train target --config", str(out / CONFIG), "--data", str(out), "--minutes 9 --out run"]
    components = {"vq": vq, "text_encoder": text_encoder, "tokenizer": tokenizer or text_encoder, "init": init}
    for option, folder in components.items():
        if folder is not None:
            copy_component(folder, out / option, only=TOKENIZER_FILES if option == "tokenizer" else ())
            words += [f"--{option.replace('_', '-')}", str(out / option)]
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return PackSummary(size, " ".join(words))


def copy_component(source: Path, folder: Path, *, only: tuple[str, ...] = ()) -> None:
    """Copy the files of a component, or those named in `only`."""
    folder.mkdir(exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and (not only or path.name in only):
            shutil.copyfile(path, folder / path.name)
