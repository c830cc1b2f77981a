"""What a method is: a function with `@method`, of `Parts` of a model and of options. Needs no torch.

The function returns a description: deferred calls that make the drafter and the verifier. What the method needs, and
what it promises, are read from the description. Trained networks that methods read beside the target are declared as
`AddOn`, and imported when opened.
"""

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from lantern.core.config import LARGEST, MAX_NEIGHBOURS, as_number, hint_for, nearest

Promise = Literal["tokens", "distribution", "relaxed"]
PROMISES: dict[str, str] = {
    "tokens": "the tokens of plain decoding, except for rounding where the engine does not keep the bits",
    "distribution": "other tokens than plain decoding, from the same distribution",
    "relaxed": "another distribution; the total variation per token is reported",
}
DRAFTER = "eagle1"  # the add-on in drafter/


@dataclass(frozen=True)
class Option:
    """A value of a method that a user can change. `low` and `high` are inclusive bounds of numbers.

    The type is that of `default`. `sweep` are the values that tuning tries, gentlest first. `fits`, of a window:
    tokens do not depend on it, and it is chosen for the engine unless the user sets it. `is_share`: a number between 0
    and 1 is legal too, as a share.
    """

    default: Any
    low: float | None = None
    high: float | None = None
    help: str = ""
    choices: tuple[Any, ...] = ()
    sweep: tuple[float, ...] = ()
    fits: bool = False
    is_share: bool = False
    name: str = ""

    @property
    def label(self) -> str:
        """The name without the underscore that keeps it from being a keyword of Python."""
        return self.name.rstrip("_")

    @property
    def flag(self) -> str:
        """The option of `lantern-generate`: "--p-radius" of p_radius, "--lambda" of lambda_."""
        return "--" + self.label.replace("_", "-")

    @property
    def range(self) -> str:
        """The legal values in words, such as "a whole number from 0 to 1024"."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        noun = {bool: "true or false", int: "a whole number", float: "a number", str: "a name"}[type(self.default)]
        if self.low is None or self.high is None:
            return noun if self.low is None else f"{noun} of at least {self.low:.10g}"
        share = ", or a share between 0 and 1" if self.is_share else ""
        return f"{noun} from {self.low:.10g} to {self.high:.10g}{share}"

    def parse(self, text: str) -> Any:
        """Return the value that a text stands for; ValueError if it stands for none."""
        kind = float if self.is_share and {*".e"} & {*text.lower()} else type(self.default)
        try:
            value = {"true": True, "1": True, "false": False, "0": False}[text.lower()] if kind is bool else kind(text)
        except (ValueError, KeyError):
            value = text
        return self.check(value)

    def check(self, value: Any) -> Any:
        """Return the value if it is legal; ValueError otherwise."""
        kind, value = type(self.default), as_number(value)
        if self.is_share and isinstance(value, float) and 0 < value < 1:
            return value
        is_legal = isinstance(value, (int, float) if kind is float else kind)
        is_legal = is_legal and isinstance(value, bool) == (kind is bool)
        if is_legal and kind in (int, float):
            low, high = -LARGEST if self.low is None else self.low, LARGEST if self.high is None else self.high
            is_legal = low <= value <= high
        if not is_legal or (self.choices and value not in self.choices):
            shown = f'"{value[:40]}"' if isinstance(value, str) else str(value)[:40]
            raise ValueError(
                f"{self.label} is {shown}, wanted {self.range}{nearest(str(value), [*map(str, self.choices)])}"
            )
        return value


def opt(default: Any, low: float | None = None, high: float | None = None, help: str = "", **more: Any) -> Any:
    """Declare an option as the default of a parameter; `more` are the further fields of `Option`."""
    return Option(default, low, high, help, **more)


def count_of(k: float, tokens: int) -> int:
    """Return how many nearest tokens k means: below 1 it is a share of all tokens, of which there is at least one."""
    return max(round(k * tokens), 1) if 0 < k < 1 else int(k)


def resolved(path: str) -> Any:
    """Return the class or function of a "module:name"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class AddOn:
    """A trained network that methods read beside the target, imported when it is opened.

    `path` and `config_path` are the "module:class" of the network and of its config. A model's folder holds the drafter
    in drafter/, the others in parts/NAME/. `training` is the stage of `lantern train` that makes it, "drafter" or
    "policy", else a command line. `task` is the "module:class" of a policy's training task, `toy` fields of the config
    at the size of tests. `limits_depth`: it drafts at most `config.depths` tokens ahead. `is_target`: it is a target
    itself, of the same family; the others name the target that they were trained for, by its digest in `config.target`.
    """

    name: str
    path: str
    config_path: str
    training: str = "drafter"
    toy: Mapping[str, Any] = field(default_factory=dict)
    limits_depth: bool = False
    is_target: bool = False
    task: str = ""

    @property
    def module(self) -> Any:
        """The class of the network."""
        return resolved(self.path)

    @property
    def config(self) -> Any:
        """The class of its config."""
        return resolved(self.config_path)

    @property
    def folder(self) -> str:
        """Where it lies in a model's folder."""
        return "drafter" if self.name == DRAFTER else f"parts/{self.name}"

    @property
    def command(self) -> str:
        """The command that trains it. MODEL is the model's folder; what comes out belongs into `folder`.

        FILE.py declares a network of another package, which has no config in lantern.
        """
        if self.training == "drafter":
            is_own = self.path.startswith("lantern.")
            start, which = ("lantern", f"kind {self.name}") if is_own else ("python FILE.py", "config CONFIG.json")
            return (
                f"{start} train drafter --{which} --data DATA --target MODEL/transformer "
                "--text-encoder MODEL/text_encoder --tokenizer MODEL/tokenizer --out OUT"
            )
        if self.training == "policy":
            return f"lantern train policy --kind {self.name} --records RECORDS --out OUT"
        return self.training


