"""`lantern assemble OUT`: puts components into a model folder, with a proximity table and the defaults of a call."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lantern.cli.command import DONE, Command, existing, flag, integer, real
from lantern.generation.file_names import MAX_SCALE

if TYPE_CHECKING:
    from torch import nn

PARTS = ("transformer", "vqvae", "text_encoder", "tokenizer", "drafter")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="the model folder; components that are not given stay as they are")
    for part in PARTS:
        add(flag(part), type=existing, metavar="DIR", help=f"copied to OUT/{part}")
    add(
        "--data",
        type=existing,
        metavar="DIR",
        help="prepared data, whose words of captions are listed in OUT/words.txt",
    )
    add(
        "--names",
        type=existing,
        metavar="FILE",
        help="names of what the model generates, one a line, copied to OUT/names.txt: prompts in words that no "
        "training caption has are read as the nearest of them",
    )
    add("--neighbours", type=integer(1, 1024), default=100, metavar="K", help="columns of the proximity table (100)")
    add("--method", help="default method of the model")
    add("--guidance", type=real(0, 1000), help="default guidance")
    add("--temperature", type=real(0, 100), help="default temperature")
    add("--top-k", type=integer(0, 10**6), help="default top-k")
    add("--top-p", type=real(0, 1), help="default top-p")
    add("--scale", type=integer(1, MAX_SCALE), metavar="N", help="default enlargement of image files")


def run(args: argparse.Namespace) -> int:
    """Try the components where they are, copy, write table and index, load the model, sign the drafter."""
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

    folders = {part: getattr(args, part) or args.out / part for part in PARTS}
    try_components({part: folder for part, folder in folders.items() if folder.exists()}, name=args.out.name)
    pair = [getattr(args, part) or args.out / part for part in ("transformer", "drafter")]
    _check_pair(*pair, name=args.out.name)
    for part in PARTS:
        given = getattr(args, part)
        if given is not None and given.resolve() != (args.out / part).resolve():
            _copy(given, args.out / part, skips_weights=part == "tokenizer")
    _write_table(args.out, args.neighbours)
    if args.data is not None:
        from lantern.training.data import Prepared

        records = [record for record in Prepared.open(args.data).records if record.split == "train"]
        write_words(args.out, (text for record in records for text, _ in record.captions))
    if args.names is not None:
        write_names(args.out / NAMES_NAME, read_names(args.names))
    names = ("method", "guidance", "temperature", "top_k", "top_p", "scale")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    write_index(args.out, generation={**(read_index(args.out).get("generation") or {}), **given})
    model = load_model(args.out, device="cpu")
    if model.drafter is not None:
        _sign(args.out / "drafter", model.target)
    parts = [part for part in PARTS if (args.out / part).is_dir()]
    print(f"{args.out}: {', '.join(parts)}; codebook of {model.target.config.vocab_size}, defaults {model.generation}")
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


COMMAND = Command("assemble", "Put components together into a model folder.", add_arguments, run)
