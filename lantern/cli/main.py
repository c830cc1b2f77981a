"""`lantern COMMAND ...`: finds the command and runs its file."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from lantern.cli.command import DONE, REFUSED, complain, contained, run_command
from lantern.core.config import hint_for

# name: line of `lantern --help`; the command itself is COMMAND of lantern/cli/<name>.py
SUMMARIES = {
    "generate": "make images from prompts or class labels",
    "methods": "list all methods, or the settings of one",
    "convert": "convert a released checkpoint to a component or model folder",
    "assemble": "put components together into a model folder",
    "train": "prepare data, or train a text encoder, tokenizer, decoder, target, drafter or tree policy",
    "doctor": "print versions and devices, and commands to repair faults",
    "tune": "measure this machine and find the fastest method for --method auto",
    "eval": "measure the quality of images: KID, FID, CLIP score and others",
    "serve": "answer requests over HTTP in the form of OpenAI's image API",
    "demo": "show plain decoding and a method side by side in the browser",
    "bench": "measure the speedup of methods over the fastest plain decoding",
    "reproduce": "make the images of a published protocol, measure them, and write the row; resumes if stopped",
    "leaderboard": "measure methods in one run, as JSON lines and a table",
    "completion": "print the script with which bash, zsh or fish completes options and names",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; `argv` defaults to the arguments of the process."""
    if argv is None and "_ARGCOMPLETE" in os.environ:
        from lantern.cli.completion import complete

        complete("lantern", SUMMARIES)
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv:
        print(_usage(), file=sys.stderr)
        return REFUSED
    if argv[0] in ("-h", "--help"):
        return contained(lambda _: print(_usage()) or DONE)
    if argv[0] in ("-V", "--version"):
        from lantern import __version__

        return contained(lambda _: print(f"lantern {__version__}") or DONE)
    name = argv[0]
    if name not in SUMMARIES:
        complain(f"unknown command {name[:40]!r}; {hint_for(name, SUMMARIES)}")
        return REFUSED
    return run_command(import_module(f"lantern.cli.{name}").COMMAND, argv[1:], prog=f"lantern {name}")


def _usage() -> str:
    width = max(map(len, SUMMARIES))
    return "\n".join(
        [
            "usage: lantern COMMAND [OPTIONS]\n",
            "Generate images with visual autoregressive models by speculative decoding; train and measure such models.",
            "",
            *(f"  {name:<{width}}  {summary}" for name, summary in SUMMARIES.items()),
            "\nlantern COMMAND --help lists the options of a command; lantern --version prints the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