ADD_ONS: dict[str, AddOn] = {}


def add_on(name: str, module: str, network: str, config: str, **fields: Any) -> None:
    """Declare an add-on by the module and the names of its network and config; ValueError for another one's name."""
    made = AddOn(name, f"{module}:{network}", f"{module}:{config}", **fields)
    if (before := ADD_ONS.get(name, made)).path != made.path:
        raise ValueError(f'add-on "{name}" is declared by {before.path} already: give another name')
    ADD_ONS[name] = made


@dataclass(frozen=True)
class Ask:
    """Something of a model that a method asks for."""

    what: Literal["target", "sampling", "part", "neighbours", "count", "distances", "codebook", "vectors"]
    value: Any = None

    def __str__(self) -> str:
        return self.what if self.value is None else f"{self.what}({self.value})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} of a part is not known yet: make the drafter and the verifier by `lazy`")


@dataclass(frozen=True)
class Deferred:
    """A deferred call of a "module:name"."""

    path: str
    args: tuple[Any, ...]
    named: Mapping[str, Any]

    def walk(self) -> Iterator[Any]:
        """Yield this call and all that its arguments hold."""
        yield self
        for one in (*self.args, *self.named.values()):
            yield from one.walk() if isinstance(one, Deferred) else (one,)

    def make(self, get: Callable[[Ask], Any]) -> Any:
        """Carry it out; `get` returns what is asked for."""

        def real(one: Any) -> Any:
            return one.make(get) if isinstance(one, Deferred) else get(one) if isinstance(one, Ask) else one

        return resolved(self.path)(*map(real, self.args), **{name: real(one) for name, one in self.named.items()})

    def __str__(self) -> str:
        given = [*map(str, self.args), *(f"{name}={one}" for name, one in self.named.items())]
        return f"{self.path.partition(':')[2]}({', '.join(given)})"


def lazy(module: str, *names: str) -> Any:
    """Return deferred classes or functions of a module, which is imported when a method is built."""

    def deferred(path: str) -> Callable[..., Deferred]:
        def call(*args: Any, **named: Any) -> Deferred:
            return Deferred(path, args, named)

        return call

    found = [deferred(f"{module}:{name}") for name in names]
    return found if len(found) > 1 else found[0]


