"""What a method is: a `MethodSpec`, declared once in the file of its drafter, policy or relaxation. Needs no torch.

`DrafterContext` is what every build(method, context) of a drafter takes.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from lantern.engines.engine import ENGINES as KNOWN_ENGINES

if TYPE_CHECKING:
    from jaxtyping import Float, Int32
    from torch import Tensor, nn

    from lantern.core.sampling import Sampling
    from lantern.core.types import Drafter, DraftMode, Target
    from lantern.drafters.eagle.eagle1 import Eagle


Value = bool | int | float | str
Promise = Literal["codes", "distribution", "relaxed"]
# what drafts are made from; also the folders of lantern/drafters
Family = Literal["plain", "eagle", "heads", "windows", "lookup", "combined"]
PROMISES: dict[str, str] = {
    "codes": "the codes of plain decoding, except for rounding where the engine does not keep the bits",
    "distribution": "other codes than plain decoding, from the same distribution",
    "relaxed": "another distribution; the total variation per code is reported",
}
ENGINES = tuple(name for name in KNOWN_ENGINES if name != "auto")
DRAFTER = "eagle1"  # the add-on that is a component of the model, in drafter/ instead of parts/<name>/


@dataclass(frozen=True)
class Setting:
    """A value of a method that a user can change.

    The type is that of `default`. `low` and `high` are bounds of numbers, inclusive. `choices` lists all legal values.
    `sweep` lists the values that tuning tries, gentlest first; a relaxed method has one setting with a sweep.
    `old_name` is a deprecated name under which it is still accepted.
    """

    name: str
    default: Value
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[Value, ...] = ()
    sweep: tuple[float, ...] = ()
    old_name: str = ""

    @property
    def flag(self) -> str:
        """The option of `lantern-generate`: "--p-radius" of p_radius, "--lambda" of lambda_."""
        return "--" + self.label.replace("_", "-")

    @property
    def label(self) -> str:
        """The name without the underscore that keeps it from being a keyword of Python."""
        return self.name.rstrip("_")

    @property
    def type_name(self) -> str:
        """The type in words: bool, int, float or str."""
        return type(self.default).__name__

    @property
    def range(self) -> str:
        """The legal values in words, such as "a whole number from 0 to 1024"."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        noun = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a name"}[self.type_name]
        if self.low is None or self.high is None:
            return noun if self.low is None else f"{noun} of at least {self.low:.10g}"
        return f"{noun} from {self.low:.10g} to {self.high:.10g}"

    def check(self, value: Any) -> Value:
        """Return the value if it is legal; ValueError otherwise."""
        kind = type(self.default)
        is_legal = isinstance(value, int | float if kind is float else kind) and isinstance(value, bool) == (
            kind is bool
        )
        if is_legal and kind in (int, float):
            low, high = -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high
            is_legal = math.isfinite(float(value)) and low <= float(value) <= high
        if not is_legal or (self.choices and value not in self.choices):
            near = difflib.get_close_matches(str(value), list(map(str, self.choices)), n=1)
            shown = f'"{value[:40]}"' if isinstance(value, str) else str(value)[:40]
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise ValueError(f"{self.label} is {shown}, wanted {self.range}{hint}")
        return value

    def parse(self, text: str) -> Value:
        """Return the value that a text stands for; ValueError if it stands for none."""
        kind = type(self.default)
        try:
            if kind is bool:
                return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
            value: Value = kind(text)
        except (ValueError, KeyError):
            raise ValueError(f'{self.label} is "{text[:40]}", wanted {self.range}') from None
        return self.check(value)


@dataclass(frozen=True)
class AddOn:
    """A trained network that methods read beside the target. The model's folder holds it as parts/<name>/.

    `module` and `config` are its classes. `training` names what makes it: "drafter" and "policy" are stages of
    `lantern train`, anything else is a command line. `training_config` is the configuration that they take by default.
    `task` is the "module:class" of a policy's training task.
    `toy` are fields of the config at the size of tests. `limits_depth` means that it drafts at most `config.depths`
    codes ahead, `names_target` that `config.target` is the digest of the target it was trained for. With `is_target` it
    is a target itself: beside a model of transformers, the folder holds one of the same family.
    """

    name: str
    module: Any
    config: Any
    training: str = "drafter"
    training_config: str = ""
    task: str = ""
    toy: Mapping[str, Any] = field(default_factory=dict)
    limits_depth: bool = False
    names_target: bool = True
    is_target: bool = False

    @property
    def folder(self) -> str:
        """Where it lies in a model's folder."""
        return "drafter" if self.name == DRAFTER else f"parts/{self.name}"

    @property
    def command(self) -> str:
        """The command that trains it. MODEL is the model's folder; what comes out belongs into `folder`."""
        if self.training == "drafter":
            return (
                f"lantern train drafter --kind {self.name} --data DATA --target MODEL/transformer "
                "--text-encoder MODEL/text_encoder --tokenizer MODEL/tokenizer --out OUT"
            )
        if self.training == "policy":
            return f"lantern train policy --kind {self.name} --records RECORDS --out OUT"
        return self.training


