"""Commands: what one is, and how a failure becomes one line and an exit code.

0: success. 1: a failure of the environment (disk full, hub unreachable, package missing, out of memory). 2: invalid
input (unknown option, bad value, damaged file). 128 + N: ended by signal N, such as 130 by Ctrl-C.

A command is a function whose signature declares its options, and whose docstring is its help:

    @command
    def convert(
        checkpoint: Path = arg("a file or a folder", type=existing),
        *,
        grid: int | None = opt(None, "tokens along one side of the image", 1, 256),
        where: Placement,
    ) -> None:
        '''Convert a released checkpoint.'''

An option's type is that of its annotation: a list takes several values, a bool is a flag, a pair of integers is a size
in pixels. A subclass of `Group` is a group. Parameters without `opt` get what was parsed under their name; `stopping`,
`debug` and `changed`, the options whose values are not their defaults, are always there. What it returns, if not None,
is the exit code.
"""

import argparse
import errno
import inspect
import io
import math
import os
import re
import sys
import traceback
import types
from argparse import SUPPRESS, ArgumentTypeError, Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from lantern import __version__
from lantern.core.config import install_hint, is_debugging, is_out_of_memory, nearest, one_line
from lantern.core.process import Stopped, Stopping

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
Kind = TypeVar("Kind")
METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH", str: "NAME", tuple[int, int]: "WxH"}
METAVARS |= {tuple[str, Path]: "NAME=PATH", tuple[str, str]: "NAME=VALUE"}


@dataclass(frozen=True)
class Command:
    """One command: name, one line of help, a function that adds its options, and `run`, with its exit code if not 0.

    is_brief: --help lists only the options outside of groups; --help-all lists all.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Namespace], int | None]
    is_brief: bool = False


class Stream(io.FileIO):
    """A standard stream whose text is dropped, without a failure, where `unread` says that nobody can read it."""

    unread: type[OSError] = BrokenPipeError

    def write(self, data: Any) -> int:
        """Write or drop all bytes; return how many. An exception of a signal's handler leaves none to be repeated."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[super().write(rest) :]
        except self.unread:
            pass
        return len(data)


class MessageStream(Stream):
    """Stderr: what cannot be written, to a terminal that is gone or a disk that is full, stops no command."""

    unread = OSError


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, naming the nearest valid option."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        complain(message)
        sys.exit(REFUSED)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or an error; a failure, which argparse swallows, is that of the command."""
        print(message, end="", file=file or sys.stderr)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; where help is asked for, it comes before all errors."""
        words = [*(args or ()), "--"]
        options = {option for one in self._actions for option in one.option_strings}
        asked = [word for word in words[: words.index("--")] if word in {"-h", "--help", "--help-all"} & options]
        return super().parse_known_args(asked[:1] if asked and self._subparsers is None else args, namespace)

    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> Namespace:  # type: ignore[override]
        """Parse strictly; the error for an unknown option names the nearest valid one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            near = nearest(unknown[0].split("=")[0], options)
            if "--prompt" in options and not unknown[0].startswith("-"):
                near = "; a prompt is given with --prompt, in quotes"
            self.error(f"unknown argument {unknown[0][:80]!r}{near}")
        return parsed


def parser_of(command: Command, prog: str, words: Sequence[str] = ()) -> Parser:
    """Return the parser of a command, with the options that all commands have, for the words of a call."""
    usage = f"{prog} [OPTIONS]" if command.is_brief else None
    parser = Parser(prog=prog, description=command.summary, usage=usage, add_help=False, allow_abbrev=False)
    command.add_arguments(parser)
    if command.is_brief and "--help-all" not in words:
        for group in parser._action_groups[2:]:  # the first two are argparse's own
            for action in group._group_actions:
                action.help = SUPPRESS
    add = parser.add_argument
    add("-h", "--help", action="help", help=f"list the {'most used ' if command.is_brief else ''}options")
    if command.is_brief:
        add("--help-all", action="help", help="list all options")
    add("-V", "--version", action="version", version=f"lantern {__version__}", help="print the version")
    add("--debug", action="store_true", help="print tracebacks, and the layer that first gives NaN, in eager passes")
    return parser


def run_command(command: Command, argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Parse `argv`, run the command and write stdout; a failure is printed as one line and becomes the exit code.

    With --debug a traceback comes first. `args.stopping` lets the command shield blocks from signals. Whoever reads
    stdout may close it: that is no failure, nor is a stream that was closed from the beginning, nor a character that
    the terminal's encoding lacks, nor a message that stderr does not take. Each line is written at once.
    """
    words = sys.argv[1:] if argv is None else argv
    is_debug = is_debugging() or "--debug" in words
    open_streams()
    try:
        with Stopping() as stopping:
            parser = parser_of(command, prog or f"lantern-{command.name}", words)
            try:
                args = parser.parse_args(words)
            except SystemExit as leaving:  # after --help, --version and an error that was printed
                code = int(leaving.code or DONE)
            else:
                options = [one for one in parser._actions if one.option_strings and one.dest in args]
                args.changed = [one.option_strings[-1] for one in options if vars(args)[one.dest] != one.default]
                args.debug, args.stopping = is_debug, stopping
                code = command.run(args) or DONE
            sys.stdout.flush()  # at exit a failure would become Python's own exit code, 120
            return code
    except KeyboardInterrupt as stopped:
        complain(str(stopped) or "interrupted")
        return stopped.code if isinstance(stopped, Stopped) else INTERRUPTED
    except Exception as error:  # the only place where failures become exit codes
        _drop_unwritten()
        if is_debug:
            traceback.print_exc()
        complain(explained(error))
        return REFUSED if isinstance(error, ValueError) else FAILED