class Parts:
    """The parts of a model that a method may ask for. Only `greedy`, temperature 0, is known while it is described."""

    def __init__(self, greedy: bool = False) -> None:
        self.greedy = greedy
        self.target, self.sampling, self.drafter = Ask("target"), Ask("sampling"), self.part(DRAFTER)

    def part(self, name: str) -> Any:
        """The trained add-on of a name; ValueError for one that is not declared."""
        if name not in ADD_ONS:
            raise ValueError(f'the part "{name}" is not declared: declare it by `add_on`')
        return Ask("part", name)

    def neighbours(self, k: float, spare: bool = False) -> Any:
        """The proximity table with at least k columns, and a `spare` one; ValueError for more than it can have."""
        if k + spare > MAX_NEIGHBOURS:
            raise ValueError(f"k asks for {k + spare} nearest tokens, wanted at most {MAX_NEIGHBOURS}")
        return Ask("neighbours", k if 0 < k < 1 else max(int(k) + spare, 1))

    def count(self, k: float) -> Any:
        """k as a number of tokens; below 1 it is a share of the codebook."""
        return Ask("count", k) if 0 < k < 1 else int(k)

    def distances(self, k: float) -> Any:
        """The distances to the k nearest tokens; None without a codebook."""
        return Ask("distances", k)

    def codebook(self) -> Any:
        """The vectors of the tokens, to report distances; None if the model has none."""
        return Ask("codebook")

    def vectors(self) -> Any:
        """The vectors of the tokens, which the method cannot do without."""
        return Ask("vectors")


@dataclass(frozen=True)
class Made:
    """What a method with chosen options is made of: drafter and verifier, or settings of a `RowFront`; plain: none."""

    drafter: Deferred | None = None
    verifier: Deferred | None = None
    front: Mapping[str, Any] | None = None

    def all(self) -> Iterator[Any]:
        """Yield all calls and their arguments."""
        for call in (self.drafter, self.verifier):
            yield from call.walk() if call else ()

    def asks(self, what: str) -> list[Any]:
        """Return the values with which something is asked for, each once."""
        return list(dict.fromkeys(one.value for one in self.all() if isinstance(one, Ask) and one.what == what))

    @property
    def promise(self) -> Promise:
        """What its images have in common with those of plain decoding; see PROMISES.

        Parts of a verifier from other packages count as exact only if their class says so by `is_exact`.
        """
        inside = [one.path for one in self.verifier.walk() if isinstance(one, Deferred)] if self.verifier else []
        if self.front is not None or not all(map(_is_exact, inside)):
            return "relaxed"
        return "tokens" if all(path.endswith(":GumbelVerifier") for path in inside) else "distribution"

    @property
    def has_foreign(self) -> bool:
        """Whether a class of another package is part of it."""
        return any(isinstance(one, Deferred) and not one.path.startswith("lantern.") for one in self.all())

    @property
    def family(self) -> str:
        """What drafts are made from: the file or folder of its drafter in lantern/drafters."""
        if self.drafter is None:
            return "plain" if self.front is None else "windows"
        return re.split("[.:]", self.drafter.path)[2] if self.drafter.path.startswith("lantern.") else "other"

    @property
    def needs(self) -> tuple[str, ...]:
        """The trained networks that it reads, names in `ADD_ONS`."""
        return tuple(self.asks("part"))

    def columns(self, tokens: int) -> int:
        """Return the columns that it reads of the proximity table of so many tokens; for a share one to spare, if the
        table has room.
        """
        counts = {k: count_of(k, tokens) for k in self.asks("neighbours")}
        return max((max(min(n + (k < 1), MAX_NEIGHBOURS), n) for k, n in counts.items()), default=0)

    @property
    def needs_host(self) -> bool:
        """Whether the host reads a step before it shapes the next, which a CUDA graph cannot replay."""
        calls = [one for one in self.drafter.walk() if isinstance(one, Deferred)] if self.drafter else []
        return any(call.named.get("adaptive") is True or call.named.get("rounds") == 0 for call in calls)


def _is_exact(path: str) -> bool:
    if path.startswith("lantern."):  # which is not imported to be described
        return ".relaxations." not in path
    return getattr(resolved(path), "is_exact", None) is True


