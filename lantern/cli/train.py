"""`lantern train STAGE --config NAME --out DIR`: prepare data and train the parts of a model.

Stage "all" runs every stage of a model, each with its share of the time, and puts the model folder together. Its config
lists the steps. A finished step is noted in OUT/state.json and not repeated, an interrupted one resumes.
"""

import argparse
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from lantern.cli.command import Command, Parser, add_option, flag, parser_of
from lantern.core.config import load_config, read_json_object
from lantern.core.process import launched
from lantern.training import stages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a parser for each stage, with the options that it takes with one recipe or another."""
    recipes = stages.find_recipes()
    summaries, options = {stages.ALL: stages.ALL_SUMMARY}, stages.StageOptions.declared()
    takers: dict[str, set[str]] = {stages.ALL: {*stages.ALL_OPTIONS}}
    for known in (stages.STAGES, *(recipe.stages for recipe in recipes.values())):
        for name, stage in known.items():
            summaries.setdefault(name, stage.summary)
            takers.setdefault(name, set()).update(stage.options)
    for recipe in recipes.values():
        options |= recipe.options.declared()
        takers[stages.ALL] |= set(recipe.options.OPTIONS)
    parser.epilog = None if recipes else stages.CLONE
    each = parser.add_subparsers(dest="stage", metavar="STAGE", required=True, parser_class=Parser)
    for name, summary in summaries.items():
        one = each.add_parser(name, help=summary, description=f"Stage {name}: {summary}.", allow_abbrev=False)
        add: Any = one.add_argument
        own = [config for config in stages.config_names() if config.startswith(f"{name}-")]
        add("--recipe", metavar="NAME", help="use a recipe's stages and configs").completer = lambda **_: recipes
        add("--config", help=f"a JSON file, or one of {', '.join(own)}").completer = lambda own=own, **_: own
        add("--out", required=True, type=Path, help="folder to write to; a stopped run is resumed")
        add("--debug", action="store_true", help="print tracebacks")
        kinds = [config.removeprefix(f"{name}-") for config in own]
        for option in sorted(takers[name]):
            kind, declared = options[option]
            how = {"names": kinds} if option == "kind" else {}
            add_option(one, option, kind, replace(declared, how=declared.how | how))


def run(args: argparse.Namespace) -> None:
    """Check that the options are the stage's own, read its config and call its function."""
    stage, config, out = args.stage, args.config, args.out
    recipe = stages.find_recipe(args.recipe) if args.recipe else _recipe_of(stage, config)
    if launched()[1] > 1 and (stage == stages.ALL or not stages.find_stage(stage, recipe).is_training):
        raise ValueError(f"stage {stage} runs in one process, got {launched()[1]}: start it without torchrun")
    known = {*stages.StageOptions.OPTIONS, *(recipe.options.OPTIONS if recipe else ())}
    stated = {name: value for name, value in sorted(vars(args).items()) if name in known}
    given = {name: value for name, value in stated.items() if value is not None and value is not False}
    if stage == stages.ALL:
        config = config or (recipe and recipe.name)
        if not config:
            raise ValueError("stage all needs --config: a file, or small (images of one's own), or --recipe NAME")
        path = stages.find_config(config, recipe, stage=stages.ALL)
        import accelerate  # noqa: F401 (before the first step, which prepares data for hours)

        run_all(path, out, given, recipe)
        return
    if config is None and (kind := given.get("kind") or (recipe and recipe.name)):
        config = f"{stage}-{kind}"
    if config is None:
        own = [name for name in stages.config_names() if name.startswith(f"{stage}-")]
        raise ValueError(f"stage {stage} needs --config, one of {', '.join(own) or 'none'} or a file")
    result = run_stage(stage, config, out, given, recipe)
    if launched()[0] == 0:
        print(f"{out}: {result}" if result is not None else out)


