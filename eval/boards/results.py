"""Committed results: which command makes each file, of which weights and commit it is, and whether it is stale.

`eval/results/index.json` lists the results. A result file records the fingerprint of the model and the commit that it
was measured with (`surroundings.about`). A file made from a result file holds a digest of its figures.
`lantern results` shows the state of all of them and runs their commands.
"""

import ast
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lantern.core.config import hint_for, load_config, read_json_object
from lantern.core.io import WEIGHTS_NAME, sha256_of
from lantern.eval.speed.surroundings import git

INDEX = "eval/results/index.json"
APART = ("cpu/build.py", "cpu/convolution.h", "cpu/vq.py", "pass_times.py")
# What decides the codes and the speed of a method, as git's pathspecs. The decoder from codes to pixels is not part of
# it, since its pictures are the same up to rounding (`vq_decoding` has its speed); nor are loading the C++ library and
# the times by which `auto` chooses (`auto_choice` has them).
CODE = (
    *("lantern/core", "lantern/decoding", "lantern/drafters", "lantern/engines", "lantern/verifiers", "models"),
    *("eval/speed", *(f":!lantern/engines/{name}" for name in APART)),
)
DIRTY = "+changes"  # suffix of the commit of a checkout with changed files
MARK = re.compile(rb"figures sha256 ([0-9a-f]{64})")
PLACEHOLDER = re.compile(r"\{(\w+)\}")


# Components that decide the images of a prompt; boards may measure drafters that were trained for them
DECISIVE = ("transformer", "vqvae", "text_encoder")


@dataclass(frozen=True)
class Result:
    """One entry of the index.

    files: paths relative to the checkout; the first is the one whose record counts. command: makes all of them, with
    {NAME} for an option of `lantern results` and {commit} for the present commit; "" for a record that is kept.
    source: the result that it is made from.
    of_model: figures of the embedded model. code: git's pathspecs of files whose changes make it stale. needs: "amx"
    for a processor with AMX. note: further facts for the reader. ValueError without files, without command and note,
    and for an unknown need.
    """

    name: str
    files: tuple[str, ...]
    command: str = ""
    source: str = ""
    of_model: bool = True
    code: tuple[str, ...] = CODE
    needs: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError(f"result {self.name!r} has no files, wanted at least one")
        if not self.command and not self.note:
            raise ValueError(f"result {self.name!r} has no command, wanted a note with the reason why it is kept")
        if self.needs not in ("", "amx"):
            raise ValueError(f"result {self.name!r} needs {self.needs!r}, wanted amx or nothing")

    @property
    def placeholders(self) -> list[str]:
        """Names of the options of `lantern results` that the command takes."""
        return [name for name in PLACEHOLDER.findall(self.command) if name != "commit"]


@dataclass(frozen=True)
class Index:
    """All committed results. ValueError for two of one name or an unknown source."""

    results: tuple[Result, ...]

    def __post_init__(self) -> None:
        names = [result.name for result in self.results]
        if len(set(names)) < len(names):
            raise ValueError(f"two results are called {next(n for n in names if names.count(n) > 1)!r}")
        for result in self.results:
            if result.source and result.source not in names:
                raise ValueError(f"the source of {result.name!r} is {result.source!r}, which is no result")


@dataclass(frozen=True)
class State:
    """State of a result: first digits of fingerprint and commit, "" for unknown, and how it differs from the present.

    A result whose files are missing, or are of other weights or other code, or of unknown ones, is stale, unless it is
    kept as a record.
    """

    weights: str
    commit: str
    reasons: tuple[str, ...]
    is_record: bool = False

    @property
    def is_stale(self) -> bool:
        """Whether the result should be made again."""
        return bool(self.reasons) and not self.is_record

    @property
    def word(self) -> str:
        """The state in one word: current, stale or record."""
        return "record" if self.is_record else "stale" if self.reasons else "current"


def figures_mark(figures: Mapping[str, Any]) -> str:
    """Return the mark in files that are made from these figures."""
    text = json.dumps(figures, sort_keys=True, ensure_ascii=True)
    return f"figures sha256 {hashlib.sha256(text.encode()).hexdigest()}"


