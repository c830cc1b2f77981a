"""`lantern train [--recipe NAME] STAGE --config NAME --out DIR`: prepare data and train the parts of a model."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from lantern.cli.command import DONE, Command, Names, existing, flag, integer, real, size_of
from lantern.core.config import read_json_object
from lantern.training.stages import (
    ALL,
    ALL_OPTIONS,
    ALL_SUMMARY,
    OPTIONS,
    STAGES,
    Option,
    Recipe,
    Stage,
    config_names,
    find_config,
    find_recipe,
    find_recipes,
    find_stage,
)

TYPES = {
    **{"existing path": existing, "path": Path, "count": integer(0, 10**9), "number": real(0, 10**6), "text": str},
    "size": size_of,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of all stages; `run` checks which of them a stage takes."""
    add = parser.add_argument
    recipes, takers = find_recipes(), _takers()
    summaries = {ALL: ALL_SUMMARY} | {name: stage.summary for name, stage in _every_stage().items()}
    width = max(map(len, summaries))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    lines = [f"  {name:<{width}}  {summary}" for name, summary in summaries.items()]
    parser.epilog = "\n".join(["stages:", *lines, "", "lantern train STAGE --help lists the options of a stage."])
    stages, configs = Names(tuple(takers), is_strict=False), Names(tuple(config_names()), is_strict=False)
    add("stage", metavar="STAGE", type=stages, help=f"one of {', '.join(takers)}")
    add(
        "--recipe",
        metavar="NAME",
        type=Names(tuple(recipes), is_strict=False),
        help=f"use a recipe's stages and configs: {', '.join(recipes) or 'recipes come with a clone of lantern'}",
    )
    add("--config", type=configs, help=f"a JSON file, or one of {', '.join(configs.names)}")
    add("--out", required=True, type=Path, help="folder to write to; a stopped run is resumed")
    for name, option in sorted(_every_option().items()):
        help = f"{option.help} ({', '.join(stage for stage, names in takers.items() if name in names)})"
        if option.kind == "flag":
            add(flag(name), action="store_true", default=None, help=help)
        else:
            add(flag(name), metavar=name.upper(), type=TYPES[option.kind], help=help)