def run_stage(name: str, config: str, out: Path, given: dict[str, Any], recipe: stages.Recipe | None) -> Any:
    """Run one stage into `out` and return its summary or None.

    ValueError for an option that is not its own, and without one that it needs.
    """
    stage = stages.find_stage(name, recipe)
    for option in given:
        if option not in stage.options:
            takes = ", ".join(map(flag, stage.options)) or "only --config and --out"
            raise ValueError(f"stage {name} takes no {flag(option)}; it takes {takes}")
    for option in stage.required.split():
        if option not in given:
            raise ValueError(f"stage {name} needs {flag(option)}")
    path = stages.find_config(config, recipe, stage=name)
    if stage.is_training:  # nothing is written before its packages are known to be there
        import accelerate  # noqa: F401

        from lantern.training.loop import keep_freed_memory

        keep_freed_memory()
    function = stage.load()
    loaded = stages.read_config(get_type_hints(function)["config"], path)
    if (kind := given.pop("kind", None)) not in (None, vars(loaded).get("kind")):
        raise ValueError(f"{path.name} is a config of kind {loaded.kind}, got --kind {kind}: give one of that kind")
    if stage.is_training:
        length = {option: given.pop(option) for option in stages.LENGTH if option in given}
        loaded = replace(loaded, loop=loaded.loop.with_length(**length))
    return function(loaded, out=out, **given)


def _recipe_of(stage: str, config: str | None) -> stages.Recipe | None:
    """Return the recipe that is implied by its config, by the `source` of a data config, or by its own stage."""
    recipes = stages.find_recipes()
    for recipe in recipes.values():
        for name in (config, f"{stage}-{config}") if config is not None else ():
            if (recipe.configs / f"{name}.json").is_file() and Path(name).name == name:
                return recipe
    if stage == "data" and config is not None and Path(config).is_file():
        source = read_json_object(config).get("source")
        if source in recipes:
            return recipes[source]
    return next((recipe for recipe in recipes.values() if stage in recipe.stages and stage not in stages.STAGES), None)


@dataclass(frozen=True)
class BuildStep:
    """One stage to run into OUT/NAME.

    `config` is the name of a config, or a path relative to the file that lists the steps. `share` is its part of the
    time, 0 for a step that takes as long as it takes. `options` maps options of the stage to folders relative to OUT,
    or "@NAME" or "@NAME/FOLDER" for the value of an option of the command line or a folder in it; "@model" is the
    embedded model unless --model is given.
    """

    name: str
    stage: str
    config: str
    share: float = 0.0
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AllConfig:
    """The steps, the components and add-ons of the model folder, and its default options of generation.

    ValueError without steps.
    """

    steps: tuple[BuildStep, ...]
    components: dict[str, str]
    addons: dict[str, str] = field(default_factory=dict)
    generation: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("steps is empty, wanted a list of steps")


@dataclass(frozen=True)
class BuildState:
    """What `state.json` holds, by name: seconds of finished steps, minutes given to steps, and paths of inputs."""

    done: dict[str, float] = field(default_factory=dict)
    minutes: dict[str, float] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)


@dataclass
class Build:
    """A model in the making: OUT, the values of command-line options, the steps to run with them, and what is done."""

    config: AllConfig
    home: Path
    out: Path
    inputs: Mapping[str, Any]
    recipe: stages.Recipe | None = None

    def __post_init__(self) -> None:
        self.path = self.out / "state.json"
        self.state = load_config(BuildState, self.path) if self.path.exists() else BuildState()

    def value(self, text: str) -> Path:
        """Return the path that an option or a component names; ValueError if its option is not given."""
        if not text.startswith("@"):
            return self.out / text
        name, _, folder = text.removeprefix("@").partition("/")
        if self.inputs.get(name) is None:
            raise ValueError(f"stage all needs {flag(name)} with this config")
        return Path(self.inputs[name]) / folder

    def run(self, step: BuildStep) -> None:
        """Run a step with its share of the time, and note it as done."""
        from lantern.core.io import write_json

        done, minutes = self.state.done, self.state.minutes
        options: dict[str, Any] = {name: self.value(text) for name, text in step.options.items()}
        if step.share and self.inputs.get("steps") is not None:
            options["steps"] = self.inputs["steps"]
        elif step.share and self.inputs.get("minutes") is not None:
            left = max(0.05, self.inputs["minutes"] - sum(done.values()) / 60)
            shares = sum(each.share for each in self.config.steps if each.name not in done)
            options["minutes"] = minutes.setdefault(step.name, left * step.share / shares)
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.path, asdict(self.state))
        print(f"step {step.name}" + (f", {options['minutes']:.1f} minutes" if "minutes" in options else ""))
        beside, began = self.home / step.config, time.monotonic()
        config = str(beside) if beside.is_file() else step.config
        if (result := run_stage(step.stage, config, self.out / step.name, options, self.recipe)) is not None:
            print(result)
        done[step.name] = round(time.monotonic() - began, 1)
        write_json(self.path, asdict(self.state))
        if not self.inputs.get("keep"):
            (self.out / step.name / "checkpoint.pt").unlink(missing_ok=True)