@dataclass(frozen=True)
class Results:
    """The results of a checkout. `weights` are the present ones: "fingerprint" of the model, "files" by component."""

    root: Path
    weights: Mapping[str, Any]

    @cached_property
    def index(self) -> Index:
        """The index; ValueError if it is missing or damaged."""
        path = self.root / INDEX
        if not path.is_file():
            raise ValueError(f"{path} is missing: results come with a clone of lantern, run the command in its folder")
        return load_config(Index, path)

    def find(self, names: Sequence[str]) -> list[Result]:
        """Return the results of these names, in the order of the index; ValueError for an unknown one."""
        known = {result.name: result for result in self.index.results}
        for name in names:
            if name not in known:
                raise ValueError(f"result {name[:60]!r} is not in {INDEX}; {hint_for(name, known)}")
        return [result for result in self.index.results if result.name in names]

    def state(self, result: Result) -> State:
        """Return the state of a result."""
        missing = [name for name in result.files if not (self.root / name).is_file()]
        if missing:
            return State("", "", tuple(f"{name} is missing" for name in missing))
        if result.source:
            return self._state_of_drawing(result)
        raw = read_json_object(self.root / result.files[0])
        weights, commits = recorded_weights(raw), recorded_commits(raw)
        reasons = [self._fault_of_weights(weights)] if result.of_model else []
        reasons += [self._fault_of_code(commits, result.code)]
        first = weights if isinstance(weights, str) else next(iter((weights or {}).values()), "")
        last = commits[-1][:8] if commits else ""
        return State(first[:8], last, tuple(filter(None, reasons)), is_record=not result.command)

    def pages(self) -> dict[str, list[str]]:
        """Return the names of the results that each page of the documents links to, by page."""
        paths = [*self.root.glob("*.md"), *self.root.glob("docs/**/*.md")]
        found = {}
        for path in sorted(paths):
            text = path.read_text(encoding="utf-8")
            linked = [
                result.name
                for result in self.index.results
                if any(f"({link})" in text for file in result.files for link in _links(file))
            ]
            if linked:
                found[path.relative_to(self.root).as_posix()] = linked
        return found

    def _state_of_drawing(self, result: Result) -> State:
        """Return the state of files that are made from another result."""
        (source,) = self.find([result.source])
        state = self.state(source)
        reasons = [f"{source.name} is stale"] if state.is_stale else []
        path = self.root / source.files[0]
        if not path.is_file():
            return State("", "", tuple(reasons))
        wanted = figures_mark(read_json_object(path)).split()[-1].encode()
        for name in result.files:
            marks = MARK.findall((self.root / name).read_bytes())
            if not marks:
                reasons.append(f"{name} does not record its figures")
            elif wanted not in marks:
                reasons.append(f"{name} shows other figures")
        return State(state.weights, state.commit, tuple(reasons))

    def _fault_of_weights(self, recorded: str | Mapping[str, str] | None) -> str:
        if not recorded:
            return "weights unknown"
        if recorded in (self.weights["fingerprint"], self.weights["files"]):
            return ""
        return f"other weights, now {self.weights['fingerprint'][:8]}"

    def _fault_of_code(self, commits: Sequence[str], code: Sequence[str]) -> str:
        """Return why the code of a result is not that of the working tree, "" if it is."""
        if not commits or not all(commits):
            return "commit unknown"
        changed: set[str] = set()
        for commit in dict.fromkeys(commits):
            if commit.endswith(DIRTY):
                return f"commit {commit[:8]} had changes that are not committed"
            names = git(self.root, "diff", "--name-only", commit, "--", *code)
            if names is None:
                return f"commit {commit[:8]} is not in this repository"
            changed |= {name for name in names.splitlines() if self._has_other_code(name, commit)}
        return f"{len(changed)} files of its code changed since" if changed else ""

    def _has_other_code(self, name: str, commit: str) -> bool:
        """Return whether a file that differs from that of a commit differs in more than comments and docstrings."""
        path = self.root / name
        if path.suffix != ".py" or not path.is_file():
            return True
        before = git(self.root, "show", f"{commit}:{name}")
        return before is None or bare(before) != bare(path.read_text(encoding="utf-8"))


def weight_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the weights of a model's components that decide the images, of those that it has."""
    paths = {name: folder / name / WEIGHTS_NAME for name in DECISIVE}
    return {name: sha256_of(path) for name, path in paths.items() if path.is_file()}


def part_hash(folder: Path) -> str:
    """Return the SHA-256 over the names and bytes of the files of a trained part."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def recorded_weights(raw: Mapping[str, Any]) -> str | Mapping[str, str] | None:
    """Return the SHA-256 of the components that decide a result, or the model's fingerprint; None for neither."""
    for name, kind in (("weights", Mapping), ("fingerprint", str)):
        if isinstance(raw.get(name), kind):
            return raw[name]
    return None


def recorded_commits(raw: Mapping[str, Any]) -> list[str]:
    """Return the commits that a result file, its cells or its figures were measured with; "" where one is not known."""
    own = raw.get("commits") or [part["commit"] for part in (raw, raw.get("surroundings", {})) if "commit" in part]
    nested = [*raw.get("cells", ()), *(raw["figures"].values() if isinstance(raw.get("figures"), Mapping) else ())]
    return own or [commit for part in nested for commit in recorded_commits(part) or [""]]


def _links(file: str) -> tuple[str, ...]:
    """Return how pages of the checkout, of docs/ and of docs/X/ link to a file."""
    inside = file.removeprefix("docs/")
    return (file, f"../{file}", f"../../{file}", *((inside, f"../{inside}") if inside != file else ()))


def as_dict(result: Result, state: State) -> dict[str, Any]:
    """Return a result with its state for JSON."""
    return {**dataclasses.asdict(result), **dataclasses.asdict(state), "state": state.word}


def bare(source: str) -> str:
    """Return the syntax of Python source without comments and docstrings; the source itself if it has no syntax."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:]
    return ast.dump(tree)
