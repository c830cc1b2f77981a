"""The candidates of tuning: which methods, at which settings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lantern.drafters.trees.static import grown
from lantern.generation.generator import has_parts
from lantern.methods import METHODS, Method
from lantern.methods.parts import ADD_ONS
from lantern.models.folder import Model

WINDOWS = (2, 4, 8, 16, 32, 64)
NODES = (4, 8, 16, 32, 64, 128, 256)  # of a tree, the root included
CHANCES = (0.3, 0.7)  # that a drafted token is accepted: trees are wide for the first, deep for the second
WIDEST = 16


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

    def admits_variation(self, total_variation: float) -> bool:
        """Return whether `max_tv` admits this mean total variation per token."""
        return self.max_tv is None or total_variation <= self.max_tv

    def knobs(self, method: Method) -> list[dict[str, Any]]:
        """Return the admitted settings of the option of a relaxed method that trades quality for speed."""
        name, values = swept(method)
        if self.max_kid is not None:
            drops = {float(value): drop for value, drop in self.quality.get(method.name, {}).items()}
            values = tuple(value for value in sorted(drops) if drops[value] <= self.max_kid)
        return [{name: value} for value in values]


def swept(method: Method) -> tuple[str, tuple[float, ...]]:
    """Return the setting of a relaxed method that trades quality for speed, and the values that are tried of it."""
    return next((option.name, option.sweep) for option in method.options.values() if option.sweep)


def candidates(
    model: Model, bounds: Bounds, *, max_nodes: int = 32, max_depth: int = 8, names: Sequence[str] = ()
) -> list[Method]:
    """Return the methods with the settings to measure, exact ones first; `names` restricts them.

    Methods with dynamic trees, or without tree and window, have nothing to tune and are left out, as are methods whose
    networks or codebook the model lacks. ValueError for an unknown name and for one that the bounds exclude.
    """
    for name in names:
        if name not in METHODS or name == "auto":
            known = ", ".join(known for known in METHODS if known != "auto")
            raise ValueError(f"method {name!r} cannot be tuned, wanted some of {known}")
        if not METHODS[name].exact and not bounds.admits_relaxed:
            raise ValueError(f'method "{name}" is relaxed: give a bound on its cost with --max-tv')
    found, has_table = [], bounds.admits_relaxed and model.codebook is not None
    for method in METHODS.values():
        is_admitted = method.exact or (bounds.admits_relaxed and (has_table or "k" not in method.options))
        if is_admitted and has_parts(model, method) and (not names or method.name in names):
            knobs = [{}] if method.exact else bounds.knobs(method)
            shapes = list(shapes_of(method, model, max_nodes, max_depth))
            # the codebook may have fewer neighbours than the default; a method may read one more than it uses
            most = model.target.config.vocab_size - 2
            own = {"k": most} if method.settings.get("k", 0) > most else {}
            found += [method.with_options(**own, **knob, **one) for knob in knobs for one in shapes]
    return sorted(found, key=lambda one: not one.exact)


def shapes_of(method: Method, model: Model, max_nodes: int, max_depth: int) -> Iterator[dict[str, Any]]:
    """Yield the windows or the trees to try, as settings; some add-ons draft a limited number of tokens."""
    if "window" in method.options:
        yield from ({"window": size} for size in WINDOWS if size <= model.target.config.block_size)
    elif method.tree is not None:
        deep: list[Any] = [model.add_ons[name] for name in method.made.parts if ADD_ONS[name].limits_depth]
        depth = min([max_depth, *(part.config.depths for part in deep)])
        ranks = range(min(WIDEST, model.target.config.vocab_size))
        sizes = [nodes for nodes in NODES if nodes < max_nodes] + [max_nodes]
        likely = [[chance * (1 - chance) ** rank for rank in ranks] for chance in CHANCES]
        trees = dict.fromkeys(grown(nodes - 1, depth, rates) for nodes in sizes for rates in likely)
        yield from ({"tree": tree.spelling} for tree in trees)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