def card(build: Build) -> str:
    """Return the model card: what was trained, for how long, on what."""
    lines = [f"# {build.out.name}", "", "Trained with `lantern train all`.", ""]
    lines += ["| step | steps | minutes |", "|---|---|---|"]
    for step in build.config.steps:
        path = build.out / step.name / "training.json"
        steps = read_json_object(path)["loop"]["steps"] if path.exists() else "-"
        lines.append(f"| {step.name} | {steps} | {build.state.done[step.name] / 60:.1f} |")
    for summary in sorted(build.out.glob("*/summary.json")):
        found = read_json_object(summary)
        size = found["size"]
        lines += ["", f"Data: {found['records']} images of {size} x {size} pixels from source {found['source']}."]
    return "\n".join(lines) + "\n"


def run_all(path: Path, out: Path, given: Mapping[str, Any], recipe: stages.Recipe | None) -> None:
    """Run the steps of a config into `out`; if all are done, put OUT/model together, with a short card."""
    from lantern.cli import folders
    from lantern.core.config import embedded_model

    if "steps" in given and "minutes" in given:
        raise ValueError("got --steps and --minutes: give one of them")
    embedded = embedded_model()
    inputs: dict[str, Any] = {"model": embedded, **given}
    if "text_encoder" in given:
        inputs.setdefault("tokenizer", given["text_encoder"])
    else:  # that of the embedded model, which knows everyday words
        inputs |= {"text_encoder": embedded / "text_encoder", "tokenizer": embedded / "tokenizer"}
    config = load_config(AllConfig, path)
    build = Build(config, path.parent, out, inputs, recipe)
    only, names = inputs.get("only"), [step.name for step in config.steps]
    if only not in (None, *names):
        raise ValueError(f"step is {only[:40]!r}, wanted one of {', '.join(names)}")
    known = build.state.inputs
    options = (text for step in config.steps for text in step.options.values())
    used = {text.partition("/")[0] for text in (*options, *config.components.values(), *config.addons.values())}
    for name, value in given.items():
        if isinstance(value, Path) and f"@{name}" not in used:
            raise ValueError(f"{path} does not use {flag(name)}: leave it out")
        if isinstance(value, Path) and known.setdefault(name, str(value.resolve())) != str(value.resolve()):
            raise ValueError(f"{out} was begun with {flag(name)} {known[name]}, got {value}: use another --out")
    for step in (each for each in config.steps if only in (None, each.name)):
        if step.name in build.state.done:
            print(f"step {step.name} was done before")
        else:
            build.run(step)
    if left := [name for name in names if name not in build.state.done]:
        print(f"{out}: {', '.join(left)} to do")
        return
    model = out / "model"
    parts = {name: str(build.value(text)) for name, text in config.components.items()} | config.generation
    arguments = [str(model), *(word for name, text in parts.items() for word in (flag(name), text))]
    for name, text in config.addons.items():
        shutil.copytree(build.value(text), model / "parts" / name, dirs_exist_ok=True)
    folders.assemble.run(parser_of(folders.assemble, "assemble").parse_args(arguments))
    (model / "README.md").write_text(card(build), encoding="utf-8")
    if not inputs.get("keep"):
        for cache in [*out.glob("*/pictures.npy"), *out.glob("*/features-*")]:
            shutil.rmtree(cache) if cache.is_dir() else cache.unlink()
    what = '--prompt "..."' if "text_encoder" in config.components else "--class-label 0"
    print(f"{model}: try lantern-generate --model {model} {what}")


SUMMARY = "Prepare data, or train a text encoder, tokenizer, decoder, target, drafter or tree policy, or all."
COMMAND = Command("train", SUMMARY, add_arguments, run)
