"""Options for the settings of the chosen method, made from its specification."""

import argparse
from collections.abc import Sequence
from typing import Any

from lantern.methods import METHODS, Method, Setting, find, specs

PREFIX = "setting_"  # of their names in the namespace


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

    The method "auto" is resolved after the model is loaded: it gets the options of all methods, which `settings_of`
    checks again. An option that the method lacks is an error of the parser.
    """
    name, model = _named(argv)
    if name is None and _unknown(parser, argv):
        name = _default_method(model)
    if name is None or name not in METHODS:
        return
    if name != "auto":
        group = parser.add_argument_group(f'settings of method "{name}"')
        for option in find(name).spec.options.values():
            _add(group, [option])
    elif _unknown(parser, argv):
        group, every = parser.add_argument_group("settings of methods"), dict[str, list[Setting]]()
        for spec in specs():
            for option in spec.options.values():
                every.setdefault(option.name, []).append(option)
        for options in every.values():
            _add(group, options)
    for flag in _unknown(parser, argv):
        other = next((option for spec in specs() for option in spec.options.values() if option.flag == flag), None)
        if other is not None:
            try:
                find(name).option(other.name)
            except ValueError as error:
                parser.error(str(error))


def settings_of(args: argparse.Namespace, method: Method) -> dict[str, Any]:
    """Return the settings that were given on the command line; ValueError for those that do not fit the method."""
    given = {name.removeprefix(PREFIX): text for name, text in vars(args).items() if name.startswith(PREFIX)}
    given = {name: text for name, text in given.items() if text is not None} | dict(args.set)
    return {name: method.option(name).parse(text) for name, text in given.items()}


def _add(group: Any, options: Sequence[Setting]) -> None:
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

    group.add_argument(
        first.flag,
        dest=PREFIX + first.name,
        type=check,
        metavar=first.label.upper(),
        help=f"{first.help}; {first.range} (default {first.default})".replace("%", "%%"),
    )


def _named(argv: Sequence[str]) -> tuple[str | None, str | None]:
    """Return the method and the model that the arguments name."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--method")
    first.add_argument("--model")
    try:
        found, _ = first.parse_known_args(list(argv))
    except argparse.ArgumentError:  # the whole parser says it better
        return None, None
    return found.method, found.model


def _unknown(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Return the options of `argv` that the parser does not know."""
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
