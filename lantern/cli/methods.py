"""`lantern methods`: all methods, or the settings and needs of one."""

import argparse
import json
from pathlib import Path
from typing import Any

from lantern.cli.command import DONE, Command, add_model, one_of
from lantern.drafters.parts import ADD_ONS, AddOn
from lantern.engines.engine import ENGINES
from lantern.methods import METHODS, PROMISES, Method


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("name", nargs="?", type=one_of(list(METHODS)), metavar="NAME", help="method to describe")
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table, or the description of one method."""
    if args.name is None:
        every = [row(method) for method in METHODS.values()]
        print(json.dumps(every) if args.json else "\n".join(table(every)))
        return DONE
    found = description(METHODS[args.name], args.model)
    print(json.dumps(found) if args.json else "\n".join(lines(found)))
    return DONE


def row(method: Method) -> dict[str, Any]:
    """Return the row of a method in the table."""
    return {
        "name": method.name,
        "family": method.made.family,
        "promise": method.promise,
        "summary": method.summary,
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table of methods, and what the promises mean."""
    head = {"name": "METHOD", "family": "FAMILY", "promise": "PROMISE", "summary": "SUMMARY"}
    name, family, promise = (max(len(one[key]) for one in (head, *rows)) for key in ("name", "family", "promise"))
    found = [
        f"{one['name']:<{name}}  {one['family']:<{family}}  {one['promise']:<{promise}}  {one['summary']}"
        for one in (head, *rows)
    ]
    meanings = [f"{key}: {meaning}." for key, meaning in PROMISES.items()]
    return [*found, "", *meanings, "", "lantern methods NAME lists the settings of a method."]


def description(method: Method, model: str) -> dict[str, Any]:
    """Return what a method is made of and takes, and whether a model has the add-ons that it needs."""
    from lantern.core.places import resolve_model

    folder, made = resolve_model(model), method.made
    return row(method) | {
        "drafter": made.drafter and str(made.drafter),
        "verifier": made.verifier and str(made.verifier),
        "engines": [name for name in ENGINES if name != "auto" and not (name == "graph" and made.needs_host)],
        "paper": f"https://arxiv.org/abs/{method.paper}" if method.paper else None,
        "page": f"docs/methods/{method.page}.md" if method.page else None,
        "model": model,
        "add_ons": [_need(ADD_ONS[name], folder) for name in made.needs],
        "settings": [
            {
                "name": option.name,
                "flag": option.flag,
                "type": type(option.default).__name__,
                "default": option.default,
                "low": option.low,
                "high": option.high,
                "choices": list(option.choices),
                "range": option.range,
                "help": option.help,
            }
            for option in method.options.values()
        ],
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Return the description of a method in lines of text."""
    facts = {
        "family": found["family"],
        "promise": f"{found['promise']}: {PROMISES[found['promise']]}",
        "drafter": found["drafter"],
        "verifier": found["verifier"],
        "engines": ", ".join(found["engines"]),
        "paper": found["paper"],
        "page": found["page"],
    }
    text = [f"{found['name']}: {found['summary']}", ""]
    text += [f"  {name:<9} {fact}" for name, fact in facts.items() if fact]
    for need in found["add_ons"]:
        state = f"{found['model']} has it" if need["present"] else f"{found['model']} lacks it; {need['command']}"
        text.append(f"  needs     {need['folder']}: {state}")
    if found["settings"]:
        width = max(len(one["flag"]) for one in found["settings"])
        text += ["", "Settings:"]
        text += [
            f"  {one['flag']:<{width}}  {one['type']:<5}  {one['default']!s:<12}  {one['help']}; {one['range']}"
            for one in found["settings"]
        ]
    return text


def _need(add_on: AddOn, folder: Path) -> dict[str, Any]:
    present = (folder / add_on.folder / "config.json").is_file()
    return {"name": add_on.name, "folder": add_on.folder, "present": present, "command": add_on.command}


COMMAND = Command("methods", "List all methods, or the settings of one.", add_arguments, run)