@dataclass(frozen=True)
class Method:
    """A method with chosen options. `fixed` are parameters that presets set, `chosen` the options that were set.

    `paper` is an arXiv id, `page` a name in docs/methods. `reason` is why "auto" chose it; empty if it was given.
    """

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Option]
    summary: str
    paper: str = ""
    page: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    chosen: Mapping[str, Any] = field(default_factory=dict)
    reason: str = field(default="", compare=False)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All options with their values."""
        return {name: self.chosen.get(name, one.default) for name, one in self.options.items()}

    @property
    def tree(self) -> str | None:
        """The name of its static tree; None where it has none, as for dynamic trees, "eagle2_NODES_WIDTH_DEPTH"."""
        tree = self.settings.get("tree")
        return None if tree is None or tree.startswith("eagle2_") else tree

    def describe(self, greedy: bool = False) -> Made:
        """Return what it is made of, at temperature 0 if `greedy`; ValueError for options that do not fit together."""
        made = self.function(Parts(greedy), **self.fixed, **self.settings)
        if isinstance(made, tuple) and len(made) == 2 and all(isinstance(one, Deferred) for one in made):
            made = Made(*made)
        if not isinstance(made, Made):
            raise ValueError(
                f'method "{self.name}" returned {str(made)[:60]}, wanted a drafter and a verifier, made lazily'
            )
        return made

    @cached_property
    def made(self) -> Made:
        """What it is made of at a temperature above 0."""
        return self.describe()

    @property
    def promise(self) -> Promise:
        """What its images have in common with those of plain decoding; see PROMISES."""
        return self.made.promise

    @property
    def exact(self) -> bool:
        """Whether images follow the model's own distribution."""
        return self.promise != "relaxed"

    @property
    def is_plain(self) -> bool:
        """Whether it is plain decoding."""
        return self.made == Made()

    @property
    def is_identical(self) -> bool:
        """Whether it drafts and gives the tokens of plain decoding."""
        return self.promise == "tokens" and not self.is_plain

    @property
    def spec(self) -> str:
        """The name and the options that differ from their defaults, as `find` reads them: "gumbel-jacobi:window=4"."""
        texts = [f"{self.options[name].label}={value}" for name, value in self.changed().items()]
        return f"{self.name}:{','.join(texts)}" if texts else self.name

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        return {name: value for name, value in self.settings.items() if value != self.options[name].default}

    def option(self, name: str) -> Option:
        """Return the option of a name; ValueError names those that there are."""
        plain = name.replace("-", "_").rstrip("_")
        for one in self.options.values():
            if one.label == plain:
                return one
        if self.reason:
            is_known = any(one.label == plain for each in METHODS.values() for one in each.options.values())
            own = f'"auto" chose method "{self.name}", which has no setting {plain}: name the method with its settings'
            none = f'no method has a setting "{plain}"; wanted the arguments of the call, or settings of a method'
            raise ValueError(own if is_known else none)
        known = ", ".join(one.label for one in self.options.values())
        takes = f"takes {known}" if known else "takes no settings"
        raise ValueError(
            f'method "{self.name}" has no setting {name.rstrip("_")}: it {takes}{nearest(plain, self.options)}'
        )

    def with_options(self, **options: Any) -> "Method":
        """Return it with some options changed; ValueError for those that it lacks, and for bad values."""
        given = {(one := self.option(name)).name: one.check(value) for name, value in options.items()}
        return dataclasses.replace(self, chosen={**self.chosen, **given})

    def parsed(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the values of options given as texts; ValueError for those that do not fit the method."""
        return {(one := self.option(name)).name: one.parse(text) for name, text in texts.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return as JSON what the tokens depend on."""
        made = {name: None if call is None else str(call) for name, call in vars(self.made).items()}
        return {"name": self.name, **made, "settings": dict(self.settings)}


METHODS: dict[str, Method] = {}
"""The methods with their default options, by name."""


def method(
    *groups: Mapping[str, Option], name: str = "", paper: str = "", page: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a method of the function's name and docstring.

    Options are its parameters with `opt` as their default, and those of `groups`. Other parameters with a default can
    be set by presets only. TypeError for `@method` without parentheses.
    """
    if any(map(callable, groups)):
        raise TypeError("a method is declared by @method without parentheses, wanted @method()")

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(function).parameters.values()
        own = {one.name: one.default for one in parameters if isinstance(one.default, Option)}
        every = {key: one for options in (own, *groups) for key, one in options.items()}
        options = {key: dataclasses.replace(one, name=key) for key, one in every.items()}
        known = name or function.__name__.replace("_", "-")
        page_of = known if page is None else page
        _add(Method(known, function, options, function.__doc__ or "", paper, page_of))
        return function

    return declare


def preset(name: str, base: str, summary: str, *, paper: Any = "", page: Any = "", **changes: Any) -> None:
    """Declare a method that is another one with other defaults, or other values of the parameters without `opt`.

    ValueError for a parameter that the other one does not have.
    """
    old = find(base)
    options = {key: dataclasses.replace(one, fits=False) for key, one in old.options.items()}
    options |= {key: dataclasses.replace(options[key], default=changes[key]) for key in changes if key in options}
    fixed = {key: value for key, value in changes.items() if key not in options}
    if unknown := [key for key in fixed if key not in inspect.signature(old.function).parameters]:
        raise ValueError(f'method "{base}" has no setting {unknown[0]}, whose default "{name}" changes')
    texts = {"name": name, "summary": summary, "paper": paper or old.paper, "page": page or old.page}
    _add(dataclasses.replace(old, options=options, fixed={**old.fixed, **fixed}, **texts))


def _add(one: Method) -> None:
    """Add a method to METHODS; ValueError for a name of another one, and for a name or a value that is not legal."""
    if not re.fullmatch(r"[\w+.-]+", one.name):
        raise ValueError(f'method "{one.name}" has a name that is not of letters, digits, +, - and .: give another one')
    sources = [(each.function.__module__, each.function.__qualname__) for each in (one, METHODS.get(one.name, one))]
    if sources[0] != sources[1]:
        raise ValueError(f'method "{one.name}" is declared by {".".join(sources[1])} already: give another name')
    for option in one.options.values():
        if not isinstance(option.default, bool | int | float | str):
            kind = type(option.default).__name__
            raise ValueError(f"{option.name} of {one.name} is {kind}, wanted a number, a text, True or False")
        for value in (option.default, *option.sweep):
            option.check(value)
        if option.fits and option.name != "window":
            raise ValueError(f"{option.name} of {one.name} has fits, by which a window is chosen: name it window")
    METHODS[one.name] = one


def find(spec: str) -> Method:
    """Return the method of a spec, NAME or NAME:OPTION=VALUE,...; ValueError gives the nearest name or legal values."""
    name, texts = split(spec)
    if name not in METHODS:
        hint = hint_for(name, METHODS, "`lantern methods` and lantern.list_methods() list all")
        raise ValueError(f'method "{name[:80]}" is unknown: {hint}')
    return METHODS[name].with_options(**METHODS[name].parsed(texts))


def split(spec: str) -> tuple[str, dict[str, str]]:
    """Return the name and the options, as texts, of "lantern++:k=5,lambda_=1.5"; ValueError for another form."""
    name, _, rest = str(spec).partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    for option, sign, _ in pairs:
        if not sign:
            raise ValueError(f'method "{name[:80]}" has the option {option[:40]!r}, wanted OPTION=VALUE')
    return name, {option: text for option, _, text in pairs}


def check_same(name: str, one: Any, other: Any) -> None:
    """Raise ValueError for a setting that is given twice with different values."""
    if one != other:
        raise ValueError(f"setting {name} is given twice, as {one} and {other}: give one of them")


def build(method: Method, give: Mapping[str, Any], *, greedy: bool) -> tuple[Any, Any]:
    """Return the drafter and the verifier of a method, made of the parts of a model.

    `give` holds target, sampling, parts by name, neighbours and codebook; ValueError for what is missing.
    """

    table, codebook = give["neighbours"], give["codebook"]

    def get(ask: Ask) -> Any:
        if ask.what == "count":
            return count_of(ask.value, len(table))
        if ask.what == "distances":
            if codebook is None or table is None:
                return None
            distances = resolved("lantern.verifiers.relaxations.neighbours:proximity_distances")
            return distances(codebook, table[:, : count_of(ask.value, len(table))])
        found = codebook if ask.what == "vectors" else give.get(ask.what)
        if ask.what == "part":
            found = give["parts"].get(ask.value)
        if found is None and ask.what != "codebook":
            raise ValueError(f'method "{method.name}" needs {_lacking(ask, method.name)}')
        return found

    made = method.describe(greedy)
    return made.drafter and made.drafter.make(get), made.verifier and made.verifier.make(get)


def check_parts(method: Method, folder: Path) -> None:
    """Raise ValueError if a model's folder lacks a trained network that the method reads."""
    for name in method.made.needs:
        if not os.path.lexists(folder / ADD_ONS[name].folder):
            raise ValueError(f'method "{method.name}" needs {_lacking(Ask("part", name), method.name)}')


def _lacking(ask: Ask, name: str) -> str:
    """Return what a method lacks, and how to get it."""
    if ask.what == "part" and ask.value != DRAFTER:
        return (
            f'the trained part "{ask.value}", which this model lacks: train it (`lantern methods {name} --model '
            f"FOLDER` has the command), and put it into the model's folder as {ADD_ONS[ask.value].folder}"
        )
    return {
        "part": 'a drafter and this model has none: use "plain" or "auto"',
        "neighbours": "the proximity table of the codebook, which this model lacks: it has no VQ decoder",
        "vectors": "the vectors of the tokens, which this model lacks: it has no VQ decoder",
    }[ask.what]
