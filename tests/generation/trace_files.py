"""`python -m tests.generation.trace_files [OPTION ...]` lists the files that one `lantern-generate` call runs.

The options are those of `lantern-generate`; by default it makes one image of the embedded model. A file counts as run
if one of its functions or methods is called. Files that are only imported (protocols, dataclasses, constants) are
listed separately.
"""

import sys
import tempfile
import threading
from collections.abc import Sequence
from inspect import CO_NEWLOCALS
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("lantern", "models", "eval", "recipes")
DEFAULT = ("--prompt", "a red apple", "--quiet")


def trace(argv: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """Run `lantern-generate` in this process.

    Returns the number of called functions of each file that was run, and the files that were only imported. It must be
    the first use of lantern in the process. RuntimeError if the command fails.
    """
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        called.add(frame.f_code)

    threading.settrace(note)
    sys.settrace(note)
    try:
        from lantern.cli.generate import main

        code = main(argv)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    if code:
        raise RuntimeError(f"lantern-generate ended with code {code}")
    run: dict[str, int] = {}
    for each in called:
        path = _ours(each.co_filename)
        # an import runs the bodies of modules and classes, which have no locals of their own, and comprehensions
        if path is not None and each.co_flags & CO_NEWLOCALS and not each.co_name.startswith("<"):
            run[path] = run.get(path, 0) + 1
    modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    imported = {path for file in modules if file and (path := _ours(file)) is not None}
    return dict(sorted(run.items())), sorted(imported - run.keys())


def _ours(file: str) -> str | None:
    """Return the path of a file relative to the project, None for files of others and for this one."""
    path = Path(file)
    if not path.is_absolute() or not path.is_relative_to(ROOT) or path == Path(__file__).resolve():
        return None
    inside = path.relative_to(ROOT)
    return inside.as_posix() if inside.parts[0] in FOLDERS else None  # a virtual environment may lie beside them


def main(argv: Sequence[str] | None = None) -> int:
    """Print the files and their number."""
    given = list(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory() as folder:
        run, imported = trace([*(given or DEFAULT), "--out", folder])
    for path, functions in run.items():
        print(f"{functions:>4}  {path}")
    print(f"{len(run)} files run, {sum(run.values())} functions; {len(imported)} files only imported:")
    for path in imported:
        print(f"      {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
