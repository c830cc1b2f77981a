"""`lantern train all`: every stage of a model in one command, each with its share of the time, and the model folder.

The config lists the steps. A finished step is noted in OUT/state.json and not repeated, an interrupted one resumes.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lantern.cli.command import DONE, parser_of
from lantern.cli.options import flag
from lantern.core.config import load_config, read_json_object
from lantern.core.io import write_json

STATE = "state.json"
OPTION = "@"  # prefix of the name of a command-line option


@dataclass(frozen=True)
class Step:
    """One stage to run into OUT/NAME.

    `config` is the name of a config, or a path relative to the file that lists the steps. `share` is its part of the
    time, 0 for a step that takes as long as it takes. `options` maps options of the stage to folders relative to OUT,
    or "@NAME" or "@NAME/FOLDER" for the value of an option of the command line or a folder in it; "@model" is the
    embedded model unless --model is given. A step with `only_with` is left out if this option is not given.
    """

    name: str
    stage: str
    config: str
    share: float = 0.0
    only_with: str = ""
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AllConfig:
    """The steps, the components and add-ons of the model folder, and its default options of generation.

    ValueError without steps.
    """

    steps: tuple[Step, ...]
    components: dict[str, str]
    addons: dict[str, str] = field(default_factory=dict)
    generation: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("steps is empty, wanted a list of steps")


@dataclass(frozen=True)
class State:
    """What `state.json` holds: the seconds of finished steps and the minutes that steps were given, by name."""

    done: dict[str, float] = field(default_factory=dict)
    minutes: dict[str, float] = field(default_factory=dict)


@dataclass
class Build:
    """A model in the making: OUT, the values of command-line options, the steps to run with them, and what is done."""

    config: AllConfig
    home: Path
    out: Path
    inputs: Mapping[str, Any]
    run_step: Callable[[str, str, Path, dict[str, Any]], None]  # stage, config, out, options

    def __post_init__(self) -> None:
        path = self.out / STATE
        self.state = load_config(State, path) if path.exists() else State()
        self.steps = [step for step in self.config.steps if not step.only_with or self.inputs.get(step.only_with)]

    def value(self, text: str) -> Path:
        """Return the path that an option or a component names; ValueError if its option is not given."""
        if not text.startswith(OPTION):
            return self.out / text
        name, _, folder = text.removeprefix(OPTION).partition("/")
        if self.inputs.get(name) is None:
            raise ValueError(f"stage all needs {flag(name)} with this config")
        return Path(self.inputs[name]) / folder

    def run(self, step: Step) -> None:
        """Run a step with its share of the time, and note it as done."""
        done, minutes = self.state.done, self.state.minutes
        options: dict[str, Any] = {name: self.value(text) for name, text in step.options.items()}
        if step.share and self.inputs.get("steps") is not None:
            options["steps"] = self.inputs["steps"]
        elif step.share and self.inputs.get("minutes") is not None:
            left = max(0.05, self.inputs["minutes"] - sum(done.values()) / 60)
            shares = sum(each.share for each in self.steps if each.name not in done)
            options["minutes"] = minutes.setdefault(step.name, left * step.share / shares)
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.out / STATE, asdict(self.state))
        print(f"step {step.name}" + (f", {options['minutes']:.1f} minutes" if "minutes" in options else ""))
        beside, began = self.home / step.config, time.monotonic()
        self.run_step(step.stage, str(beside) if beside.is_file() else step.config, self.out / step.name, options)
        done[step.name] = round(time.monotonic() - began, 1)
        write_json(self.out / STATE, asdict(self.state))
        if not self.inputs.get("keep"):
            (self.out / step.name / "checkpoint.pt").unlink(missing_ok=True)


def assemble(build: Build) -> Path:
    """Put the components into OUT/model with a short card; return the folder."""
    from lantern.cli.assemble import COMMAND

    model, config = build.out / "model", build.config
    given = {name: str(build.value(text)) for name, text in config.components.items()} | config.generation
    arguments = [str(model), *(word for name, text in given.items() for word in (flag(name), text))]
    COMMAND.run(parser_of(COMMAND, "assemble").parse_args(arguments))
    for name, text in config.addons.items():
        shutil.copytree(build.value(text), model / "parts" / name, dirs_exist_ok=True)
    (model / "README.md").write_text(card(build), encoding="utf-8")
    return model


def card(build: Build) -> str:
    """Return the model card: what was trained, for how long, on what."""
    lines = [f"# {build.out.name}", "", "Trained with `lantern train all`.", ""]
    lines += ["| step | steps | minutes |", "|---|---|---|"]
    for step in build.steps:
        path = build.out / step.name / "training.json"
        steps = read_json_object(path)["loop"]["steps"] if path.exists() else "-"
        lines.append(f"| {step.name} | {steps} | {build.state.done[step.name] / 60:.1f} |")
    for summary in sorted(build.out.glob("*/summary.json")):
        found = read_json_object(summary)
        size = found["size"]
        lines += ["", f"Data: {found['records']} images of {size} x {size} pixels from source {found['source']}."]
    return "\n".join(lines) + "\n"


def run_all(
    path: Path, *, out: Path, given: Mapping[str, Any], run_step: Callable[[str, str, Path, dict[str, Any]], None]
) -> int:
    """Run the steps of a config into `out` and assemble the model if all are done."""
    from lantern.core.places import embedded_model

    embedded = embedded_model()
    inputs: dict[str, Any] = {"model": embedded, **given}
    if "text_encoder" in given:
        inputs.setdefault("tokenizer", given["text_encoder"])
    else:  # that of the embedded model, which knows everyday words
        inputs |= {"text_encoder": embedded / "text_encoder", "tokenizer": embedded / "tokenizer"}
    config = load_config(AllConfig, path)
    build = Build(config, path.parent, out, inputs, run_step)
    only, names = inputs.get("only"), [step.name for step in build.steps]
    if only not in (None, *names):
        raise ValueError(f"step is {only[:40]!r}, wanted one of {', '.join(names)}")
    for step in build.steps:
        if step.name not in build.state.done and only in (None, step.name):
            build.run(step)
    left = [step.name for step in build.steps if step.name not in build.state.done]
    if left:
        print(f"{out}: {', '.join(left)} to do")
        return DONE
    model = assemble(build)
    if not inputs.get("keep"):
        for cache in [*out.glob("*/pictures.npy"), *out.glob("*/features-*")]:
            shutil.rmtree(cache) if cache.is_dir() else cache.unlink()
    what = '--prompt "..."' if "text_encoder" in config.components else "--class-label 0"
    print(f"{model}: try lantern-generate --model {model} {what}")
    return DONE
