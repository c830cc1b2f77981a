"""Method names: which drafter, tree, verifier and relaxation stand behind each, as plain data.

Importing this costs no torch. A method is added here, in one file of its own, and in one row of the contract test.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
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

    `tree` is a name of `lantern.trees.static`; `mode` says how its children are drawn; `k`, `delta`, `lambda_` and
    `residual` belong to the relaxations.
    """

    name: str
    summary: str
    drafter: str | None = None
    tree: str = "grown_8_2"
    mode: "DraftMode" = "gumbel"
    verifier: str = "gumbel"
    relaxation: str | None = None
    k: int = 0
    delta: float = 0.0
    lambda_: float = 1.0
    residual: str = "paper"

    @property
    def exact(self) -> bool:
        """Whether pictures follow the model's own law."""
        return self.relaxation is None


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
            k=100,
            delta=0.1,
        ),
        Method(
            "lantern++",
            "relaxed: a draft may claim its k nearest codes' probability up to (lambda_ - 1) times its own",
            drafter="eagle1",
            mode="sampled",
            verifier="rejection",
            relaxation="lantern++",
            k=10,
            lambda_=2.0,
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
    if neighbours is None:
        raise ValueError(
            f'method "{method.name}" needs the proximity table of the codebook: build it with `neighbours`'
        )
    relaxation = _relaxation(method, neighbours)
    return GreedyVerifier(relaxation) if sampling.is_greedy else kinds[method.verifier](relaxation)


def _relaxation(method: Method, neighbours: "Tensor") -> Any:
    from lantern.relaxations.lantern import Lantern
    from lantern.relaxations.lantern_pp import LanternPP

    if method.relaxation == "lantern":
        return Lantern(neighbours, k=method.k, delta=method.delta, residual=method.residual)
    if method.relaxation == "lantern++":
        return LanternPP(neighbours, k=method.k, lambda_=method.lambda_, residual=method.residual)
    raise ValueError(f'relaxation is "{method.relaxation}", wanted "lantern" or "lantern++"')