@dataclass(frozen=True)
class MethodSpec:
    """A method as its file declares it: what it is made of, and what can be set.

    `drafter` builds the drafter: a function of (method, context), or its "module:name"; None is plain decoding, or a
    method with a `loop` of its own: a function, or its "module:name", with the arguments of `decoding.plain.generate`
    and the settings. It commits codes in another order, so its images have another distribution.
    `tree` is the default draft tree, a name of `lantern.drafters.trees.static`; None for drafters that shape their
    drafts themselves. `mode` is how children are sampled. `verifier` is a name of `lantern.methods.registry.VERIFIERS`.
    `policy` and `relaxation` are classes, or their "module:name". Fields of theirs and of the verifier that are
    settings take their values. `add_ons` are the trained networks that it reads, each as an AddOn or as the name of
    one that another method declares. `fits_engine` means that the window, on which codes do not depend, is chosen for
    the engine unless the user sets it. `paper` is an arXiv id. `page` is a
    name in docs/methods, by default the method's.
    """

    name: str
    summary: str
    family: Family
    drafter: "Callable[[Method, DrafterContext], Drafter] | str | None" = None
    tree: str | None = None
    mode: "DraftMode" = "gumbel"
    verifier: str = "gumbel"
    policy: Any = None
    relaxation: Any = None
    loop: Any = None
    settings: tuple[Setting, ...] = ()
    add_ons: tuple[AddOn | str, ...] = ()
    engines: tuple[str, ...] = ENGINES
    fits_engine: bool = False
    paper: str = ""
    page: str | None = None

    @property
    def promise(self) -> Promise:
        """What its images have in common with plain decoding's; see PROMISES."""
        if self.relaxation is not None or self.loop is not None:
            return "relaxed"
        return "codes" if self.verifier == "gumbel" else "distribution"

    @cached_property
    def options(self) -> Mapping[str, Setting]:
        """All that can be set, by name: the tree, if there is one, and the settings."""
        tree = Setting("tree", self.tree or "", "draft tree, such as grown_8_2, naive_extend_57 or chain_5")
        return {setting.name: setting for setting in ((tree,) if self.tree else ()) + self.settings}

    @property
    def add_on(self) -> str | None:
        """The name of the trained part that it reads beside the model's own drafter."""
        names = [entry if isinstance(entry, str) else entry.name for entry in self.add_ons]
        return next((name for name in names if name != DRAFTER), None)

    @property
    def needs_drafter(self) -> bool:
        """Whether it reads the model's own drafter, in drafter/."""
        return any((entry if isinstance(entry, str) else entry.name) == DRAFTER for entry in self.add_ons)

    def preset(
        self, name: str, summary: str, *, defaults: Mapping[str, Value] = MappingProxyType({}), **changes: Any
    ) -> "MethodSpec":
        """Return a method on the same page with other `defaults` of its settings, and `changes` of other fields.

        ValueError for a default of an unknown setting.
        """
        if unknown := [key for key in defaults if all(key != one.name for one in self.settings)]:
            raise ValueError(f'method "{self.name}" has no setting {unknown[0]}, whose default "{name}" changes')
        own = tuple(dataclasses.replace(one, default=defaults.get(one.name, one.default)) for one in self.settings)
        given = {"settings": own, "page": self.page or self.name, "fits_engine": False} | changes
        return dataclasses.replace(self, name=name, summary=summary, **given)

    def method(self) -> "Method":
        """The method with its default settings."""
        return Method(self, self.tree, {setting.name: setting.default for setting in self.settings})


