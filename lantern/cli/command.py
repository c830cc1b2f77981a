"""What commands share: a parser whose errors are one line, the exit codes, and groups of options.

0: success. 1: a failure of the environment (disk full, hub unreachable, package missing, out of memory).
2: invalid input (unknown option, bad value, damaged file).
129: the terminal was closed (SIGHUP). 130: interrupted by Ctrl-C. 143: terminated by SIGTERM.

For each group of options one function adds it, and one returns the given values.
"""

import argparse
import difflib
import errno
import logging
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lantern import __version__
from lantern.core.config import install_hint, is_debugging, one_line
from lantern.core.signals import Stopped, Stopping
from lantern.engines.engine import ENGINES, WEIGHTS, Engine, engine
from lantern.methods import METHODS, Option, find

if TYPE_CHECKING:
    from lantern.models.folder import Model


DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
# diffusers imports torchao if it is installed, and the import logs warnings about features that are not used here
CHATTY = ("torchao", "diffusers.quantizers.torchao", "torch.utils._pytree")
PREFIX = "setting_"  # of their names in the namespace
DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Command:
    """One command: name, one line of help, a function that adds its options, and `run`, which returns the exit code.

    `add_late` adds options that depend on the arguments.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    add_late: Callable[[argparse.ArgumentParser, Sequence[str]], None] | None = None


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, naming the nearest valid option."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with token 2."""
        complain(message)
        sys.exit(REFUSED)

    def parse_args(self, args: Sequence[str] | None = None, namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse strictly; the error for an unknown option names the nearest valid one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            near = nearest(unknown[0].split("=")[0], options)
            if "--prompt" in options and not unknown[0].startswith("-"):
                near = "; a prompt is given with --prompt, in quotes"
            self.error(f"unknown argument {unknown[0][:80]!r}{near}")
        return parsed


def run_command(command: Command, argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Parse `argv` and run the command; a failure is printed as one line and becomes the exit code.

    With --debug a traceback comes first. `args.stopping` lets the command shield blocks from signals.
    """
    words = sys.argv[1:] if argv is None else argv
    is_debug = is_debugging() or "--debug" in words

    def run(stopping: Stopping) -> int:
        args = _parsed(command, words, prog or f"lantern-{command.name}")
        if isinstance(args, int):
            return args
        args.debug, args.stopping = is_debug, stopping
        return command.run(args)

    return contained(run, is_debug=is_debug)


def contained(run: Callable[[Stopping], int], *, is_debug: bool = False) -> int:
    """Return what `run` returns, once stdout is written; a failure is printed as one line and becomes the exit code."""
    try:
        with Stopping() as stopping:
            code = run(stopping)
            if sys.stdout is not None:  # None: it was closed
                sys.stdout.flush()  # at exit a failure would become Python's own exit code, 120
            return code
    except KeyboardInterrupt as stopped:
        complain(str(stopped) or "interrupted")
        return stopped.code if isinstance(stopped, Stopped) else INTERRUPTED
    except BrokenPipeError:
        _abandon_stdout()
        return FAILED
    except Exception as error:  # the only place where failures become exit codes
        if is_debug:
            traceback.print_exc()
        complain(explained(error))
        if isinstance(error, OSError):
            _abandon_stdout_if_full()
        return REFUSED if isinstance(error, ValueError) else FAILED


def _parsed(command: Command, argv: Sequence[str], prog: str) -> argparse.Namespace | int:
    """Return the arguments, or the exit code after --help, --version and an error that was printed."""
    parser = Parser(prog=prog, description=command.summary, allow_abbrev=False)
    command.add_arguments(parser)
    parser.add_argument("--version", action="version", version=f"lantern {__version__}")
    parser.add_argument("--debug", action="store_true", help="print tracebacks, and the layer that first gives NaN")
    try:
        if command.add_late is not None:
            command.add_late(parser, argv)
        args = parser.parse_args(argv)
    except SystemExit as leaving:
        return int(leaving.code or DONE)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    return args


def nearest(name: str, known: Sequence[str]) -> str:
    """Return "; did you mean X?" for the known name closest to `name`, or "" if none is close."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def complain(message: str) -> None:
    """Print an error as one line on stderr."""
    print(f"lantern: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _abandon_stdout() -> None:
    """Suppress BrokenPipeError at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _abandon_stdout_if_full() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _abandon_stdout()


def explained(error: Exception) -> str:
    """Return the message of a failure as one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; {install_hint('eval,train')}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError | ImportError | FloatingPointError):
        return one_line(error)
    if isinstance(error, MemoryError) and str(error):
        return one_line(error)
    if isinstance(error, MemoryError | RuntimeError):
        from lantern.generation.generator import is_out_of_memory

        if is_out_of_memory(error):
            return f"out of memory: {one_line(error)}"
    return f"{type(error).__name__}: {one_line(error)} (--debug prints a traceback)"


def check_folder(folder: Path) -> None:
    """Raise OSError if a folder cannot be written to or made."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "cannot be written to", str(there))


def check_file(option: str, path: Path) -> None:
    """Raise ValueError if a file is a folder or its folder is missing, OSError if it cannot be written."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder, wanted a file")
    check_folder(path.parent)
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: the folder {path.parent} does not exist")


def integer(low: int, high: int) -> Callable[[str], int]:
    """Return a type for whole numbers in [low, high]."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text[:40]!r}, wanted a whole number from {low} to {high}")
        return value

    return parse


def size_of(text: str) -> tuple[int, int]:
    """Parse width x height in pixels, such as 720x512, to (height, width). ArgumentTypeError for another form."""
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}, wanted width and height in pixels, such as 720x720")
    return int(found[2]), int(found[1])


def real(low: float, high: float) -> Callable[[str], float]:
    """Return a type for finite numbers in [low, high]."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high):
            raise argparse.ArgumentTypeError(f"{text[:40]!r}, wanted a number from {low:g} to {high:g}")
        return value

    return parse


@dataclass(frozen=True, eq=False)  # argparse hashes types
class Names:
    """A type for texts of which the usual ones are known; completion offers them.

    is_strict: others are refused.
    """

    names: tuple[str, ...]
    is_strict: bool = True

    def __call__(self, text: str) -> str:
        """Return the text; ArgumentTypeError names the nearest known one."""
        if self.is_strict and text not in self.names:
            is_method = self.names == tuple(METHODS)
            known = "a method that `lantern methods` lists" if is_method else f"one of {', '.join(self.names)}"
            raise argparse.ArgumentTypeError(f"{text[:40]!r}, wanted {known}{nearest(text, self.names)}")
        return text


VARIANT = Names(tuple(f"{name}{weights}" for name in ENGINES if name != "auto" for weights in ("", "+int8")))


def one_of(names: Sequence[str]) -> Names:
    """Return a type for one of `names`."""
    return Names(tuple(names))


def dtype_of_names(*more: str) -> Names:
    """Return a type for names of dtypes and `more` names."""
    return Names((*more, *DTYPES))


def existing(text: str) -> Path:
    """Parse the path of a file or folder that exists. ArgumentTypeError if it does not exist."""
    try:
        if Path(text).exists():
            return Path(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: {error.strerror}") from error
    raise argparse.ArgumentTypeError(f"{text[:80]!r} does not exist")


def named_path(names: Sequence[str] = (), kind: Callable[[str], Path] = Path) -> Callable[[str], tuple[str, Path]]:
    """Return a type for NAME=PATH, where NAME is one of `names` if there are any, and `kind` parses PATH."""

    def parse(text: str) -> tuple[str, Path]:
        name, _, path = text.partition("=")
        if not name or not path:
            of = f" with NAME of {', '.join(names)}" if names else ""
            raise argparse.ArgumentTypeError(f"{text[:80]!r}, wanted NAME=PATH{of}")
        return one_of(names)(name) if names else name, kind(path)

    return parse


def flag(name: str) -> str:
    """Return the spelling of an option on the command line."""
    return "--" + name.replace("_", "-")


def add_placement(group: Any) -> None:
    """Add options for the device and dtype of a model, as `load_model` takes them."""
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    dtypes = "auto (fp32 on a CPU, else bf16), fp32, bf16 or fp16"
    group.add_argument("--dtype", type=dtype_of_names("auto"), default="auto", help=dtypes)


def placement_of(args: argparse.Namespace, *, default: str = "auto") -> dict[str, Any]:
    """Return device, dtype and engine that the options describe; see `engine_of`."""
    dtype = dtype_of(args.dtype, args.target_weights)
    return {"device": args.device, "dtype": dtype, "engine": engine_of(args, default=default)}


def add_engine(group: Any, *, weights: str = "--weights", default: str = "auto") -> None:
    """Add the options to a parser or group; `weights` is the name of the option for the target's weights."""
    add = group.add_argument
    add(
        "--engine",
        choices=tuple(ENGINES),
        help="how passes are run: eager (by torch), wide (attention in fp64: rounds the same in any tree), graph (one "
        "CUDA graph per step), cpu (C++, built by pip install or at first use by g++: several times as fast as eager, "
        "and exact methods give plain decoding's tokens in bf16 too); auto: the fastest of them that is ready "
        f"(default {default})",
    )
    add(
        weights,
        dest="target_weights",
        choices=("full", "bf16", *WEIGHTS[1:]),
        help="weights of the target: full (the model's own, default), bf16, int8 (layers, head and the cpu engine's "
        "drafters), int4 (layers); exact methods are exact with respect to the quantized target",
    )


def engine_of(args: argparse.Namespace, *, default: str = "auto") -> Engine:
    """Return the engine that the options describe."""
    weights = args.target_weights if args.target_weights in WEIGHTS else "full"
    return engine(args.engine or default, weights=weights)


def dtype_of(dtype: str, weights: str | None) -> str:
    """Return the dtype of --dtype and --weights; ValueError if they contradict each other."""
    if weights != "bf16":
        return dtype
    if dtype not in ("auto", "bf16"):
        raise ValueError(f"--weights bf16 contradicts --dtype {dtype}: give one of them")
    return "bf16"


def advice(model: "Model") -> str | None:
    """Return how to get a faster engine, if `auto` chose eager only because the C++ library is not built."""
    if model.device.type != "cpu" or model.engine.name != "eager" or not model.engine.reason:
        return None
    if engine("cpu", weights=model.engine.weights).why_not(model.target) is not None:
        return None
    return "`lantern doctor --build` or `--engine cpu` builds the C++ engine, which is several times as fast here"


def add_set(group: Any) -> None:
    """Add --set, which sets any setting by name."""
    group.add_argument(
        "--set",
        action="append",
        default=[],
        type=_pair,
        metavar="NAME=VALUE",
        help="a setting of the method by its name, such as nodes=31; may be repeated",
    )


def add_method_options(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Add the options of the method that `argv` names, or of the model's default method if `argv` has such options.

    The method "auto" is resolved after the model is loaded: it gets the options of all methods, which `Method.parsed`
    checks again. An option that the method lacks is an error of the parser.
    """
    name, model = _named(argv)
    if name is None and _unknown(parser, argv):
        name = _default_method(model)
    if name is None or name not in METHODS:
        return
    if name != "auto":
        group = parser.add_argument_group(f'settings of method "{name}"')
        for option in find(name).options.values():
            _add(group, [option])
    elif _unknown(parser, argv):
        group, every = parser.add_argument_group("settings of methods"), dict[str, list[Option]]()
        for method in METHODS.values():
            for option in method.options.values():
                every.setdefault(option.name, []).append(option)
        for options in every.values():
            _add(group, options)
    for flag in _unknown(parser, argv):
        other = next(
            (option for one in METHODS.values() for option in one.options.values() if option.flag == flag), None
        )
        if other is not None:
            try:
                find(name).option(other.name)
            except ValueError as error:
                parser.error(str(error))


def settings_of(args: argparse.Namespace) -> dict[str, str]:
    """Return the settings of the method that were given, as texts; `Method.parsed` makes values of them.

    ValueError for a setting with two values.
    """
    options = {name.removeprefix(PREFIX): text for name, text in vars(args).items() if name.startswith(PREFIX)}
    given = {name: text for name, text in options.items() if text is not None}
    for name, text in args.set:
        if given.setdefault(name, text) != text:
            raise ValueError(f'setting {name} is given twice, as "{given[name]}" and "{text}": give one of them')
    return given


def _add(group: Any, options: Sequence[Option]) -> None:
    """Add the option of a setting; methods may declare it differently, then a value that fits one of them is legal."""
    first = options[0]

    def check(text: str) -> str:
        for option in options:
            try:
                option.parse(text)
            except ValueError as error:
                fault = error
            else:
                return text
        raise argparse.ArgumentTypeError(str(fault).removeprefix(f"{first.label} is "))

    shown = f"{first.help}; {first.range} (default {first.default})".replace("%", "%%")
    group.add_argument(first.flag, dest=PREFIX + first.name, type=check, metavar=first.label.upper(), help=shown)


def _named(argv: Sequence[str]) -> tuple[str | None, str | None]:
    """Return the method and the model that the arguments name."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--method")
    first.add_argument("--model")
    try:
        found, _ = first.parse_known_args(list(argv))
    except argparse.ArgumentError:  # the whole parser has a better message
        return None, None
    return found.method, found.model


def _unknown(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Return the options of `argv` that the parser does not have."""
    known = {option for action in parser._actions for option in action.option_strings}
    flags = [text.partition("=")[0] for text in argv if text.startswith("--") and len(text) > 2]
    return [flag for flag in flags if flag not in known]


def _default_method(model: str | None) -> str:
    from lantern.core.io import EMBEDDED_MODEL, resolve_model
    from lantern.models.folder import read_index

    index = read_index(resolve_model(model or EMBEDDED_MODEL))
    return str((index.get("generation") or {}).get("method", "auto"))


def _pair(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier() or not value:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}, wanted NAME=VALUE, such as nodes=31")
    return name, value


# fields of the sampling: type and help
SAMPLING: dict[str, tuple[Callable[[str], Any], str]] = {
    "guidance": (real(0, 1000), "classifier-free guidance; 1 or less is none"),
    "guidance_interval": (integer(-1, 10**6), "guide only tokens 0 to N + 1; -1 guides all"),
    "temperature": (real(0, 100), "0 is greedy"),
    "top_k": (integer(0, 10**6), "tokens to choose from; 0 is all"),
    "top_p": (real(0, 1), "probability to choose from; 1 is all"),
}
DISTRIBUTION = ("guidance", "temperature", "top_k", "top_p")


def add_distribution(group: Any, names: Sequence[str] = DISTRIBUTION) -> None:
    """Add options for the fields of the model's sampling in `names`."""
    for name in names:
        kind, text = SAMPLING[name]
        letter = "X" if name in ("guidance", "temperature", "top_p") else "N"
        group.add_argument(flag(name), type=kind, metavar=letter, help=f"{text} (default: the model's)")


def distribution_of(args: argparse.Namespace, names: Sequence[str] = DISTRIBUTION) -> dict[str, Any]:
    """Return the fields of the sampling that were given."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def add_model(group: Any) -> None:
    """Add the option for the model."""
    group.add_argument("--model", default="lantern-emoji", help="name, folder or hub id (default lantern-emoji)")


def add_machine(group: Any) -> None:
    """Add options for threads, device and progress."""
    group.add_argument("--threads", type=integer(1, 1024), help="CPU threads to compute on")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--quiet", action="store_true", help="print no progress")


def set_threads(args: argparse.Namespace) -> None:
    """Let torch compute on --threads CPU threads, if they were given."""
    import torch

    if args.threads is not None:
        torch.set_num_threads(args.threads)


def reporter(is_quiet: bool, name: str = "lantern") -> Callable[[str], None]:
    """Return a function that prints a line on stderr, after `name` and a colon, unless `is_quiet`."""
    return lambda line: None if is_quiet else print(f"{name}: {line}", file=sys.stderr, flush=True)
