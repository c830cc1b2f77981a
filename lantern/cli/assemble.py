"""`lantern assemble OUT`: puts components into a model folder, with a proximity table and the defaults of a call."""

from pathlib import Path
from typing import TYPE_CHECKING

from lantern.cli.command import DONE
from lantern.cli.options import arg, command, existing, opt, options
from lantern.generation.file_names import MAX_SCALE

if TYPE_CHECKING:
    from torch import nn

PARTS = ("transformer", "vqvae", "text_encoder", "tokenizer", "drafter")
OUT_HELP = "the model folder; components that are not given stay as they are"
DATA_HELP = "prepared data, whose words of captions are listed in OUT/words.txt"
NAMES_HELP = (
    "names of what the model generates, one a line, copied to OUT/names.txt: prompts in words that no training caption "
    "has are read as the nearest of them"
)


@options
class Components:
    """Components, copied to OUT/NAME."""

    transformer: Path | None = opt(None, "target", parse=existing, metavar="DIR")
    vqvae: Path | None = opt(None, "VQ tokenizer of images", parse=existing, metavar="DIR")
    text_encoder: Path | None = opt(None, "T5 encoder", parse=existing, metavar="DIR")
    tokenizer: Path | None = opt(None, "tokenizer of the text encoder", parse=existing, metavar="DIR")
    drafter: Path | None = opt(None, "EAGLE-1 drafter", parse=existing, metavar="DIR")


@options
class Defaults:
    """Defaults of the model."""

    method: str | None = opt(None, "method")
    guidance: float | None = opt(None, "guidance", 0, 1000)
    temperature: float | None = opt(None, "temperature", 0, 100)
    top_k: int | None = opt(None, "top-k", 0, 10**6)
    top_p: float | None = opt(None, "top-p", 0, 1)
    scale: int | None = opt(None, "enlargement of image files", 1, MAX_SCALE)


def assemble(
    out: Path = arg(OUT_HELP),
    data: Path | None = opt(None, DATA_HELP, parse=existing, metavar="DIR"),
    names: Path | None = opt(None, NAMES_HELP, parse=existing, metavar="FILE"),
    neighbours: int = opt(100, "columns of the proximity table", 1, 1024, metavar="K"),
    *,
    components: Components,
    defaults: Defaults,
) -> int:
    """Put components together into a model folder."""
    from lantern.models.folder import (
        NAMES_NAME,
        load_model,
        read_index,
        read_names,
        write_index,
        write_names,
        write_words,
    )
    from lantern.models.trial import try_components

    # components are tried where they are, before anything is copied
    folders = {part: getattr(components, part) or out / part for part in PARTS}
    try_components({part: folder for part, folder in folders.items() if folder.exists()}, name=out.name)
    _check_pair(folders["transformer"], folders["drafter"], name=out.name)
    for part, folder in folders.items():
        if folder.resolve() != (out / part).resolve():
            _copy(folder, out / part, skips_weights=part == "tokenizer")
    _write_table(out, neighbours)
    if data is not None:
        from lantern.training.data import Prepared

        records = [record for record in Prepared.open(data).records if record.split == "train"]
        write_words(out, (text for record in records for text, _ in record.captions))
    if names is not None:
        write_names(out / NAMES_NAME, read_names(names))
    given = {name: value for name, value in vars(defaults).items() if value is not None}
    write_index(out, generation={**(read_index(out).get("generation") or {}), **given})
    model = load_model(out, device="cpu")
    if model.drafter is not None:
        _sign(out / "drafter", model.target)
    parts = [part for part in PARTS if (out / part).is_dir()]
    print(f"{out}: {', '.join(parts)}; codebook of {model.target.config.vocab_size}, defaults {model.generation}")
    return DONE


def _copy(source: Path, folder: Path, *, skips_weights: bool) -> None:
    """Copy the files of a component, each atomically, with checksums of the copies; other files of the folder stay.

    A tokenizer is often given as the folder of its whole model, whose weights it does not need.
    """
    import shutil

    from lantern.core.io import SUMS_NAME, atomic_write, save_checksums

    files = [path for path in sorted(source.iterdir()) if path.is_file()]
    if skips_weights:
        files = [path for path in files if path.suffix not in (".safetensors", ".bin", ".msgpack", ".h5")]
    if not files:
        raise ValueError(f"{source} is not a component: it holds no files")
    for path in files:
        with atomic_write(folder / path.name) as temporary:
            shutil.copyfile(path, temporary)
    if SUMS_NAME not in {path.name for path in files}:
        (folder / SUMS_NAME).unlink(missing_ok=True)
        save_checksums(folder)


def _write_table(folder: Path, columns: int) -> None:
    from lantern.core.io import load_component
    from lantern.models.folder import NEIGHBOURS_NAME
    from lantern.models.llamagen.vqvae import VQVAE, VQConfig
    from lantern.verifiers.relaxations.neighbours import proximity_table, save_table

    if (folder / "vqvae").is_dir():
        tokens = load_component(VQVAE, VQConfig, folder / "vqvae").quantize.tokens().detach()
        save_table(proximity_table(tokens, min(columns, len(tokens) - 1)), folder / "vqvae" / NEIGHBOURS_NAME)


def _check_pair(transformer: Path, drafter: Path, name: str) -> None:
    """Raise ValueError for a drafter of another target."""
    from lantern.core.io import load_component, weights_digest
    from lantern.models.folder import check_drafter
    from lantern.models.llamagen.transformer import Transformer, TransformerConfig

    if transformer.is_dir() and drafter.is_dir():
        target = load_component(Transformer, TransformerConfig, transformer)
        check_drafter(drafter, target.config, weights_digest(target.state_dict()), model_name=name)


def _sign(folder: Path, target: "nn.Module") -> None:
    """Write the digest of the target's weights into a drafter's config, if it has none."""
    from lantern.core.io import CONFIG_NAME, read_config, weights_digest, write_json

    config = read_config(folder)
    if config.get("target") is None:
        write_json(folder / CONFIG_NAME, config | {"target": weights_digest(target.state_dict())})


COMMAND = command(assemble)
