"""Which methods may be chosen, and at which settings of their knobs."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lantern.catalog import METHODS, Method
from lantern.trees.static import named

WINDOWS = (2, 4, 8, 16, 32, 64)
OTHER_INITS = ("repeat-left", "drafter")  # tried at the best length
# The setting that trades quality for speed, and what is tried of it, gentlest first.
KNOBS: dict[str, tuple[str, tuple[float | int, ...]]] = {
    "lantern": ("delta", (0.05, 0.1, 0.2)),
    "lantern++": ("lambda_", (1.5, 2.0, 3.0, 5.0)),
    "bounded": ("delta", (0.05, 0.1, 0.2)),
    "bounded-window": ("delta", (0.05, 0.1, 0.2)),
    "bounded-woven": ("delta", (0.05, 0.1, 0.2)),
    "cool": ("omega", (1.1, 1.5, 2.0)),
    "grouped": ("group", (4, 8, 14)),
    "tolerance": ("samples", (2, 3)),
    "vadusa": ("samples", (2, 3)),
}


@dataclass(frozen=True)
class Bounds:
    """What relaxed methods may cost: mean total variation a code, or drop in KID, by figures of an evaluation.

    `quality` is {method: {value of its knob: KID drop}}; what is not in it is not admitted under `max_kid`. Without a
    bound only exact methods are candidates. ValueError for a bound on KID without figures.
    """

    max_tv: float | None = None
    max_kid: float | None = None
    quality: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_kid is not None and not self.quality:
            raise ValueError(
                "a bound on KID needs an evaluation run, which tuning is not: give its figures with --quality FILE,"
                ' {"lantern++": {"2.0": 0.0004}}, or bound the total variation with --max-tv'
            )
        for name, drops in self.quality.items():
            if name not in METHODS or not isinstance(drops, Mapping):
                raise ValueError(f"quality figures name {name!r}, wanted a method with {{knob: KID drop}}")
            for knob, drop in drops.items():
                if not _is_number(knob) or not isinstance(drop, int | float) or isinstance(drop, bool):
                    raise ValueError(f"quality figures of {name} hold {knob!r}: {drop!r}, wanted a knob and a KID drop")

    @property
    def admits_relaxed(self) -> bool:
        """Whether any bound is given."""
        return self.max_tv is not None or self.max_kid is not None

    def admits_knob(self, name: str, value: float) -> bool:
        """Whether the KID figures, if they bound anything, allow this value of a method's knob."""
        if self.max_kid is None:
            return True
        drops = {float(knob): drop for knob, drop in self.quality.get(name, {}).items()}
        return value in drops and drops[value] <= self.max_kid

    def admits_variation(self, total_variation: float) -> bool:
        """Whether this mean total variation a code is within bounds."""
        return self.max_tv is None or total_variation <= self.max_tv


@dataclass(frozen=True)
class Variant:
    """A method at fixed settings, all but its tree."""

    method: Method
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, method: Method, settings: Mapping[str, Any]) -> "Variant":
        """The method with these settings."""
        return cls(method.with_options(**settings), settings)

    @property
    def label(self) -> str:
        """Method and settings in words: "lantern++ lambda 2.0"."""
        return describe(self.method.name, self.settings)

    @property
    def is_window(self) -> bool:
        """Whether it drafts a window instead of a tree."""
        return "window" in self.method.options


def describe(name: str, settings: Mapping[str, Any]) -> str:
    """A method and its settings in words, its tree left out."""
    words = [f"{key.rstrip('_')} {value}" for key, value in settings.items() if key != "tree"]
    return " ".join([name, *words])


def needs_drafter(method: Method) -> bool:
    """Whether a method reads the model's drafter: it grows trees, or lets the drafter begin its windows."""
    return "tree" in method.options or method.settings.get("init") == "drafter"


def variants(
    bounds: Bounds,
    *,
    has_drafter: bool,
    codes: int,
    vocabulary: int,
    has_table: bool,
    names: Sequence[str] = (),
    parts: Container[str] = (),
) -> list[Variant]:
    """What may be chosen, the exact ones first; `names` limits it to some methods, plain decoding is always measured.

    Methods with a policy, or without a tree or a window, have nothing to solve for: they are the leaderboard's affair.
    Those that read trained parts need the model's `parts`. ValueError for a name that is none, or that the bounds do
    not admit.
    """
    for name in names:
        if name not in METHODS or name == "auto":
            known = ", ".join(known for known in METHODS if known != "auto")
            raise ValueError(f"method {name!r} cannot be tuned, wanted some of {known}")
        if not METHODS[name].exact and not bounds.admits_relaxed:
            raise ValueError(f'method "{name}" is relaxed: say with --max-tv how much it may cost')
    found = []
    for method in METHODS.values():
        if method.name in ("plain", "auto") or (names and method.name not in names):
            continue
        if method.policy is not None or not {"tree", "window"} & set(method.options):
            continue
        if any(part not in parts for part in method.parts):
            continue
        if method.exact:
            found += _exact(method, has_drafter=has_drafter, codes=codes)
        elif bounds.admits_relaxed and (has_drafter or not needs_drafter(method)):
            found += _relaxed(method, bounds, codes, vocabulary) if has_table or "k" not in method.settings else []
    return sorted(found, key=lambda variant: not variant.method.exact)


def _exact(method: Method, *, has_drafter: bool, codes: int) -> list[Variant]:
    if "window" in method.options:
        return [Variant.of(method, {"window": size}) for size in _sizes(method, codes)]
    return [Variant(method, {})] if has_drafter else []


def _relaxed(method: Method, bounds: Bounds, codes: int, vocabulary: int) -> list[Variant]:
    knob, values = KNOBS.get(method.name, ("", ()))
    if knob not in method.settings:
        return []
    # a table has no more columns than a code has neighbours, of which "released" reads one more
    narrow = {"k": min(method.settings["k"], vocabulary - 2)} if "k" in method.settings else {}
    fixed = {name: value for name, value in narrow.items() if value != method.settings[name]}
    if bounds.max_kid is not None:
        values = tuple(sorted({float(value) for value in bounds.quality.get(method.name, {})}))
    admitted = [value for value in values if bounds.admits_knob(method.name, value)]
    sizes = [{"window": size} for size in _sizes(method, codes)] if "window" in method.options else [{}]
    return [Variant.of(method, {knob: value, **size, **fixed}) for value in admitted for size in sizes]


def _sizes(method: Method, codes: int) -> list[int]:
    """The windows to try: none longer than the picture, nor shorter than the tree that is woven into it."""
    least = named(method.tree).depth if method.tree else 1
    return [size for size in WINDOWS if least < size <= codes]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
