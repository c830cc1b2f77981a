"""Method names: which drafter, tree, verifier and relaxation stand behind each, as plain data.

Importing this costs no torch. A method is added here, in one file of its own, and in one row of the contract test.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Int32
    from torch import Tensor

    from lantern.drafters.eagle import Eagle
    from lantern.sampling import Sampling
    from lantern.types import Condition, Drafter, DraftMode, Generation, Target, Verifier


@dataclass(frozen=True)
class Method:
    """A way of decoding. `drafter` None is plain decoding; `relaxation` None is exact.

    `tree` is a name of `lantern.trees.static`; `mode` says how its children are drawn; `settings` are the arguments of
    the relaxation, by name, and what a user may change.
    """

    name: str
    summary: str
    drafter: str | None = None
    tree: str = "grown_8_2"
    mode: "DraftMode" = "gumbel"
    verifier: str = "gumbel"
    relaxation: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether pictures follow the model's own law."""
        return self.relaxation is None

    @property
    def options(self) -> tuple[str, ...]:
        """What can be set of it by name: its tree, if it drafts, and its settings."""
        return (("tree",) if self.drafter else ()) + tuple(self.settings)

    def with_options(self, **options: Any) -> "Method":
        """The method with some of its `options` changed; ValueError for one that it does not have."""
        for name in options:
            if name not in self.options:
                known = f"takes {', '.join(self.options)}" if self.options else "takes no settings"
                raise ValueError(f'method "{self.name}" has no setting {name.rstrip("_")}: it {known}')
        own = {name: value for name, value in options.items() if name in self.settings}
        rest = {name: value for name, value in options.items() if name not in own}
        return dataclasses.replace(self, settings={**self.settings, **own}, **rest)


RELAXATIONS = {
    "lantern": "lantern.relaxations.lantern:Lantern",
    "lantern++": "lantern.relaxations.lantern_pp:LanternPP",
}
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("plain", "one code a pass; the baseline"),
        Method(
            "eagle1",
            "EAGLE-1 drafts verified by Gumbel match: the picture of plain decoding, code for code",
            drafter="eagle1",
        ),
        Method(
            "eagle1-rejection",
            "EAGLE-1 drafts, sampled, verified by multi-round rejection: exact in law",
            drafter="eagle1",
            mode="sampled",
            verifier="rejection",
        ),
        Method(
            "lantern",
            "relaxed: a draft may claim its k nearest codes' probability up to delta",
            drafter="eagle1",
            mode="sampled",
            verifier="rejection",
            relaxation="lantern",
            settings={"k": 100, "delta": 0.1, "residual": "paper"},
        ),
        Method(
            "lantern++",
            "relaxed: a draft may claim its k nearest codes' probability up to (lambda_ - 1) times its own",
            drafter="eagle1",
            mode="sampled",
            verifier="rejection",
            relaxation="lantern++",
            settings={"k": 10, "lambda_": 2.0, "residual": "paper"},
        ),
        Method(
            "auto",
            "the best exact method that the model has a drafter for",
            drafter="eagle1",
        ),
    )
}


@dataclass(frozen=True)
class Parts:
    """A method put together for a target: `generate` decodes with it. Plain decoding has no drafter and verifier."""

    method: Method
    target: "Target"
    sampling: "Sampling"
    drafter: "Drafter | None"
    verifier: "Verifier | None"

    def generate(self, condition: "Condition", *, keys: Sequence[tuple[int, int]], **watching: Any) -> "Generation":
        """Decodes a batch; `watching` is callback, keep_steps, is_timed and cache of `decoding.loop.generate`."""
        from lantern.decoding import loop, plain

        if self.drafter is None or self.verifier is None:
            return plain.generate(self.target, condition, sampling=self.sampling, keys=keys, **watching)
        return loop.generate(
            self.target,
            condition,
            sampling=self.sampling,
            keys=keys,
            drafter=self.drafter,
            verifier=self.verifier,
            **watching,
        )


def find(name: str) -> Method:
    """The method of a name; ValueError gives the nearest one."""
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(str(name), METHODS, n=1, cutoff=0.4)
    hint = f'did you mean "{near[0]}"?' if near else f"known are {', '.join(METHODS)}"
    raise ValueError(f'method "{str(name)[:80]}" is unknown: {hint}')


def build(
    method: str | Method,
    target: "Target",
    *,
    sampling: "Sampling",
    drafter_module: "Eagle | None" = None,
    neighbours: "Int32[Tensor, 'v k'] | None" = None,
) -> Parts:
    """Puts a method together. `neighbours` is the proximity table that relaxations need.

    ValueError for an unknown name, for what the method needs and the model lacks, and for parts that do not fit.
    """
    method = find(method) if isinstance(method, str) else method
    if method.name == "auto" and drafter_module is None:
        method = METHODS["plain"]
    if method.drafter is None:
        return Parts(method, target, sampling, None, None)
    if drafter_module is None:
        raise ValueError(f'method "{method.name}" needs a drafter and this model has none: use "plain" or "auto"')
    from lantern.decoding.loop import check_modes
    from lantern.drafters.eagle_drafter import EagleDrafter
    from lantern.trees.static import named

    verifier = _verifier(method, sampling, neighbours)
    # At temperature 0 there is nothing to draw: a drafter proposes its most likely codes.
    mode = "point" if sampling.is_greedy and method.mode == "sampled" else method.mode
    drafter = EagleDrafter(drafter_module, target, tree=named(method.tree), mode=mode, sampling=sampling)
    check_modes(drafter, verifier)
    return Parts(method, target, sampling, drafter, verifier)


def _verifier(method: Method, sampling: "Sampling", neighbours: "Tensor | None") -> "Verifier":
    from lantern.verifiers.greedy import GreedyVerifier
    from lantern.verifiers.gumbel import GumbelVerifier
    from lantern.verifiers.rejection import RejectionVerifier

    kinds: dict[str, Any] = {"gumbel": GumbelVerifier, "rejection": RejectionVerifier}
    if method.verifier not in kinds:
        raise ValueError(f'verifier is "{method.verifier}", wanted one of {", ".join(kinds)}')
    if method.relaxation is None:
        return kinds[method.verifier]()
    relaxation = _relaxation(method, neighbours)
    return GreedyVerifier(relaxation) if sampling.is_greedy else kinds[method.verifier](relaxation)


def neighbour_columns(method: Method) -> int:
    """How many nearest codes of each code a method's relaxation reads; 0 if it reads none."""
    return method.settings.get("k", 0) + (method.settings.get("residual") == "released")


def _relaxation(method: Method, neighbours: "Tensor | None") -> Any:
    if method.relaxation not in RELAXATIONS:
        raise ValueError(f'relaxation is "{method.relaxation}", wanted one of {", ".join(RELAXATIONS)}')
    module, name = RELAXATIONS[method.relaxation].split(":")
    kind = getattr(import_module(module), name)
    if "table" not in {entry.name for entry in dataclasses.fields(kind)}:
        return kind(**method.settings)
    if neighbours is None:
        raise ValueError(
            f'method "{method.name}" needs the proximity table of the codebook: build it with `neighbours`'
        )
    return kind(neighbours, **method.settings)
