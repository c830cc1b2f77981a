"""`lantern results`: lists the committed results, their weights and their state; `--refresh` runs their commands."""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.cli.command import DONE, FAILED, Command, complain, existing, flag

if TYPE_CHECKING:
    from lantern.eval.boards.results import Result, Results, State

PROGRAMS = {"lantern": ["-m", "lantern.cli.main"], "python": []}
OPTIONS = {
    "data": "folder written by `lantern train data`, for figures that compare with real images",
    "packages": "folder of registry packages with the networks of these figures",
    "inception": "weights file of Inception, for KID",
    "all_addons": "folder of the embedded model with the add-ons of all methods",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="results to list or to refresh (default all)")
    add(
        "--refresh",
        action="store_true",
        help="run the commands of the results named; without names, of all that are stale",
    )
    add("--json", action="store_true", help="print the list as one JSON array")
    for name, help in OPTIONS.items():
        add(flag(name), type=existing, metavar="PATH", help=f"{help} ({{{name}}})")


def run(args: argparse.Namespace) -> int:
    """List the results, or refresh them; return 1 if a command failed."""
    from lantern.cli import command as shared
    from lantern.eval.boards.results import Results, as_dict

    results = Results(root(shared.results_folder().parents[1], Path.cwd()), present_weights())
    chosen = results.find(args.names) if args.names else list(results.index.results)
    if args.refresh:
        given = {name: getattr(args, name) for name in OPTIONS}
        return refresh(results, chosen, {k: v for k, v in given.items() if v}, is_strict=bool(args.names))
    states = [(result, results.state(result)) for result in chosen]
    if args.json:
        print(json.dumps([as_dict(*one) for one in states], ensure_ascii=False))
    else:
        print("\n".join(listing(results, states)))
    return DONE


def root(package: Path, here: Path) -> Path:
    """Return the folder that eval/results is in: that of the code, or for a wheel the clone in which it is called."""
    from lantern.eval.boards.results import INDEX

    return here if not (package / INDEX).is_file() and (here / INDEX).is_file() else package


def present_weights() -> dict[str, Any]:
    """Return the fingerprint of the embedded model, and the SHA-256 of each of its components."""
    from lantern.core.io import embedded_model
    from lantern.eval.boards.results import weight_hashes
    from lantern.models.folder import fingerprint_of

    return {"fingerprint": fingerprint_of(embedded_model()), "files": weight_hashes(embedded_model())}


def listing(results: "Results", states: "Sequence[tuple[Result, State]]") -> list[str]:
    """Return one paragraph per result, and the pages that quote stale ones."""
    width = max(len(result.name) for result, _ in states)
    lines = [f"{'result':<{width}}  weights   commit    state"]
    for result, state in states:
        word = f"{state.word}: {'; '.join(state.reasons)}" if state.reasons else state.word
        lines.append(f"{result.name:<{width}}  {state.weights or '-':<8}  {state.commit or '-':<8}  {word}")
        lines.append(f"    {' '.join(result.files)}")
        lines += [f"    {result.command}"] if result.command else []
        lines += [f"    {result.note}"] if result.note else []
    stale = {result.name for result, state in states if state.is_stale}
    quoting = {page: [n for n in names if n in stale] for page, names in results.pages().items()}
    lines += ["", f"{len(stale)} of {len(states)} are stale."]
    lines += [f"{page} quotes stale results: {', '.join(names)}" for page, names in quoting.items() if names]
    return lines


def refresh(results: "Results", chosen: "Sequence[Result]", given: dict[str, Path], *, is_strict: bool) -> int:
    """Run the commands of results in order; with `is_strict` all of them, else the stale ones that can run here.

    Stops at the first command that fails; what was refreshed before it is kept. ValueError for a result that cannot be
    refreshed, before anything runs.
    """
    from lantern.eval.speed.surroundings import commit

    faults = {result.name: fault for result in chosen if (fault := obstacle(result, given))}
    if is_strict and faults:
        name, fault = next(iter(faults.items()))
        raise ValueError(f"{name} cannot be refreshed: {fault}")
    head = commit(results.root)
    for result in chosen:
        if not is_strict and not results.state(result).is_stale:
            continue
        if result.name in faults:
            print(f"{result.name}: left out: {faults[result.name]}", file=sys.stderr)
            continue
        print(f"{result.name}: {result.command}", file=sys.stderr, flush=True)
        code = subprocess.run(words_of(result, given, head), cwd=results.root).returncode
        if code:
            complain(f"the command of {result.name} ended with code {code}; results before it are refreshed")
            return FAILED
    return DONE


def obstacle(result: "Result", given: dict[str, Path]) -> str:
    """Return why a result cannot be refreshed here, "" if it can."""
    if not result.command:
        return f"it is kept as a record: {result.note}"
    for name in result.placeholders:
        if name not in given:
            return f"give {flag(name)}: {OPTIONS.get(name, 'an option of its command')}"
    if result.needs == "amx":
        from lantern.engines.cpu.build import processor

        if "amx_bf16" not in processor():
            return "it needs a processor with AMX"
    return ""


def words_of(result: "Result", given: dict[str, Path], head: str) -> list[str]:
    """Return the words of a result's command with this Python, the options and the commit `head` filled in.

    ValueError for another program than lantern and python.
    """
    program, *words = shlex.split(result.command)
    if program not in PROGRAMS:
        raise ValueError(f"the command of {result.name} begins with {program!r}, wanted lantern or python")
    places = {name: str(path.resolve()) for name, path in given.items()} | {"commit": head[:12]}
    return [sys.executable, *PROGRAMS[program], *(word.format(**places) for word in words)]


COMMAND = Command("results", "List the committed results, or make stale ones again.", add_arguments, run)
