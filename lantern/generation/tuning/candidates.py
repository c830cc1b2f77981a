"""The candidates of tuning: which methods, at which settings."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lantern.methods import METHODS, Method

WINDOWS = (2, 4, 8, 16, 32, 64)
OTHER_INITS = ("random", "repeat-left")  # tried at the best length


@dataclass(frozen=True)
class Bounds:
    """Bounds on the cost in quality of relaxed methods: mean total variation per token, or loss in KID.

    `quality` holds the KID losses of an evaluation, {method: {value of its knob: loss}}; `max_kid` excludes everything
    that is not in it. Without a bound only exact methods are candidates. ValueError for `max_kid` without `quality`.
    """

    max_tv: float | None = None
    max_kid: float | None = None
    quality: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_kid is not None and not self.quality:
            raise ValueError(
                "a bound on KID needs the figures of an evaluation: give them with --quality FILE,"
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
        """Whether any bound is given, which admits relaxed methods."""
        return self.max_tv is not None or self.max_kid is not None

    def admits_knob(self, name: str, value: float) -> bool:
        """Return whether `max_kid` admits this value of a method's knob."""
        if self.max_kid is None:
            return True
        drops = {float(knob): drop for knob, drop in self.quality.get(name, {}).items()}
        return value in drops and drops[value] <= self.max_kid

    def admits_variation(self, total_variation: float) -> bool:
        """Return whether `max_tv` admits this mean total variation per token."""
        return self.max_tv is None or total_variation <= self.max_tv


@dataclass(frozen=True)
class Variant:
    """A method at fixed settings; its tree is still open."""

    method: Method
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, method: Method, settings: Mapping[str, Any]) -> "Variant":
        """Return the method with these settings."""
        return cls(method.with_options(**settings), settings)

    @property
    def label(self) -> str:
        """Method and settings as text: "lantern++ lambda 2.0"."""
        return describe(self.method.name, self.settings)

    @property
    def is_window(self) -> bool:
        """Whether the method drafts a window instead of a tree."""
        return "window" in self.method.options


def describe(name: str, settings: Mapping[str, Any]) -> str:
    """Return a method and its settings as text, without its tree."""
    words = [f"{key.rstrip('_')} {value}" for key, value in settings.items() if key != "tree"]
    return " ".join([name, *words])


def variants(
    bounds: Bounds,
    *,
    has_drafter: bool,
    tokens: int,
    vocabulary: int,
    has_table: bool,
    names: Sequence[str] = (),
    parts: Container[str] = (),
) -> list[Variant]:
    """Return the candidates, exact ones first; `names` restricts them. Plain decoding is always measured besides.

    Methods with dynamic trees, or without tree and window, have nothing to tune and are left out, as are methods whose
    add-ons are not in `parts`. ValueError for an unknown name and for one that the bounds exclude.
    """
    for name in names:
        if name not in METHODS or name == "auto":
            known = ", ".join(known for known in METHODS if known != "auto")
            raise ValueError(f"method {name!r} cannot be tuned, wanted some of {known}")
        if not METHODS[name].exact and not bounds.admits_relaxed:
            raise ValueError(f'method "{name}" is relaxed: give a bound on its cost with --max-tv')
    found = []
    for method in METHODS.values():
        if method.name in ("plain", "auto") or (names and method.name not in names):
            continue
        if method.tree is None and "window" not in method.options:
            continue
        if any(part not in parts for part in method.made.parts):
            continue
        if method.exact:
            found += _exact(method, has_drafter=has_drafter, tokens=tokens)
        elif bounds.admits_relaxed and (has_drafter or not method.made.reads_drafter):
            found += _relaxed(method, bounds, tokens, vocabulary) if has_table or "k" not in method.settings else []
    return sorted(found, key=lambda variant: not variant.method.exact)


def _exact(method: Method, *, has_drafter: bool, tokens: int) -> list[Variant]:
    if "window" in method.options:
        return [Variant.of(method, {"window": size}) for size in _sizes(method, tokens)]
    return [Variant(method, {})] if has_drafter else []


def swept(method: Method) -> tuple[str, tuple[float, ...]]:
    """Return the setting of a relaxed method that trades quality for speed, and the values that are tried of it."""
    return next((option.name, option.sweep) for option in method.options.values() if option.sweep)


def _relaxed(method: Method, bounds: Bounds, tokens: int, vocabulary: int) -> list[Variant]:
    knob, values = swept(method)
    # a table has at most as many columns as a token has neighbours, and "released" reads one more
    narrow = {"k": min(method.settings["k"], vocabulary - 2)} if "k" in method.settings else {}
    fixed = {name: value for name, value in narrow.items() if value != method.settings[name]}
    if bounds.max_kid is not None:
        values = tuple(sorted({float(value) for value in bounds.quality.get(method.name, {})}))
    admitted = [value for value in values if bounds.admits_knob(method.name, value)]
    sizes = [{"window": size} for size in _sizes(method, tokens)] if "window" in method.options else [{}]
    return [Variant.of(method, {knob: value, **size, **fixed}) for value in admitted for size in sizes]


def _sizes(method: Method, tokens: int) -> list[int]:
    """Return the window lengths to try: at most the image's tokens."""
    return [size for size in WINDOWS if 1 < size <= tokens]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