def add_late(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Leave only the options of the stage that `argv` names in the help; `run` refuses the others by name."""
    stage, takers = _stage_in(parser, argv), _takers()
    if stage not in takers:
        return
    options, found = _every_option(), _every_stage().get(stage)
    parser.prog += f" {stage}"
    parser.description = f"Stage {stage}: {found.summary if found else ALL_SUMMARY}."
    parser.epilog = None
    own = [name for name in config_names() if name.startswith(f"{stage}-")]
    for action in parser._actions:
        if action.dest == "stage" or (action.dest in options and action.dest not in takers[stage]):
            action.help = argparse.SUPPRESS
        elif action.dest in options:
            required = found is not None and action.dest in found.required
            action.help = options[action.dest].help + ("; required" if required else "")
        elif action.dest == "config":
            action.help = f"a JSON file, or one of {', '.join(own)}"
            action.type = Names(tuple(own), is_strict=False)


def _stage_in(parser: argparse.ArgumentParser, argv: Sequence[str]) -> str | None:
    """Return the first argument that is neither an option nor the value of one."""
    words = iter(argv)
    for word in words:
        option = parser._option_string_actions.get(word)
        if option is not None and option.nargs != 0:
            next(words, None)
        elif not word.startswith("-"):
            return word
    return None


def _every_stage() -> dict[str, Stage]:
    """Return the stages by name: a recipe's own, and the general ones."""
    return {name: stage for recipe in find_recipes().values() for name, stage in recipe.stages.items()} | STAGES


def _every_option() -> dict[str, Option]:
    """Return the options of all stages, recipes included."""
    return dict(OPTIONS) | {name: one for recipe in find_recipes().values() for name, one in recipe.options.items()}


def _takers() -> dict[str, tuple[str, ...]]:
    """Return the options that each stage takes, with this or that recipe."""
    takers = {name: stage.options for name, stage in STAGES.items()} | {ALL: ALL_OPTIONS}
    for recipe in find_recipes().values():
        takers |= {name: (*stage.options, *takers.get(name, ())) for name, stage in recipe.stages.items()}
    return takers


def run(args: argparse.Namespace) -> int:
    """Check that the options are the stage's own, read its config and call its function.

    ValueError for `--minutes 0`.
    """
    recipe = find_recipe(args.recipe) if args.recipe else _recipe_of(args.stage, args.config)
    known = {**OPTIONS, **(recipe.options if recipe else {})}
    given = {name: getattr(args, name) for name in sorted(vars(args)) if name in known}
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("minutes") == 0:
        raise ValueError("--minutes is 0, wanted a number above 0, or --steps, or neither")
    if args.stage == ALL:
        _check_options(ALL, given, (*ALL_OPTIONS, *(recipe.options if recipe else ())), ())
        return _run_all(args.config or (recipe.name if recipe else ""), args.out, given, recipe)
    stage = find_stage(args.stage, recipe)
    _check_options(args.stage, given, stage.options, stage.required)
    result = run_stage(args.stage, _config_of(args, recipe), args.out, given, recipe)
    print(f"{args.out}: {result}" if result is not None else args.out)
    return DONE


def run_stage(name: str, config_name: str, out: Path, options: dict[str, Any], recipe: Recipe | None) -> Any:
    """Run one stage into `out` and return its summary or None."""
    stage = find_stage(name, recipe)
    path = find_config(config_name, recipe, stage=name)
    if not stage.reports_progress:  # a training; nothing is written before its packages are known to be there
        from lantern.training.allocator import keep_freed_memory
        from lantern.training.loop import check_accelerate

        check_accelerate()
        keep_freed_memory()
    module = import_module(stage.module)
    config = getattr(module, stage.config_class).load(path)
    with _bar(name) if stage.reports_progress else nullcontext({}) as progress:
        return getattr(module, stage.function)(config, out=out, **options, **progress)


def _run_all(config: str, out: Path, given: dict[str, Any], recipe: Recipe | None) -> int:
    from lantern.cli.train_all import run_all

    def run_step(stage: str, name: str, folder: Path, options: dict[str, Any]) -> None:
        for option in find_stage(stage, recipe).required:
            if option not in options:
                raise ValueError(f"stage {stage} needs {flag(option)}: add it to the options of the step in {path}")
        run_stage(stage, name, folder, options, recipe)

    if not config:
        raise ValueError("stage all needs --config: a file, or small (images of one's own), or --recipe NAME")
    path = find_config(config, recipe, stage=ALL)
    from lantern.training.loop import check_accelerate

    check_accelerate()  # before the first step, which prepares data for hours
    return run_all(path, out=out, given=given, run_step=run_step)


def _check_options(stage: str, given: dict[str, Any], options: Sequence[str], required: Sequence[str]) -> None:
    for name in given:
        if name not in options:
            takes = ", ".join(map(flag, options)) or "only --config and --out"
            raise ValueError(f"stage {stage} takes no {flag(name)}; it takes {takes}")
    for name in required:
        if name not in given:
            raise ValueError(f"stage {stage} needs {flag(name)}: {_every_option()[name].help}")


@contextmanager
def _bar(name: str) -> Iterator[dict[str, Any]]:
    """Provide the keyword `progress`, shown as a bar with an ETA if stderr is a terminal."""
    from tqdm import tqdm

    with tqdm(desc=name, disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total or None
            bar.update(done - bar.n)

        yield {"progress": show}


def _recipe_of(stage: str, config: str | None) -> Recipe | None:
    """Return the recipe that is implied by its config, by the `source` of a data config, or by its own stage."""
    recipes = find_recipes()
    for recipe in recipes.values():
        for name in (config, f"{stage}-{config}") if config is not None else ():
            if (recipe.configs / f"{name}.json").is_file() and Path(name).name == name:
                return recipe
    if stage == "data" and config is not None and Path(config).is_file():
        try:
            source = read_json_object(config).get("source")
        except ValueError:
            source = None  # the error is reported when the config is loaded
        if source in recipes:
            return recipes[source]
    return next((recipe for recipe in recipes.values() if stage in recipe.stages and stage not in STAGES), None)


def _config_of(args: argparse.Namespace, recipe: Recipe | None) -> str:
    if args.config is not None:
        return args.config
    if vars(args).get("kind") is not None:
        return f"{args.stage}-{args.kind}"
    if recipe is not None:
        return f"{args.stage}-{recipe.name}"
    raise ValueError(f"stage {args.stage} needs --config, one of {', '.join(config_names())} or a file")


COMMAND = Command(
    "train",
    "Prepare data, or train a tokenizer, decoder, target, drafter or tree policy, all of them, or a recipe.",
    add_arguments,
    run,
    add_late=add_late,
)
