"""Comparisons at equal budget: the claims of methods, and tests of them in the same rounds.

A tree policy is compared with the best constant trees of as many nodes, built from the acceptance rate of each rank at
each depth, measured on images of another seed. A drafter is compared with others at the same tree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lantern.drafters.trees.static import StaticTree
from lantern.eval.speed.contenders import PLAIN, Contender, Job
from lantern.generation.tuning.acceptance import Tally, probing_tree
from lantern.generation.tuning.solve import likeliest_nodes
from lantern.methods.registry import METHODS, Method

INT4 = "@int4"  # suffix of a spec: target with 4-bit weights
PILOTS = 3  # pictures that acceptance rates are measured on
PROBING, WIDTH = 41, 16  # nodes of the tree that measures rates, and its children per node
LEAST_RATE = 1e-3  # lower bound of the first rank's rate, so that unobserved ranks keep their order
SHALLOW = 3  # depth of a constant tree with few draft passes
DEEP = 2  # codes below this depth are late ones, as in PosS


@dataclass(frozen=True)
class Beats:
    """A test: the claimant has `more` (or less) of a figure of `FIGURES` than the best of the others."""

    figure: str
    more: bool = True


@dataclass(frozen=True)
class Claim:
    """A claim of a method: `specs[0]` is tested against the others; `context` contenders are only shown."""

    method: str
    statement: str
    specs: tuple[str, ...]
    tests: tuple[Beats, ...]
    shown: tuple[str, ...] = ()
    context: tuple[str, ...] = ()

    @property
    def contenders(self) -> tuple[str, ...]:
        """All contenders that are measured."""
        return (*self.specs, *self.context)

    @property
    def figures(self) -> tuple[str, ...]:
        """The columns of its table."""
        return tuple(dict.fromkeys((*(test.figure for test in self.tests), *self.shown)))


FIGURES = {
    "step_compression": "codes per pass",
    "seconds": "seconds per image",
    "codes_per_second": "codes per second",
    "nodes_per_pass": "drafted nodes per pass",
    "late_acceptance": f"acceptance below depth {DEEP}",
    "draft_passes": "drafter passes per step",
    "draft_pass_ms": "ms per drafter pass",
    "draft_share": "drafting share of time",
    "head_ms": "ms of the drafter's head",
    "kv_length": "cached keys of the drafter",
    "parameters": "trained parameters",
}
MORE_CODES, LESS_TIME = Beats("step_compression"), Beats("seconds", more=False)


def at_tree(name: str, tree: str | None) -> str:
    """Return the spec of a method with a tree."""
    return name if METHODS[name].tree == tree else f"{name}:tree={tree}"


def against(
    name: str, statement: str, others: Sequence[str], tests: tuple[Beats, ...], *shown: str, context: Sequence[str] = ()
) -> Claim:
    """Return a claim of a drafter against others at its own tree."""
    rivals, more = (tuple(at_tree(other, METHODS[name].tree) for other in names) for names in (others, context))
    return Claim(name, statement, (name, *rivals), tests, shown, more)


CLAIMS = (
    against(
        "poss",
        "position specialists raise acceptance of late drafts",
        ("eagle1", "eagle3"),
        (Beats("late_acceptance"), MORE_CODES),
        "seconds",
        "parameters",
    ),
    against(
        "fr-spec",
        "a head over frequent codes takes less time at little loss of acceptance",
        ("eagle1",),
        (Beats("head_ms", more=False), LESS_TIME),
        "step_compression",
        "draft_share",
    ),
    against(
        "vispec",
        "a compressed context shortens the drafter's cache at no loss of acceptance",
        ("eagle1",),
        (Beats("kv_length", more=False), MORE_CODES),
        "draft_pass_ms",
        "seconds",
    ),
    against(
        "parallelspec",
        "one pass for all depths makes drafting cheap",
        ("eagle1",),
        (Beats("draft_passes", more=False), Beats("draft_share", more=False)),
        "step_compression",
        "seconds",
        "parameters",
        context=("medusa",),
    ),
    Claim(
        "c2t-paper",
        "a classifier scores fewer nodes than EAGLE-2 for as many codes per pass",
        ("c2t-paper", "eagle2-paper"),
        (Beats("nodes_per_pass", more=False), MORE_CODES),
        ("seconds",),
        ("eagle2-paper:nodes=44",),
    ),
    Claim(
        "ddd-paper",
        "a depth that ends where little probability is left takes less time than a fixed one",
        ("ddd-paper", "eagle2-paper:depth=11", "eagle2-paper"),
        (LESS_TIME, MORE_CODES),
        ("draft_passes", "draft_share"),
    ),
    Claim(
        "radar-paper",
        "a learned depth takes less time than a fixed one",
        ("radar-paper", "eagle2-paper:depth=7", "eagle2-paper:depth=3"),
        (LESS_TIME, MORE_CODES),
        ("draft_passes", "draft_share"),
    ),
    Claim(
        "specmquant",
        "on a full-precision target a tree is faster than a cascade",
        ("eagle1", "specmquant"),
        (Beats("codes_per_second"),),
        ("step_compression", "nodes_per_pass"),
        (PLAIN,),
    ),
    Claim(
        "specmquant",
        "on a 4-bit target, where a pass over a tree is expensive, a cascade is faster than a tree",
        (f"specmquant:small_bits=4{INT4}", f"eagle1{INT4}"),
        (Beats("codes_per_second"),),
        ("step_compression", "nodes_per_pass"),
        (f"{PLAIN}{INT4}",),
    ),
)


@dataclass(frozen=True)
class Constants:
    """Acceptance rates for constant trees: `rates[d][r]` is the probability that rank r is accepted at depth d."""

    rates: list[list[float]]
    depth: int

    @staticmethod
    def probing(depth: int, codes: int) -> StaticTree:
        """Return the tree that measures the rates, for a codebook of `codes` codes."""
        return probing_tree([], nodes=PROBING, depth=depth, width=min(WIDTH, codes))

    @classmethod
    def measured(cls, pilot: Contender, jobs: Sequence[Job], depth: int, config: Any) -> "Constants":
        """Return the rates of a contender that drafts the probing tree."""
        tally = Tally(config.block_size, depth, min(WIDTH, config.vocab_size))
        for job in jobs:
            pilot.decode(job, callback=tally)
        tally.count()
        return cls(tally.rates(), depth)

    def tree(self, nodes: int, depth: int) -> StaticTree:
        """Return the constant tree of `nodes` drafted nodes and at most `depth` with the best expected acceptance."""
        floors = [LEAST_RATE / (rank + 1) for rank in range(len(self.rates[0]))]
        rates = [[max(pair) for pair in zip(row, floors, strict=True)] for row in self.rates]
        found = (choice for _, choice in likeliest_nodes(rates, min(depth, self.depth)))
        return StaticTree(tuple(choice for choice, _ in zip(found, range(nodes), strict=False)))


def claims(nodes: Mapping[str, float], constants: Callable[[str, int], Constants]) -> list[Claim]:
    """Return the claims of the measured methods; `nodes` has the drafted nodes per pass of each, by spec.

    `constants` returns the acceptance rates of constant trees for a base method, down to a depth.
    """
    with_policy = [spec for spec in nodes if spec in METHODS and METHODS[spec].spec.policy is not None]
    policies = [claim_of_policy(spec, nodes[spec], constants) for spec in with_policy]
    return [*filter(None, policies), *(claim for claim in CLAIMS if claim.method in nodes)]


def base_of(method: Method) -> str | None:
    """Return the method with the same verification and constant trees, or None."""
    for name, other in METHODS.items():
        same = ("mode", "verifier", "relaxation")
        is_alike = all(getattr(method.spec, field) == getattr(other.spec, field) for field in same)
        is_eagle = other.spec.family == "eagle" and other.spec.needs_drafter and other.spec.add_on is None
        if is_alike and is_eagle and other.tree is not None and name != "auto":
            return name
    return None


def claim_of_policy(name: str, nodes: float, constants: Callable[[str, int], Constants]) -> Claim | None:
    """Return the claim of a policy against the best constant trees of as many nodes per pass."""
    base = base_of(METHODS[name])
    if base is None:
        return None
    depth = max(
        entry.settings["depth"] for entry in METHODS.values() if entry.spec.policy and "depth" in entry.settings
    )
    best = constants(base, depth)
    trees = dict.fromkeys(best.tree(max(round(nodes), 1), deepest) for deepest in (depth, SHALLOW))
    return Claim(
        name,
        "dynamic trees reach a higher acceptance than the best constant tree of as many nodes",
        (name, *(f"{base}:tree={tree.spelling}" for tree in trees)),
        (MORE_CODES, LESS_TIME),
        ("nodes_per_pass", "draft_passes", "draft_share"),
    )
