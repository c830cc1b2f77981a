"""`lantern convert` and `lantern assemble`: from released checkpoints to components, from components to a model folder.

LlamaGen's checkpoints become components of a model folder (`--to hf`: targets in the names that LANTERN released), a
model folder becomes one of another dtype, Janus and Chameleon whole models in transformers' layout, and Chameleon's
`vqgan.ckpt` the VQ decoder of the model folder OUT.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lantern.cli.command import Group, OneOf, arg, command, existing, explained, opt
from lantern.cli.options import DTYPES, Distribution
from lantern.generation.images import MAX_SCALE

if TYPE_CHECKING:
    from lantern.models.folder import Model

OWN_KINDS = ("t2i", "c2i", "vq", "drafter")
RELEASES = ("janus", "chameleon", "vqgan")
KINDS = (*OWN_KINDS, *RELEASES)
WEIGHTS = "model*.safetensors*"
CHECKPOINT_HELP = "a .pt, .bin, .safetensors or .ckpt file, or a folder with configs and weights"
CONFIG_HELP = "a JSON file of config fields that the checkpoint does not determine"
TO_HELP = "names of a target: lantern (LlamaGen's) or hf (LANTERN's, like those of Llama in transformers)"
DATA_HELP = "prepared data, whose words of captions are listed in OUT/words.txt"
NAMES_HELP = (
    "names of what the model generates, one a line, copied to OUT/names.txt: prompts in words that no training caption "
    "has are read as the nearest of them"
)


@command
def convert(
    checkpoint: Path = arg(CHECKPOINT_HELP, type=existing),
    out: Path = arg("folder for config.json and model.safetensors"),
    kind: Any = opt(None, f"expected kind: {', '.join(KINDS)}", type=OneOf(KINDS), metavar="KIND"),
    config: Path | None = opt(None, CONFIG_HELP, type=existing, metavar="FILE"),
    image_size: int | None = opt(None, "side of the image, 16 pixels per token; or --grid", 16, 4096, metavar="PIXELS"),
    grid: int | None = opt(None, "tokens along one side of the image", 1, 256, metavar="TOKENS"),
    ema: bool = opt(False, "use the moving average of the weights if the file has one"),
    dtype: str = opt("keep", "keep, bf16, fp16 or fp32", type=OneOf(("keep", *DTYPES))),
    to: str = opt("lantern", TO_HELP, type=OneOf(("lantern", "hf"))),
    overwrite: bool = opt(False, "replace an existing component in OUT"),
) -> None:
    """Convert a released checkpoint to a component or model folder."""
    if image_size is not None and grid is not None:
        raise ValueError("--image-size is not allowed with --grid: give one of them")
    if (image_size or 0) % 16:
        advice = "wanted a multiple of 16; or give the tokens of a side with --grid"
        raise ValueError(f"--image-size is {image_size}, {advice}")
    from lantern.core.config import read_json_object
    from lantern.core.io import WEIGHTS_NAME, read_header, save_component
    from lantern.models.folder import DTYPES as KINDS_OF_NUMBERS
    from lantern.models.prediction import try_component
    from lantern.models.releases.llamagen import foreign_config, foreign_state, read_checkpoint
    from lantern.models.releases.transformers import add_decoder, convert_release, read_release
    from lantern.models.transformers.loading import shape_of

    stored = KINDS_OF_NUMBERS.get(dtype)  # None for "keep"
    is_vqgan = checkpoint.suffix == ".ckpt"
    is_model = (checkpoint / "transformer" / "config.json").is_file()
    held = "vq_decoder.safetensors" if is_vqgan else "transformer" if is_model else WEIGHTS
    if not overwrite and any(out.glob(held)):
        raise ValueError(f"{out} already holds a component: replace it with --overwrite")
    of_llamagen = config or image_size or grid or ema or to != "lantern"
    if is_model:
        if of_llamagen or kind:
            raise ValueError(f"{checkpoint} is a whole model, of which only --dtype changes: convert a component")
        import torch

        from lantern.generation.pipeline import LanternPipeline

        own = next(iter(read_header(checkpoint / "transformer" / WEIGHTS_NAME).values())).dtype
        own = stored or (own if own.is_floating_point else torch.float32)
        with temporary_until_complete(out) as trial:
            LanternPipeline.from_pretrained(checkpoint, dtype=own).save_pretrained(trial)
        print(f"{out}: model folder")
        return
    release = None if is_vqgan or kind in OWN_KINDS else read_release(checkpoint)
    if is_vqgan or release is not None:
        found_kind = "vqgan" if release is None else release.kind
        if kind not in (None, found_kind):
            raise ValueError(f"{checkpoint} holds a {found_kind} checkpoint, not {kind}")
        if of_llamagen:
            raise ValueError("--config, --image-size, --grid, --ema and --to are for LlamaGen's checkpoints: omit them")
        if release is None:
            numbers = add_decoder(checkpoint, out)
        else:
            with temporary_until_complete(out) as trial:  # only a whole model takes its place
                numbers = convert_release(release, trial, dtype=stored)
                shape_of(trial)
        print(f"{out}: {found_kind}, {numbers:,} values")
        return
    if kind in RELEASES:
        raise ValueError(f"{checkpoint} holds no {kind} checkpoint")
    side = grid or (image_size or 0) // 16
    given = read_json_object(config) if config else None
    found = read_checkpoint(checkpoint, kind=kind, config=given, block_size=side**2 or None, prefers_ema=ema)
    if found.kind == "vq" and side:
        raise ValueError("--image-size and --grid are for targets, this is a vq checkpoint: omit them")
    is_target = found.kind in ("t2i", "c2i")
    if to == "hf" and not is_target:
        raise ValueError(f"--to hf is for targets, this is a {found.kind} checkpoint: omit it")
    part = "transformer" if is_target else "vqvae" if found.kind == "vq" else "drafter"
    if out.name != part and out.name in ("transformer", "vqvae", "drafter"):
        raise ValueError(f"{checkpoint} holds a {found.kind} checkpoint, which is no {out.name}: give a folder {part}")
    with temporary_until_complete(out) as trial:  # only a component that loads and computes takes its place
        save_component(found.state, found.config, trial, dtype=stored)
        try_component(trial, part)
        if to == "hf":
            save_component(foreign_state(found.state), foreign_config(found.config), trial, dtype=stored)
    numbers = sum(tensor.numel() for tensor in found.state.values())
    print(f"{out}: {found.kind}, {len(found.state)} tensors, {numbers:,} values")


@contextmanager
def temporary_until_complete(out: Path) -> Iterator[Path]:
    """Yield a temporary folder, whose files take their place in `out` if the block succeeds.

    Weights that are in `out` under other names are removed then. A ValueError or OSError of the block is raised with
    the path of `out` instead of the temporary one.
    """
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    with TemporaryDirectory(prefix=".convert-", dir=there) as name:
        try:
            yield Path(name)
        except (ValueError, OSError) as error:
            kind = ValueError if isinstance(error, ValueError) else OSError
            raise kind(explained(error).replace(name, str(out))) from error
        out.mkdir(parents=True, exist_ok=True)
        written = sorted(Path(name).iterdir(), key=lambda path: (path.match(WEIGHTS), path.name))
        for path in set(out.glob(WEIGHTS)) - {out / path.name for path in written}:
            path.unlink()
        for path in written:
            if path.is_dir():
                shutil.rmtree(out / path.name, ignore_errors=True)
            path.replace(out / path.name)


class ComponentFolders(Group):
    """Components, copied to OUT/NAME."""

    transformer: Path | None = opt(None, "target", type=existing, metavar="DIR")
    vqvae: Path | None = opt(None, "VQ tokenizer of images", type=existing, metavar="DIR")
    text_encoder: Path | None = opt(None, "T5 encoder", type=existing, metavar="DIR")
    tokenizer: Path | None = opt(None, "tokenizer of the text encoder", type=existing, metavar="DIR")
    drafter: Path | None = opt(None, "EAGLE-1 drafter", type=existing, metavar="DIR")


class DefaultOptions(Distribution):
    """Defaults of the model."""

    method: str | None = opt(None, "how tokens are decoded")
    scale: int | None = opt(None, "enlargement of image files", 1, MAX_SCALE)


@command
def assemble(
    out: Path = arg("the model folder; components that are not given stay as they are"),
    data: Path | None = opt(None, DATA_HELP, type=existing, metavar="DIR"),
    names: Path | None = opt(None, NAMES_HELP, type=existing, metavar="FILE"),
    *,
    components: ComponentFolders,
    defaults: DefaultOptions,
) -> None:
    """Put components together into a model folder."""
    from lantern.core.io import CONFIG_NAME, read_config, write_json
    from lantern.models import folder as model_folder
    from lantern.models.llamagen.text import NAMES_NAME, read_names, write_names, write_words
    from lantern.training.data import Prepared

    # whatever can be refused is refused before anything is written
    folders = {part: path for part, given in vars(components).items() if (path := given or out / part).exists()}
    for path in (path for part, path in folders.items() if part in ("transformer", "vqvae", "drafter")):
        if path.is_file() or "hidden_size" in read_config(path):
            raise ValueError(f"{path} is a released checkpoint, wanted a component: make it with lantern convert")
    generation = (model_folder.read_index(out).get("generation") or {}) | defaults.given()
    model = _tried(folders, out, generation)
    records = None if data is None else Prepared.open(data).records
    listed = None if names is None else read_names(names)
    _copy({out / part: path for part, path in folders.items() if path.resolve() != (out / part).resolve()})
    if records is not None:
        write_words(out, (text for one in records if one.split == "train" for text, _ in one.captions))
    if listed is not None:
        write_names(out / NAMES_NAME, listed)
    model_folder.write_index(out, generation=generation)
    if model.drafter is not None and model.drafter.config.target is None:
        config = read_config(out / "drafter")
        write_json(out / "drafter" / CONFIG_NAME, config | {"target": model.weights_digest})
    parts = [part for part in vars(components) if (out / part).is_dir()]
    print(f"{out}: {', '.join(parts)}; codebook of {model.target.config.vocab_size}, defaults {generation}")


def _tried(folders: Mapping[str, Path], out: Path, generation: Mapping[str, Any]) -> "Model":
    """Return the model of components where they are, before anything is copied.

    ValueError names what does not fit, a bad default of a call, and a trained part that the default method lacks.
    """
    from lantern.methods import find
    from lantern.methods.method import check_parts
    from lantern.models.folder import FOLDER, check_generation, load_model

    check_generation(generation, source="generation")
    with TemporaryDirectory() as temporary:
        linked = Path(temporary, out.resolve().name or "model")
        linked.mkdir()
        for part, folder in {**folders, FOLDER: out / FOLDER}.items():
            (linked / part).symlink_to(folder.resolve())
        try:
            check_parts(find(generation.get("method", "auto")), linked)
            return load_model(linked, device="cpu")
        except ValueError as error:
            text = str(error)
            for part, folder in folders.items():
                text = text.replace(str(linked / part), str(folder))
            raise ValueError(text.replace(str(linked), str(out))) from error


def _copy(sources: Mapping[Path, Path]) -> None:
    """Copy the files of components to new folders, all or, if one cannot be copied, none; other files there stay."""
    from lantern.core.io import SUMS_NAME, atomic_write

    copied = {folder: _wanted(source, has_weights=folder.name != "tokenizer") for folder, source in sources.items()}
    with ExitStack() as stack:  # renames the copies at its end
        for folder, source in sources.items():
            if not copied[folder]:
                raise ValueError(f"{source} is not a component: it holds no files")
            for name in copied[folder]:
                shutil.copyfile(source / name, stack.enter_context(atomic_write(folder / name)))
    for folder, names in copied.items():
        if SUMS_NAME not in names:
            (folder / SUMS_NAME).unlink(missing_ok=True)  # the index is written with checksums of all components


def _wanted(source: Path, *, has_weights: bool) -> list[str]:
    """Return the names of a component's files, of one with weights those in safetensors alone where there are any.

    A tokenizer is often given as the folder of its whole model. Checksums go with all files only.
    """
    from lantern.core.io import SUMS_NAME

    every = sorted(path for path in source.iterdir() if path.is_file())
    others = {".safetensors", ".bin", ".msgpack", ".h5"}
    if has_weights:
        others = others - {".safetensors"} if any(path.suffix == ".safetensors" for path in every) else set()
    files = [path.name for path in every if path.suffix not in others]
    return files if len(files) == len(every) else [name for name in files if name != SUMS_NAME]