@dataclass(frozen=True)
class Method:
    """A method with chosen settings: what decodes. `tree` is None where the method has no static tree.

    `reason` is why "auto" chose this method; empty if it was given.
    """

    spec: MethodSpec
    tree: str | None
    settings: Mapping[str, Any]
    reason: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """The method's name."""
        return self.spec.name

    @property
    def summary(self) -> str:
        """The method in one line."""
        return self.spec.summary

    @property
    def exact(self) -> bool:
        """Whether images follow the model's own distribution."""
        return self.spec.promise != "relaxed"

    @property
    def is_plain(self) -> bool:
        """Whether it is plain decoding."""
        return self.spec.drafter is None and self.spec.loop is None

    @property
    def is_identical(self) -> bool:
        """Whether it drafts and gives the codes of plain decoding."""
        return self.spec.promise == "codes" and not self.is_plain

    @property
    def options(self) -> tuple[str, ...]:
        """The names of what can be set: the tree, if there is one, and the settings."""
        return tuple(self.spec.options)

    @property
    def label(self) -> str:
        """The name and the options that differ from their defaults: "gumbel-jacobi window 4"."""
        return " ".join([self.name, *(f"{name.rstrip('_')} {value}" for name, value in self.changed().items())])

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        values = {"tree": self.tree, **self.settings}
        return {name: values[name] for name, option in self.spec.options.items() if values[name] != option.default}

    def with_options(self, **options: Any) -> "Method":
        """Return the method with some of its `options` changed; ValueError for one that it lacks and for bad values."""
        checked = {(option := self.option(name)).name: option.check(value) for name, value in options.items()}
        tree = checked.pop("tree", self.tree)
        return dataclasses.replace(self, tree=tree, settings={**self.settings, **checked})

    def parsed(self, texts: Mapping[str, str]) -> dict[str, Value]:
        """Return the values of settings given as texts; ValueError for those that do not fit the method."""
        return {(option := self.option(name)).name: option.parse(text) for name, text in texts.items()}

    def option(self, name: str) -> Setting:
        """Return the option of a name; ValueError names those that there are."""
        name = next((option.name for option in self.spec.settings if option.old_name == name != ""), name)
        if name not in self.spec.options:
            known = ", ".join(option.label for option in self.spec.options.values())
            takes = f"takes {known}" if known else "takes no settings"
            raise ValueError(f'method "{self.name}" has no setting {name.rstrip("_")}: it {takes}')
        return self.spec.options[name]

    def with_spec(self, **changes: Any) -> "Method":
        """Return the method made of other parts, with the settings that it has then; for experiments and tests."""
        spec = dataclasses.replace(self.spec, **changes)
        made = spec.method()
        kept = {name: value for name, value in self.settings.items() if name in made.settings}
        tree = made.tree if "tree" in changes else self.tree
        return dataclasses.replace(made, tree=tree, settings={**made.settings, **kept})

    def as_dict(self) -> dict[str, Any]:
        """Return as JSON what the codes depend on."""
        spec = self.spec
        return {
            "name": self.name,
            "drafter": label_of(spec.loop or spec.drafter),
            "tree": self.tree,
            "mode": spec.mode,
            "verifier": spec.verifier,
            "relaxation": label_of(spec.relaxation),
            "policy": label_of(spec.policy),
            "part": spec.add_on,
            "settings": dict(self.settings),
        }


def resolved(reference: Any) -> Any:
    """Return the object that a "module:name" names; any other object is returned as it is."""
    if not isinstance(reference, str):
        return reference
    module, name = reference.split(":")
    return getattr(import_module(module), name)


def label_of(reference: Any) -> str | None:
    """Return the "module:name" of a function or class."""
    if reference is None or isinstance(reference, str):
        return reference
    return f"{reference.__module__}:{reference.__qualname__}"


@dataclass(frozen=True)
class DrafterContext:
    """The components of a model that drafters read.

    `module` is the model's own drafter, `add_ons` its other trained networks by name, `neighbours` the proximity table
    and `codebook` the vectors of the codes.
    """

    target: "Target"
    sampling: "Sampling"
    module: "Eagle | None" = None
    add_ons: "Mapping[str, nn.Module]" = field(default_factory=dict)
    neighbours: "Int32[Tensor, 'v k'] | None" = None
    codebook: "Float[Tensor, 'v d'] | None" = None

    def mode(self, method: Method) -> "DraftMode":
        """Return how children are sampled; at temperature 0 a sampled draft is the most likely code."""
        return "point" if self.sampling.is_greedy and method.spec.mode == "sampled" else method.spec.mode

    def records_log_q(self, method: Method) -> bool:
        """Return whether a relaxation reads log q of drafts that do not record it otherwise. Recording costs a copy."""
        return method.spec.relaxation is not None and self.mode(method) == "gumbel" and not self.sampling.is_greedy

    def eagle(self, method: Method) -> "Eagle":
        """Return the model's own drafter; ValueError if the model has none."""
        if self.module is None:
            raise ValueError(f'method "{method.name}" needs a drafter and this model has none: use "plain" or "auto"')
        return self.module

    def add_on(self, method: Method) -> "nn.Module":
        """Return the trained part that a method reads; ValueError if the model lacks it."""
        name = method.spec.add_on
        if name is None or name not in self.add_ons:
            raise ValueError(
                f'method "{method.name}" needs the trained part "{name}", which this model lacks: train it '
                f"(`lantern methods {method.name}` has the command), and put it into the model's folder as parts/{name}"
            )
        return self.add_ons[name]
