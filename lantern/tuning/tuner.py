"""`tune`: measures, solves, tries the best in real runs, and says in a profile what was found."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import Any

from lantern.catalog import METHODS, Method, neighbour_columns
from lantern.generate import neighbours_for
from lantern.tuning import measure
from lantern.tuning.candidates import OTHER_INITS, Bounds, Variant, describe, needs_drafter, variants
from lantern.tuning.costs import Costs, Laps, fit_costs, fit_verify
from lantern.tuning.machine import describe_machine
from lantern.tuning.measure import Acceptance, Run, Setup
from lantern.tuning.profile import VERSION
from lantern.tuning.solve import solve

MARGIN = 1.03  # a method must beat plain decoding by this much: less is noise
HOPEFUL = 1.15  # predictions may be so much too high before a candidate is not even tried


@dataclass(frozen=True)
class Effort:
    """How much is measured: trees of at most `max_nodes` (root included) and `max_depth`, so many steps and pictures.

    `steps` of each timed tree are counted, in each of `rounds`; acceptance is counted on `batches` batches, and
    `trials` batches are made by each of the `finalists` best candidates.
    """

    max_nodes: int = 32
    max_depth: int = 8
    steps: int = 16
    rounds: int = 2
    batches: int = 4
    trials: int = 3
    finalists: int = 3

    @property
    def fewer(self) -> int:
        """Batches for what is tried at many settings: windows and relaxed methods."""
        return max(self.batches // 2, 1)


@dataclass(frozen=True)
class Candidate:
    """A method, fully set, with what was predicted of it and what a real run gave; seconds are per code."""

    name: str
    settings: Mapping[str, Any]
    tau: float
    seconds: float
    total_variation: float = 0.0
    run: Run | None = None

    @property
    def method(self) -> Method:
        """The method to decode with."""
        return METHODS[self.name].with_options(**self.settings)

    @property
    def label(self) -> str:
        """Method and settings in words, the tree by its size."""
        words = describe(self.name, self.settings)
        return f"{words} tree {len(str(self.settings['tree']).split()) + 1}" if "tree" in self.settings else words

    def as_dict(self, plain: "Candidate") -> dict[str, Any]:
        """The figures as JSON has them; speedups are over `plain`, predicted over predicted, measured over measured."""
        told: dict[str, Any] = {
            "method": self.name,
            "settings": dict(self.settings),
            "predicted": _figures(self.tau, self.seconds, self.total_variation, plain.seconds),
            "measured": None,
        }
        if self.run is not None and plain.run is not None:
            run = self.run
            told["measured"] = _figures(run.tau, run.seconds, run.total_variation, plain.run.seconds)
        return told


def _figures(tau: float, seconds: float, total_variation: float, plain: float) -> dict[str, float]:
    return {
        "step_compression": round(tau, 4),
        "milliseconds_per_code": round(1000 * seconds, 5),
        "speedup": round(plain / seconds, 4),
        "total_variation": round(total_variation, 6),
    }


@dataclass(frozen=True)
class Findings:
    """What tuning found: plain decoding, all candidates by predicted time, the chosen one, and the measurements."""

    plain: Candidate
    candidates: Sequence[Candidate]
    choice: Candidate
    costs: Mapping[str, Costs]
    acceptance: Mapping[str, Acceptance]


@dataclass
class Tuner:
    """One tuning run; `tell` hears a line now and then."""

    setup: Setup
    effort: Effort
    bounds: Bounds
    names: Sequence[str] = ()
    tell: Callable[[str], None] = lambda line: None
    costs: dict[str, Costs] = field(default_factory=dict)
    acceptance: dict[str, Acceptance] = field(default_factory=dict)

    def run(self) -> Findings:
        """Everything, from the first measurement to the choice."""
        model = self.setup.model
        chosen = variants(
            self.bounds,
            has_drafter=model.drafter is not None,
            codes=self.setup.codes,
            vocabulary=model.target.config.vocab_size,
            has_table=self.bounds.admits_relaxed and (model.neighbours is not None or model.codebook is not None),
            names=self.names,
            parts=model.trained,
        )
        self.setup = with_table(self.setup, chosen)
        self.tell("plain decoding")
        self.plain_laps = measure.time_plain(self.setup, steps=2 * self.effort.steps, rounds=self.effort.rounds)
        plain = Candidate("plain", {}, 1.0, self.plain_laps.step / self.setup.batch)
        candidates = self.of_trees([variant for variant in chosen if not variant.is_window])
        candidates += self.of_windows([variant for variant in chosen if variant.is_window])
        candidates.sort(key=lambda candidate: candidate.seconds)
        plain, tried = self.try_best(plain, candidates)
        return Findings(plain, tried, choose(plain, tried, self.bounds), self.costs, self.acceptance)

    def of_trees(self, chosen: Sequence[Variant]) -> list[Candidate]:
        """The best plan of each method that drafts trees, and of each of its settings."""
        if not chosen:
            return []
        laps = self.time_methods({variant.method.name: variant.method for variant in chosen})
        found: list[Candidate] = []
        for variant in chosen:
            self.tell(variant.label)
            found += self.plans(variant, self.costs_of(variant.method.name, laps))
        return found

    def time_methods(self, methods: Mapping[str, Method]) -> dict[str, list[Laps]]:
        """Laps with trees of all sizes by the first method, whose passes are everyone's, and with a few by others."""
        effort = self.effort
        trees = measure.trees_to_time(self.setup, effort.max_nodes, effort.max_depth)
        laps = {}
        for name, method in methods.items():
            self.tell(f"seconds of a step: {name}")
            able = [tree for tree in trees if tree.depth <= self.most_depth(method)]
            some = able if not laps else able[:: max(len(able) // 6, 1)]
            laps[name] = measure.time_trees(self.setup, method, some, steps=effort.steps, rounds=effort.rounds)
        return laps

    def most_depth(self, method: Method) -> int:
        """The deepest tree that a method is tried with: a trained part may guess no more than so many codes."""
        part = self.setup.model.trained.get(method.part) if method.part else None
        return min(self.effort.max_depth, getattr(getattr(part, "config", None), "depths", self.effort.max_depth))

    def costs_of(self, name: str, laps: Mapping[str, Sequence[Laps]]) -> Costs:
        """The fits of a method."""
        if name not in self.costs:
            every = [self.plain_laps, *(one for of_method in laps.values() for one in of_method)]
            sizes = {one.nodes for one in every}
            medians = {nodes: median(one.verify for one in every if one.nodes == nodes) for nodes in sizes}
            verify = fit_verify(medians, self.effort.max_nodes)
            self.costs[name] = fit_costs(self.plain_laps, laps[name], verify=verify)
        return self.costs[name]

    def plans(self, variant: Variant, costs: Costs) -> list[Candidate]:
        """The two best trees of a variant whose total variation is within bounds."""
        effort, exact, depth = self.effort, variant.method.exact, self.most_depth(variant.method)
        found = measure.measure_acceptance(
            self.setup,
            variant.method,
            nodes=min(2 * effort.max_nodes, 64),
            depth=depth,
            batches=effort.batches if exact else effort.fewer,
        )
        self.acceptance[variant.label] = found
        if not self.bounds.admits_variation(found.total_variation):
            return []
        plans = solve(found.rates, costs, max_nodes=effort.max_nodes, max_depth=depth)
        return [
            Candidate(
                variant.method.name,
                {**variant.settings, "tree": plan.tree.spelling},
                plan.tau,
                plan.seconds / self.setup.batch,
                found.total_variation,
            )
            for plan in plans[:2]
        ]

    def of_windows(self, chosen: Sequence[Variant]) -> list[Candidate]:
        """Windows of several lengths; the best of each method is tried with other beginnings as well."""
        found: list[Candidate] = []
        for name in dict.fromkeys(variant.method.name for variant in chosen):
            self.tell(f"windows: {name}")
            lengths = [self.window(name, variant.settings) for variant in chosen if variant.method.name == name]
            best = min(lengths, key=lambda candidate: candidate.seconds)
            inits = OTHER_INITS if "init" in METHODS[name].settings else ()
            others = [Variant.of(METHODS[name], {**best.settings, "init": init}) for init in inits]
            has_drafter = self.setup.model.drafter is not None
            able = [variant for variant in others if has_drafter or not needs_drafter(variant.method)]
            found += [*lengths, *(self.window(name, variant.settings) for variant in able)]
        return found

    def window(self, name: str, settings: Mapping[str, Any]) -> Candidate:
        """A window of some length: codes per pass and seconds are measured together."""
        made = measure.measure_window(self.setup, METHODS[name].with_options(**settings), batches=self.effort.fewer)
        return Candidate(name, dict(settings), made.tau, made.seconds, made.total_variation)

    def try_best(self, plain: Candidate, candidates: Sequence[Candidate]) -> tuple[Candidate, list[Candidate]]:
        """Plain decoding and the candidates, those that may beat it with the figures of real runs in turn."""
        hopeful = [candidate for candidate in candidates if candidate.seconds < plain.seconds * HOPEFUL]
        finalists = distinct(hopeful)[: self.effort.finalists]
        self.tell(f"real runs: plain and {len(finalists)} more")
        methods = [plain.method, *(candidate.method for candidate in finalists)]
        runs = measure.run_in_turn(self.setup, methods, batches=self.effort.trials)
        run_of = {id(candidate): run for candidate, run in zip(finalists, runs[1:], strict=True)}
        tried = [dataclasses.replace(candidate, run=run_of.get(id(candidate))) for candidate in candidates]
        return dataclasses.replace(plain, run=runs[0]), tried


def with_table(setup: Setup, chosen: Sequence[Variant]) -> Setup:
    """The setup with the proximity table that the candidates read, so that it is not made again for each tree."""
    columns = max((neighbour_columns(variant.method) for variant in chosen), default=0)
    if not columns:
        return setup
    model = dataclasses.replace(setup.model, neighbours=neighbours_for(setup.model, columns))
    return dataclasses.replace(setup, model=model)


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates in order, of each method no more than two, so that finalists differ."""
    found: list[Candidate] = []
    for candidate in candidates:
        if sum(other.name == candidate.name for other in found) < 2:
            found.append(candidate)
    return found


def choose(plain: Candidate, candidates: Sequence[Candidate], bounds: Bounds) -> Candidate:
    """The candidate of least measured time among those whose run kept the bounds, if it clearly beats plain decoding.

    What was not run is not chosen.
    """
    assert plain.run is not None
    best = plain
    least = plain.run.seconds / MARGIN
    for candidate in candidates:
        run = candidate.run
        if run is not None and run.seconds < least and bounds.admits_variation(run.total_variation):
            best, least = candidate, run.seconds
    return best


def profile_of(tuner: Tuner, found: Findings) -> dict[str, Any]:
    """The findings as a profile."""
    setup, bounds = tuner.setup, tuner.bounds
    return {
        "version": VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(setup.model),
        "model": {"name": setup.model.name, "fingerprint": setup.model.fingerprint},
        "sampling": dataclasses.asdict(setup.sampling),
        "batch": setup.batch,
        "pictures": len(setup.asked),
        "bounds": {"max_tv": bounds.max_tv, "max_kid": bounds.max_kid},
        "effort": dataclasses.asdict(tuner.effort),
        "costs": {name: costs.as_dict() for name, costs in found.costs.items()},
        "acceptance": {label: acceptance.as_dict() for label, acceptance in found.acceptance.items()},
        "plain": found.plain.as_dict(found.plain),
        "candidates": [candidate.as_dict(found.plain) for candidate in found.candidates[:12]],
        "choice": found.choice.as_dict(found.plain),
    }
