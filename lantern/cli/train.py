"""`lantern train STAGE --config NAME --out DIR`: prepare data and train the parts of a model."""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from lantern.cli.command import DONE, Command, Parser
from lantern.cli.options import existing, flag, integer, real, size_of
from lantern.core.config import read_json_object
from lantern.training.stages import (
    ALL,
    ALL_OPTIONS,
    ALL_SUMMARY,
    CLONE,
    LENGTH,
    OPTIONS,
    STAGES,
    Recipe,
    config_names,
    find_config,
    find_recipe,
    find_recipes,
    find_stage,
    read_config,
)

TYPES = {
    **{"existing path": existing, "path": Path, "count": integer(0, 10**9), "number": real(0.001, 10**6), "text": str},
    "size": size_of,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a parser for each stage, with the options that it takes with one recipe or another."""
    recipes = find_recipes()
    summaries, options = {ALL: ALL_SUMMARY}, dict(OPTIONS)
    takers: dict[str, set[str]] = {ALL: {*ALL_OPTIONS}}
    for stages in (STAGES, *(recipe.stages for recipe in recipes.values())):
        for name, stage in stages.items():
            summaries.setdefault(name, stage.summary)
            takers.setdefault(name, set()).update(stage.options)
    for recipe in recipes.values():
        options |= recipe.options
        takers[ALL] |= set(recipe.options)
    parser.epilog = None if recipes else CLONE
    each = parser.add_subparsers(dest="stage", metavar="STAGE", required=True, parser_class=Parser)
    for name, summary in summaries.items():
        one = each.add_parser(name, help=summary, description=f"Stage {name}: {summary}.", allow_abbrev=False)
        add: Any = one.add_argument
        own = [config for config in config_names() if config.startswith(f"{name}-")]
        add("--recipe", metavar="NAME", help="use a recipe's stages and configs").completer = lambda **_: recipes
        add("--config", help=f"a JSON file, or one of {', '.join(own)}").completer = lambda own=own, **_: own
        add("--out", required=True, type=Path, help="folder to write to; a stopped run is resumed")
        for option in sorted(takers[name]):
            found = options[option]
            how: dict[str, Any] = {"dest": option, "help": found.help}
            if found.kind == "flag":
                add(flag(option), action="store_true", default=None, **how)
            else:
                add(flag(option), type=TYPES[found.kind], metavar=option.upper(), **how)


def run(args: argparse.Namespace) -> int:
    """Check that the options are the stage's own, read its config and call its function."""
    stage, config, out = args.stage, args.config, args.out
    recipe = find_recipe(args.recipe) if args.recipe else _recipe_of(stage, config)
    known = {**OPTIONS, **(recipe.options if recipe else {})}
    given = {name: value for name, value in sorted(vars(args).items()) if name in known and value is not None}
    if stage == ALL:
        from lantern.cli.train_all import run_all
        from lantern.training.loop import check_accelerate

        config = config or (recipe and recipe.name)
        if not config:
            raise ValueError("stage all needs --config: a file, or small (images of one's own), or --recipe NAME")
        path = find_config(config, recipe, stage=ALL)
        check_accelerate()  # before the first step, which prepares data for hours
        return run_all(path, out=out, given=given, run_step=partial(run_stage, recipe=recipe))
    if config is None and (kind := given.get("kind") or (recipe and recipe.name)):
        config = f"{stage}-{kind}"
    if config is None:
        raise ValueError(f"stage {stage} needs --config, one of {', '.join(config_names())} or a file")
    result = run_stage(stage, config, out, given, recipe)
    print(f"{out}: {result}" if result is not None else out)
    return DONE


def run_stage(name: str, config: str, out: Path, given: dict[str, Any], recipe: Recipe | None) -> Any:
    """Run one stage into `out` and return its summary or None.

    ValueError for an option that is not its own, and without one that it needs.
    """
    stage = find_stage(name, recipe)
    for option in given:
        if option not in stage.options:
            takes = ", ".join(map(flag, stage.options)) or "only --config and --out"
            raise ValueError(f"stage {name} takes no {flag(option)}; it takes {takes}")
    for option in stage.required.split():
        if option not in given:
            raise ValueError(f"stage {name} needs {flag(option)}")
    path = find_config(config, recipe, stage=name)
    if stage.is_training:  # nothing is written before its packages are known to be there
        from lantern.training.loop import check_accelerate, keep_freed_memory

        check_accelerate()
        keep_freed_memory()
    function = stage.load()
    loaded = read_config(get_type_hints(function)["config"], path)
    if stage.is_training:
        length = {option: given.pop(option) for option in LENGTH if option in given}
        loaded = replace(loaded, loop=loaded.loop.with_length(**length))
    return function(loaded, out=out, **given)


def _recipe_of(stage: str, config: str | None) -> Recipe | None:
    """Return the recipe that is implied by its config, by the `source` of a data config, or by its own stage."""
    recipes = find_recipes()
    for recipe in recipes.values():
        for name in (config, f"{stage}-{config}") if config is not None else ():
            if (recipe.configs / f"{name}.json").is_file() and Path(name).name == name:
                return recipe
    if stage == "data" and config is not None and Path(config).is_file():
        source = read_json_object(config).get("source")
        if source in recipes:
            return recipes[source]
    return next((recipe for recipe in recipes.values() if stage in recipe.stages and stage not in STAGES), None)


COMMAND = Command(
    "train", "Prepare data, or train a tokenizer, decoder, target, drafter or tree policy, or all.", add_arguments, run
)