def open_streams() -> None:
    """Replace Python's own stdout by a `Stream`, its stderr by a `MessageStream`; open those that are closed."""
    for name, kind in (("stdout", Stream), ("stderr", MessageStream)):
        if (stream := getattr(sys, name)) is None:  # closed: `print` would write to the other one
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__"):
            raw: Any = kind(stream.fileno(), "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True))


def complain(message: str) -> None:
    """Print an error as one line on stderr."""
    print(f"lantern: error: {printable(' '.join(message.split()))}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Return a text with escapes in place of characters that a terminal would obey."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def outcome(failures: Collection[str]) -> int:
    """Print each failure as an error; return the exit code."""
    for failure in failures:
        complain(failure)
    return FAILED if failures else DONE


def _drop_unwritten() -> None:
    """Write what is left of stdout, or drop it if that fails, so that exiting does not fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def explained(error: Exception) -> str:
    """Return the message of a failure as one line."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in ("lantern", "recipes"):
        return f"{error}; {install_hint('eval,train')}"
    if isinstance(error, OSError) and error.strerror:
        file = error.filename2 or error.filename  # a copy that fails names its source first
        return f"{file}: {error.strerror}" if file else error.strerror
    is_clear = isinstance(error, ValueError | OSError | ImportError | FloatingPointError)
    if is_clear or (isinstance(error, MemoryError) and str(error)):
        return one_line(error, 2000)  # a command that it names is whole
    if is_out_of_memory(error):
        return f"out of memory: {one_line(error)}"
    return f"{type(error).__name__}: {one_line(error)} (--debug prints a traceback)"


def check_folder(folder: Path) -> None:
    """Raise OSError if a folder cannot be written to or made."""
    there = next((one for one in (folder, *folder.parents) if one.exists()), Path("."))
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "cannot be written to", str(there))


def check_file(option: str, path: Path | None) -> None:
    """Raise ValueError if a file is a folder or its folder is missing, OSError if it cannot be written; None passes."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder, wanted a file")
    check_folder(path.parent)
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: the folder {path.parent} does not exist")


def say(line: str, is_quiet: bool = False, name: str = "lantern") -> None:
    """Print a line on stderr, after `name` and a colon, unless `is_quiet`."""
    if not is_quiet:
        print(f"{name}: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Argument:
    """What a command takes, beside its name and type: an option (`opt`), or a place (`arg`).

    low, high: inclusive bounds of numbers. flag: spellings, where it is not the name. how: what argparse is told
    beside, such as the `type` of one value; the values of a list follow its option, which may be repeated, or each
    repeats it (`action="append"`). Its `names` are those that completion offers, where the type does not name them.
    """

    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    flag: str = ""
    is_positional: bool = False
    how: dict[str, Any] = field(default_factory=dict)


def opt(default: Any, help: str, low: Any = None, high: Any = None, flag: str = "", **how: Any) -> Any:
    """Declare an option as the default of a parameter; see `Argument`."""
    return Argument(default, help, low, high, flag, how=how)


def arg(help: str, default: Any = None, **how: Any) -> Any:
    """Declare an argument without a name; it is required unless it has a default or may be None."""
    return Argument(default, help, is_positional=True, how=how)


@dataclass_transform(frozen_default=True)
class Group:
    """A group of options: a subclass is a frozen dataclass whose fields are declared with `opt`."""

    OPTIONS: ClassVar[dict[str, Argument]] = {}

    def __init_subclass__(cls) -> None:
        own = {name: one for name, one in vars(cls).items() if isinstance(one, Argument)}
        for name, one in own.items():
            is_list = isinstance(one.default, list)  # which dataclasses take only as a factory
            setattr(cls, name, field(default_factory=one.default.copy) if is_list else one.default)
        cls.OPTIONS = cls.OPTIONS | own
        dataclass(frozen=True)(cls)

    @classmethod
    def declared(cls) -> dict[str, tuple[Any, Argument]]:
        """Return the type and the declaration of each option by its name."""
        hints = get_type_hints(cls)
        return {name: (hints[name], option) for name, option in cls.OPTIONS.items()}


def command(
    function: Callable[..., int | None],
    *,
    is_brief: bool = False,
    more: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Command:
    """Return the command that a function declares by its signature and docstring; `more` adds further options."""
    summary, _, rest = (inspect.getdoc(function) or "").partition("\n")
    declared = inspect.signature(function).parameters
    kinds = {name: one.annotation for name, one in declared.items() if isinstance(one.annotation, type)}
    groups: dict[str, type[Group]] = {name: kind for name, kind in kinds.items() if issubclass(kind, Group)}

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.epilog = rest
        for name, one in declared.items():
            if isinstance(one.default, Argument):
                add_option(parser, name, one.annotation, one.default)
        for kind in groups.values():
            group = parser.add_argument_group((kind.__doc__ or "").rstrip("."))
            for name, declaration in kind.declared().items():
                add_option(group, name, *declaration)
        if more is not None:
            more(parser)

    def run(args: Namespace) -> int | None:
        given = vars(args)
        made = {name: kind(**{each: given[each] for each in kind.OPTIONS}) for name, kind in groups.items()}
        return function(**{name: given[name] for name in declared if name not in made}, **made)

    return Command(function.__name__, summary, add_arguments, run, is_brief)


def add_option(parser: Any, name: str, kind: Any, option: Argument) -> None:
    """Add one option, whose type is `kind`, to a parser or group."""
    is_optional = get_origin(kind) is types.UnionType
    if is_optional:
        kind = next(each for each in get_args(kind) if each is not types.NoneType)
    is_many = get_origin(kind) is list
    kind = get_args(kind)[0] if is_many else kind
    default = " ".join(map(str, option.default)) if isinstance(option.default, list) else option.default
    is_clear = default in (None, False, "") or "default" in option.help
    shown = option.help if is_clear else f"{option.help} (default {default})"
    how: dict[str, Any] = {"default": option.default, "help": shown.replace("%", "%%")}
    if kind is bool:
        how["action"] = "store_true"
    else:
        parse = size_of if kind == tuple[int, int] else kind
        how["type"] = parse if option.low is None or option.high is None else number(kind, option.low, option.high)
        how["metavar"] = name.upper() if option.is_positional else METAVARS.get(kind, "VALUE")
        if option.is_positional and (is_optional or option.default is not None):
            how["nargs"] = "?"
        elif is_many and "action" not in option.how:
            how |= {"nargs": "+", "action": "extend"}
    how |= option.how if option.is_positional else {"dest": name, **option.how}
    names = how.pop("names", None)
    added = parser.add_argument(*[name] if option.is_positional else (option.flag or flag(name)).split(), **how)
    if isinstance(choice := how.get("type"), OneOf):
        names = choice.names
    if names is not None:
        added.completer = lambda **_: names


def flag(name: str) -> str:
    """Return the spelling of an option on the command line."""
    return "--" + name.replace("_", "-")


def number(kind: type, low: float, high: float) -> Callable[[str], Any]:
    """Return a type for numbers of a kind, int or float, in [low, high]."""
    wanted = f"a whole number from {low} to {high}" if kind is int else f"a number from {low:g} to {high:g}"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:  # NaN is in no range
            raise ArgumentTypeError(f"{text!r:.40}, wanted {wanted}")
        return value

    return parse


def size_of(text: str) -> tuple[int, int]:
    """Parse width x height in pixels, such as 720x512, to (height, width). ArgumentTypeError for another form."""
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if found is None:
        raise ArgumentTypeError(f"{text!r:.40}, wanted width and height in pixels, such as 720x720")
    return int(found[2]), int(found[1])


@dataclass(frozen=True, eq=False)  # argparse hashes types
class OneOf:
    """A type for one of some names, which completion offers. noun: what they are, where a list would be long."""

    names: Collection[str]
    noun: str = ""

    def __call__(self, text: str) -> str:
        """Return the text if it is one of the names; ArgumentTypeError names the nearest one."""
        if text not in self.names:
            known = self.noun or f"one of {', '.join(self.names)}"
            raise ArgumentTypeError(f"{text!r:.40}, wanted {known}{nearest(text, self.names)}")
        return text


def existing(text: str) -> Path:
    """Parse the path of a file or folder that exists. ArgumentTypeError if it does not exist or cannot be reached."""
    if not os.path.exists(text):  # False as well for a folder that may not be read
        raise ArgumentTypeError(f"{text!r:.80} does not exist, or its folder cannot be read")
    return Path(text)


def named(
    kind: Callable[[str], Kind], what: str = "PATH", names: Sequence[str] = ()
) -> Callable[[str], tuple[str, Kind]]:
    """Return a type for NAME=WHAT, where NAME is one of `names` if there are any, and `kind` parses WHAT."""

    def parse(text: str) -> tuple[str, Kind]:
        name, _, value = text.partition("=")
        if not name or not value:
            of = f" with NAME of {', '.join(names)}" if names else ""
            raise ArgumentTypeError(f"{text!r:.80}, wanted NAME={what}{of}")
        return OneOf(names)(name) if names else name, kind(value)

    return parse
