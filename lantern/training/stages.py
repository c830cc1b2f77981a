"""Stages of `lantern train`, their options and configs, and recipes that add stages.

A recipe is a folder `recipes/NAME/` beside the package with a `recipe.py` that defines RECIPE. Recipes are part of a
clone of the repository, not of the wheel.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Literal

CONFIGS = Path(__file__).parent / "configs"
RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@dataclass(frozen=True)
class Option:
    """A command-line option of stages: its help and the kind of its value."""

    help: str
    kind: Literal["existing path", "path", "count", "number", "text", "size", "flag"] = "existing path"


@dataclass(frozen=True)
class Stage:
    """One step of training: `function(config, out=, **options)` of `module`; `config_class.load` reads its config.

    summary: what it does, as a line of help.

    With `reports_progress` the function takes `progress`, called with what is done and the total (0 if unknown), and
    returns a summary to print.
    """

    module: str
    function: str
    config_class: str
    summary: str = ""
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    reports_progress: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """Names of all options that the function takes."""
        return (*self.required, *self.optional)


@dataclass(frozen=True)
class Recipe:
    """Stages, options and configs of one model, beside or instead of the general ones."""

    name: str
    stages: Mapping[str, Stage]
    configs: Path
    options: Mapping[str, Option] = field(default_factory=dict)


STAGES = {
    "data": Stage(
        "lantern.training.sources",
        "prepare",
        "DataConfig",
        summary="read a folder or archive of captioned images into prepared data",
        optional=("path",),
        reports_progress=True,
    ),
    "tokenizer": Stage(
        "lantern.training.tokenizer",
        "train",
        "TokenizerConfig",
        summary="train a VQ tokenizer: images to codes and back",
        required=("data",),
        optional=("packages", "init", "steps", "decay", "minutes"),
    ),
    "decoder": Stage(
        "lantern.training.tokenizer",
        "train_decoder",
        "TokenizerConfig",
        summary="train the decoder of a VQ tokenizer on, with its codes unchanged",
        required=("data", "vq"),
        optional=("packages", "steps", "decay", "minutes"),
    ),
    "pack": Stage(
        "lantern.training.pack",
        "pack",
        "TargetConfig",
        summary="write codes and captions to train a target from, without the images",
        required=("data", "vq"),
        optional=("text_encoder", "tokenizer", "init"),
    ),
    "target": Stage(
        "lantern.training.target",
        "train",
        "TargetConfig",
        summary="train a target: captions or classes to codes",
        required=("data", "vq"),
        optional=("text_encoder", "tokenizer", "init", "init_vq", "steps", "decay", "minutes"),
    ),
    "drafter": Stage(
        "lantern.training.drafter",
        "train",
        "DrafterConfig",
        summary="train a drafter for a target",
        required=("data", "target"),
        optional=("text_encoder", "tokenizer", "size", "kind", "init", "vq", "cache", "steps", "decay", "minutes"),
    ),
    "policy": Stage(
        "lantern.training.policy",
        "train",
        "PolicyConfig",
        summary="train a tree policy on recorded drafts",
        required=("records",),
        optional=("kind", "profile", "steps", "decay", "minutes"),
    ),
}
# stage "all" runs the others and is no stage of its own
ALL = "all"
ALL_SUMMARY = "run every stage of a model in order and put the model folder together"
ALL_OPTIONS = ("data", "keep", "minutes", "model", "only", "packages", "path", "steps", "text_encoder", "tokenizer")
OPTIONS = {
    "cache": Option("folder for features of captions and images, which runs may share; default --out", "path"),
    "data": Option("folder written by `lantern train data`"),
    "decay": Option("steps of the final decay of the learning rate", "count"),
    "init": Option("a trained component to start from"),
    "init_vq": Option("folder of the VQ tokenizer of --init, if it is another than --vq"),
    "keep": Option("keep checkpoints and caches of finished steps", "flag"),
    "kind": Option("kind of drafter or policy; without --config, that of drafter-KIND or policy-KIND", "text"),
    "minutes": Option("time to fill with steps after the inputs are prepared, instead of --steps", "number"),
    "model": Option("a model folder whose components are taken; default: the embedded model"),
    "only": Option("run this step alone", "text"),
    "packages": Option("folder of registry packages; a recipe fetches missing ones into it", "path"),
    "path": Option("images to read, instead of the config's path"),
    "profile": Option("output of `lantern tune`: the times of steps"),
    "records": Option("file written by lantern-generate --record, or a folder of such files"),
    "size": Option("width and height in pixels (WxH), for a target of transformers that makes several sizes", "size"),
    "steps": Option("number of steps, instead of the config's", "count"),
    "target": Option("folder of the trained target, or of a model of transformers"),
    "text_encoder": Option("folder of the text encoder"),
    "tokenizer": Option("folder of the text encoder's tokenizer"),
    "vq": Option("folder of the trained VQ tokenizer"),
}


def find_recipes() -> dict[str, Recipe]:
    """Return the recipes of this checkout by name; empty in an installed wheel."""
    return {path.parent.name: find_recipe(path.parent.name) for path in sorted(RECIPES.glob("*/recipe.py"))}


def find_recipe(name: str) -> Recipe:
    """Return a recipe by its name; ValueError if it is not there."""
    if not (RECIPES / name / "recipe.py").is_file():
        known = sorted(path.parent.name for path in RECIPES.glob("*/recipe.py"))
        hint = f"known are {', '.join(known)}" if known else "recipes come with a clone of lantern, not with the wheel"
        raise ValueError(f"recipe {name[:40]!r} is not in {RECIPES}; {hint}")
    if str(RECIPES.parent) not in sys.path:
        sys.path.append(str(RECIPES.parent))
    return import_module(f"recipes.{name}.recipe").RECIPE


def find_config(name: str, recipe: Recipe | None = None, *, stage: str = "") -> Path:
    """Find a config by its path, or by its name, with or without "STAGE-" before it.

    The recipe's configs come first, then the package's and those of all recipes. ValueError for an unknown name.
    """
    places = [*([recipe.configs] if recipe else []), CONFIGS, *(each.configs for each in find_recipes().values())]
    for full in (name, f"{stage}-{name}") if Path(name).name == name else ():
        for place in places:
            if (place / f"{full}.json").is_file():
                return place / f"{full}.json"
    if Path(name).is_file():
        return Path(name)
    known = config_names()
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    if not find_recipes():
        hint = f"configs of recipes such as emoji come with a clone of lantern; {hint}"
    raise ValueError(f"config {name[:80]!r} is neither a file nor the name of one; {hint}")


def config_names() -> list[str]:
    """Return the names of all configs."""
    places = [CONFIGS, *(recipe.configs for recipe in find_recipes().values())]
    return sorted(path.stem for place in places for path in place.glob("*.json"))


def find_stage(name: str, recipe: Recipe | None) -> Stage:
    """Return a stage of the recipe or a general one; ValueError names the nearest."""
    known = dict(STAGES) | dict(recipe.stages if recipe else {})
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        if recipe is None and not find_recipes():
            hint += "; stages of recipes such as emoji come with a clone of lantern"
        raise ValueError(f"stage {name[:40]!r} is not known; {hint}")
    return known[name]
