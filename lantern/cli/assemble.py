"""`lantern assemble OUT`: puts components into a model folder, with the defaults of a call."""

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lantern.cli.command import Group, arg, command, existing, opt
from lantern.cli.options import Distribution
from lantern.generation.images import MAX_SCALE

if TYPE_CHECKING:
    from lantern.models.folder import Model

OUT_HELP = "the model folder; components that are not given stay as they are"
DATA_HELP = "prepared data, whose words of captions are listed in OUT/words.txt"
NAMES_HELP = (
    "names of what the model generates, one a line, copied to OUT/names.txt: prompts in words that no training caption "
    "has are read as the nearest of them"
)


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


def assemble(
    out: Path = arg(OUT_HELP),
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
    """Copy the files of components to new folders, all or, if one cannot be copied, none; other files there stay.

    A tokenizer is often given as the folder of its whole model, whose weights it does not need.
    """
    from lantern.core.io import SUMS_NAME, atomic_write

    with ExitStack() as stack:  # renames the copies at its end
        for folder, source in sources.items():
            files = [path for path in sorted(source.iterdir()) if path.is_file()]
            if folder.name == "tokenizer":
                files = [path for path in files if path.suffix not in (".safetensors", ".bin", ".msgpack", ".h5")]
            if not files:
                raise ValueError(f"{source} is not a component: it holds no files")
            for path in files:
                shutil.copyfile(path, stack.enter_context(atomic_write(folder / path.name)))
    for folder, source in sources.items():
        if not (source / SUMS_NAME).is_file():
            (folder / SUMS_NAME).unlink(missing_ok=True)  # the index is written with checksums of all components


COMMAND = command(assemble)
