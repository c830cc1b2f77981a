"""`lantern methods`: all methods, or the settings and needs of one."""

from collections.abc import Sequence
from json import dumps
from pathlib import Path
from shlex import quote
from typing import Any

from lantern.cli.command import arg, command, opt
from lantern.cli.options import METHOD, MODEL
from lantern.core.config import read_json_object, resolve_model
from lantern.engines.engine import ENGINES
from lantern.methods import METHODS, PROMISES, Method
from lantern.methods.method import ADD_ONS

LACKS = "*"  # before a method that needs a part


@command
def methods(
    name: str | None = arg("method to describe", type=METHOD),
    model: str = MODEL,
    json: bool = opt(False, "print JSON"),
) -> None:
    """List all methods, or the settings of one."""
    folder = resolve_model(model)
    if name is not None:
        found = description(METHODS[name], model, folder)
        print(dumps(found) if json else "\n".join(lines(found)))
    else:
        every = [row(method, folder) for method in METHODS.values()]
        print(dumps(every) if json else "\n".join(table(every, model)))


def row(method: Method, folder: Path) -> dict[str, Any]:
    """Return the row of a method in the table; `lacks` are the trained networks that the model's folder lacks."""
    return {
        "name": method.name,
        "family": method.made.family,
        "promise": method.promise,
        "summary": method.summary,
        "lacks": [one for one in method.made.needs if not (folder / ADD_ONS[one].folder / "config.json").is_file()],
    }


def table(rows: Sequence[dict[str, Any]], model: str) -> list[str]:
    """Return the lines of the table of methods, and what the promises mean."""
    head = {"name": "METHOD", "family": "FAMILY", "promise": "PROMISE", "summary": "SUMMARY", "lacks": []}
    every = [one | {"name": f"{LACKS if one['lacks'] else ' '}{one['name']}"} for one in (head, *rows)]
    widths = {key: max(len(one[key]) for one in every) for key in ("name", "family", "promise")}
    found = ["  ".join([*(one[key].ljust(width) for key, width in widths.items()), one["summary"]]) for one in every]
    meanings = [f"{key}: {meaning}." for key, meaning in PROMISES.items()]
    if any(one["lacks"] for one in rows):
        source = f"lantern methods NAME --model {model} has the command."
        meanings.append(f"{LACKS}: needs a trained part that {model} lacks; {source}")
    return [*found, "", *meanings, "", "lantern methods NAME lists the settings of a method."]


def description(method: Method, model: str, folder: Path) -> dict[str, Any]:
    """Return what a method is made of and takes, and whether a model has the add-ons that it needs."""
    made, found, here, engine = method.made, row(method, folder), method.settings, ""
    if any(option.fits for option in method.options.values()):  # which the default engine chooses
        from lantern.generation.choice import suited
        from lantern.models.folder import load_model

        loaded = load_model(model, parts=())
        here, engine = suited(loaded, method).settings, loaded.engine.name
    shown = ("name", "flag", "default", "low", "high", "range", "help")
    settings = [
        {name: getattr(option, name) for name in shown}
        | {"type": type(option.default).__name__, "here": here[option.name], "choices": list(option.choices)}
        for option in method.options.values()
    ]
    target = folder / "transformer" / "config.json"
    is_classes = target.is_file() and read_json_object(target).get("model_type") == "c2i"

    def command_of(need: str) -> str:
        if is_classes and ADD_ONS[need].training == "drafter":
            return "drafters are trained for targets that take captions, not classes"
        return ADD_ONS[need].command.replace("MODEL", quote(str(folder)))

    needs = [
        {"name": need, "folder": ADD_ONS[need].folder, "present": need not in found["lacks"]}
        | {"command": command_of(need)}
        for need in made.needs
    ]
    return found | {
        "drafter": made.drafter and str(made.drafter),
        "verifier": made.verifier and str(made.verifier),
        "engines": [name for name in ENGINES if name != "auto" and not (name == "graph" and made.needs_host)],
        "paper": f"https://arxiv.org/abs/{method.paper}" if method.paper else None,
        "page": f"docs/methods.md#{method.page}" if method.page else None,
        "model": model,
        "engine": engine,
        "add_ons": needs,
        "settings": settings,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Return the description of a method in lines of text."""
    facts = {name: found[name] for name in ("family", "promise", "drafter", "verifier", "engines", "paper", "page")}
    facts["promise"] += f": {PROMISES[found['promise']]}"
    facts["engines"] = ", ".join(found["engines"])
    text = [f"{found['name']}: {found['summary']}", ""]
    text += [f"  {name:<9} {fact}" for name, fact in facts.items() if fact]
    for need in found["add_ons"]:
        state = f"{found['model']} has it" if need["present"] else f"{found['model']} lacks it; {need['command']}"
        text.append(f"  needs     {need['folder']}: {state}")
    if found["settings"]:
        width = max(len(one["flag"]) for one in found["settings"])
        text += ["", "Settings:"]
    for one in found["settings"]:
        default, range_ = str(one["here"]), one["range"]
        if one["here"] != one["default"]:
            range_ += f"; chosen for the {found['engine']} engine of this machine, elsewhere {one['default']}"
        text.append(f"  {one['flag']:<{width}}  {one['type']:<5}  {default:<12}  {one['help']}; {range_}")
    return text
