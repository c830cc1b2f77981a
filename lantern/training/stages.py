"""Stages of `lantern train`, their options and configs, and recipes that add stages.

A recipe is a folder `recipes/NAME/` beside the package with a `recipe.py` that defines RECIPE. Recipes are part of a
clone of the repository, not of the wheel.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from lantern.cli.command import Group, existing, opt
from lantern.core.config import hint_for, load_config
from lantern.methods.method import resolved

CONFIGS = Path(__file__).parent / "configs"
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
MINUTES_HELP = "time to fill with steps after the inputs are prepared, instead of --steps"
RECORDS_HELP = "file written by lantern-generate --record, or a folder of such files"
SIZE_HELP = "width and height in pixels, for a target of transformers that makes several sizes"
CLONE = "stages and configs of recipes such as emoji come with a clone of lantern, installed with pip install -e"


@dataclass(frozen=True)
class Stage:
    """One step of training: `function` ("module:name") is called with a config, `out` and the options.

    The annotation of the function's `config` is the class that the JSON config is read as. `required` and `optional`
    are names of options, separated by spaces. A training has a config with a `loop`, which the options LENGTH change.
    """

    function: str
    summary: str
    required: str = ""
    optional: str = ""
    is_training: bool = True

    @property
    def options(self) -> list[str]:
        """Names of all options that the stage takes."""
        return [*self.required.split(), *self.optional.split(), *(LENGTH if self.is_training else ())]

    def load(self) -> Any:
        """Import the function."""
        return resolved(self.function)


@dataclass(frozen=True)
class Recipe:
    """Stages, options and configs of one model, beside or instead of the general ones."""

    name: str
    stages: Mapping[str, Stage]
    configs: Path
    options: type[Group] = Group


LENGTH = ("steps", "decay", "minutes")
HOME, TEXT = "lantern.training", "text_encoder tokenizer"
STAGES = {
    "data": Stage(f"{HOME}.data:prepare", "read captioned images into prepared data", "", "path", False),
    "tokenizer": Stage(
        f"{HOME}.tokenizer:train", "train a VQ tokenizer: images to tokens and back", "data", "packages init"
    ),
    "decoder": Stage(
        f"{HOME}.tokenizer:train_decoder", "continue to train the decoder of a VQ tokenizer", "data vq", "packages"
    ),
    "target": Stage(f"{HOME}.target:train", "train a target: captions or classes to tokens", "data vq", f"{TEXT} init"),
    "drafter": Stage(
        f"{HOME}.drafter:train", "train a drafter for a target", "data target", f"{TEXT} size kind init cache"
    ),
    "policy": Stage(f"{HOME}.policy:train", "train a tree policy on recorded drafts", "records", "kind"),
    "tables": Stage(f"{HOME}.tables:make", "count tokens that a model samples", "prompts", "kind model", False),
}
# stage "all" runs the others and is no stage of its own
ALL = "all"
ALL_SUMMARY = "run every stage of a model in order and put the model folder together"
ALL_OPTIONS = f"data keep minutes model only packages path steps {TEXT}".split()


class StageOptions(Group):
    """Options of stages, which those of recipes extend."""

    cache: Path | None = opt(None, "folder for features of captions and images, which runs may share; default --out")
    data: Path | None = opt(None, "folder written by `lantern train data`", type=existing)
    decay: int | None = opt(None, "steps of the final decay of the learning rate", 0, 10**9)
    init: Path | None = opt(None, "a trained component to start from", type=existing)
    keep: bool = opt(False, "keep checkpoints and caches of finished steps")
    kind: str | None = opt(None, "kind of the add-on; without --config, that of STAGE-KIND")
    minutes: float | None = opt(None, MINUTES_HELP, 0.001, 10**6)
    model: Path | None = opt(None, "a model folder; default: the embedded model", type=existing)
    only: str | None = opt(None, "run this step alone")
    packages: Path | None = opt(None, "folder of registry packages; a recipe fetches missing ones into it")
    path: Path | None = opt(None, "images to read, instead of the config's path", type=existing)
    prompts: Path | None = opt(None, "file of prompts, one a line", type=existing)
    records: Path | None = opt(None, RECORDS_HELP, type=existing)
    size: tuple[int, int] | None = opt(None, SIZE_HELP)
    steps: int | None = opt(None, "number of steps, instead of the config's", 0, 10**9)
    target: Path | None = opt(None, "folder of the trained target, or of a model of transformers", type=existing)
    text_encoder: Path | None = opt(None, "folder of the text encoder", type=existing)
    tokenizer: Path | None = opt(None, "folder of the text encoder's tokenizer", type=existing)
    vq: Path | None = opt(None, "folder of the trained VQ tokenizer", type=existing)


def read_config(kind: type, path: Path) -> Any:
    """Read a JSON config; its paths are relative to its own folder. ValueError names the file and the wrong field."""
    config, home, changes = load_config(kind, path), path.resolve().parent, dict[str, Any]()
    for name, value in vars(config).items():
        if isinstance(value, Path):
            changes[name] = home / value
        elif isinstance(value, tuple) and all(isinstance(each, Path) for each in value):
            changes[name] = tuple(home / each for each in value)
    return replace(config, **changes)


def find_recipes() -> dict[str, Recipe]:
    """Return the recipes of this checkout by name; empty in an installed wheel."""
    return {path.parent.name: find_recipe(path.parent.name) for path in sorted(RECIPES.glob("*/recipe.py"))}


def find_recipe(name: str) -> Recipe:
    """Return a recipe by its name; ValueError if it is not there."""
    if name not in (known := sorted(path.parent.name for path in RECIPES.glob("*/recipe.py"))):
        raise ValueError(f"recipe {name[:40]!r} is not in {RECIPES}; {hint_for(name, known) if known else CLONE}")
    if str(RECIPES.parent) not in sys.path:
        sys.path.append(str(RECIPES.parent))
    return import_module(f"recipes.{name}.recipe").RECIPE


def find_config(name: str, recipe: Recipe | None = None, *, stage: str = "") -> Path:
    """Find a config by its path, or by its name, with or without "STAGE-" before it.

    The recipe's configs come first, then the package's and those of all recipes. ValueError for an unknown name.
    """
    recipes = find_recipes()
    places = [*([recipe.configs] if recipe else []), CONFIGS, *(each.configs for each in recipes.values())]
    for full in (name, f"{stage}-{name}") if Path(name).name == name else ():
        for place in places:
            if (place / f"{full}.json").is_file():
                return place / f"{full}.json"
    if Path(name).is_file():
        return Path(name)
    hint = ("" if recipes else f"{CLONE}; ") + hint_for(name, config_names())
    raise ValueError(f"config {name[:80]!r} is neither a file nor the name of one; {hint}")


def config_names() -> list[str]:
    """Return the names of all configs."""
    places = [CONFIGS, *(recipe.configs for recipe in find_recipes().values())]
    return sorted(path.stem for place in places for path in place.glob("*.json"))


def find_stage(name: str, recipe: Recipe | None) -> Stage:
    """Return a stage of the recipe or a general one; ValueError names the nearest."""
    known = STAGES | dict(recipe.stages if recipe else {})
    if name not in known:
        raise ValueError(f"stage {name[:40]!r} is not known; {hint_for(name, known)}; {CLONE}")
    return known[name]
