"""One tuning run: measure, solve for the best trees, try the best candidates in real runs, write a profile."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from lantern.core.sampling import Sampling
from lantern.generation.generator import neighbours_for
from lantern.generation.requests import Request, check_requests
from lantern.generation.tuning import measure
from lantern.generation.tuning.candidates import OTHER_INITS, Bounds, Variant, describe, variants
from lantern.generation.tuning.costs import Costs, Laps, fit_costs, fit_verify
from lantern.generation.tuning.measure import Acceptance, Run, Setup
from lantern.generation.tuning.profile import VERSION, check_place, describe_machine, write_profile
from lantern.generation.tuning.solve import solve
from lantern.methods import METHODS, Method
from lantern.methods.parts import ADD_ONS
from lantern.models.folder import Model, record_tokens_per_step

MARGIN = 1.03  # a method must beat plain decoding by this factor; less is noise
EXACT = Bounds()
PROMPTS = (
    "a red apple",
    "a cat face",
    "a house",
    "a green tree",
    "a yellow banana",
    "a blue car",
    "a dog",
    "a smiling sun",
)
HOPEFUL = 1.15  # a candidate is tried if its predicted time is at most this many times plain decoding's


@dataclass(frozen=True)
class Effort:
    """How much is measured: trees of at most `max_nodes` (root included) and `max_depth`, and these counts.

    `steps` of each tree are timed in each of `rounds`; acceptance is counted on `batches` batches, and each of the
    `finalists` best candidates makes `trials` batches.
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
        """Number of batches for windows and relaxed methods, which are measured at many settings."""
        return max(self.batches // 2, 1)


@dataclass(frozen=True)
class Candidate:
    """A method with all settings, its predicted figures, and those of a real run."""

    name: str
    settings: Mapping[str, Any]
    predicted: Run
    run: Run | None = None

    @property
    def method(self) -> Method:
        """The method to decode with."""
        return METHODS[self.name].with_options(**self.settings)

    @property
    def label(self) -> str:
        """Method and settings as text, the tree by its size."""
        words = describe(self.name, self.settings)
        return f"{words} tree {len(str(self.settings['tree']).split()) + 1}" if "tree" in self.settings else words

    def as_dict(self, plain: "Candidate") -> dict[str, Any]:
        """Return the figures as JSON values; speedups compare predicted with predicted, measured with measured."""
        return {
            "method": self.name,
            "settings": dict(self.settings),
            "predicted": _figures(self.predicted, plain.predicted),
            "measured": None if self.run is None or plain.run is None else _figures(self.run, plain.run),
        }


def _figures(run: Run, plain: Run) -> dict[str, float]:
    return {
        "tokens_per_step": round(run.tau, 4),
        "milliseconds_per_token": round(1000 * run.seconds, 5),
        "speedup": round(plain.seconds / run.seconds, 4),
        "total_variation": round(run.total_variation, 6),
    }


@dataclass(frozen=True)
class Findings:
    """The result of tuning: plain decoding, all candidates by predicted time, the chosen one, and measurements."""

    plain: Candidate
    candidates: Sequence[Candidate]
    choice: Candidate
    costs: Mapping[str, Costs]
    acceptance: Mapping[str, Acceptance]


@dataclass
class Tuner:
    """One tuning run; `report` receives lines about its progress."""

    setup: Setup
    effort: Effort
    bounds: Bounds
    names: Sequence[str] = ()
    report: Callable[[str], None] = lambda line: None
    costs: dict[str, Costs] = field(default_factory=dict)
    acceptance: dict[str, Acceptance] = field(default_factory=dict)

    def run(self) -> Findings:
        """Measure, predict, try the best candidates and choose."""
        model = self.setup.model
        chosen = variants(
            self.bounds,
            has_drafter=model.drafter is not None,
            tokens=self.setup.tokens,
            vocabulary=model.target.config.vocab_size,
            has_table=self.bounds.admits_relaxed and (model.neighbours is not None or model.codebook is not None),
            names=self.names,
            parts=model.add_ons,
        )
        self.setup = with_table(self.setup, chosen)
        self.report("plain decoding")
        self.plain_laps = measure.time_plain(self.setup, steps=2 * self.effort.steps, rounds=self.effort.rounds)
        plain = Candidate("plain", {}, Run(self.plain_laps.step / self.setup.batch, 1.0, 0.0))
        candidates = self.of_trees([variant for variant in chosen if not variant.is_window])
        candidates += self.of_windows([variant for variant in chosen if variant.is_window])
        candidates.sort(key=lambda candidate: candidate.predicted.seconds)
        plain, tried = self.try_best(plain, candidates)
        return Findings(plain, tried, choose(plain, tried, self.bounds), self.costs, self.acceptance)

    def of_trees(self, chosen: Sequence[Variant]) -> list[Candidate]:
        """Return the best plans of each method that drafts trees, at each of its settings."""
        if not chosen:
            return []
        laps = self.time_methods({variant.method.name: variant.method for variant in chosen})
        found: list[Candidate] = []
        for variant in chosen:
            self.report(variant.label)
            found += self.plans(variant, self.costs_of(variant.method.name, laps))
        return found

    def time_methods(self, methods: Mapping[str, Method]) -> dict[str, list[Laps]]:
        """Return laps by method, with all trees for the first, since all share its passes, and a few for others."""
        effort = self.effort
        trees = measure.trees_to_time(self.setup, effort.max_nodes, effort.max_depth)
        laps = {}
        for name, method in methods.items():
            self.report(f"seconds of a step: {name}")
            feasible = [tree for tree in trees if tree.depth <= self.most_depth(method)]
            some = feasible if not laps else feasible[:: max(len(feasible) // 6, 1)]
            laps[name] = measure.time_trees(self.setup, method, some, steps=effort.steps, rounds=effort.rounds)
        return laps

    def most_depth(self, method: Method) -> int:
        """Return the greatest depth of a method's trees; some add-ons draft a limited number of tokens."""
        model, most = self.setup.model, self.effort.max_depth
        deep = [name for name in method.made.parts if ADD_ONS[name].limits_depth and name in model.add_ons]
        read: list[Any] = [model.add_ons[name] for name in deep]
        return min([most, *(part.config.depths for part in read)])

    def costs_of(self, name: str, laps: Mapping[str, Sequence[Laps]]) -> Costs:
        """Return the fitted costs of a method."""
        if name not in self.costs:
            every = [self.plain_laps, *(one for of_method in laps.values() for one in of_method)]
            sizes = {one.nodes for one in every}
            medians = {nodes: median(one.verify for one in every if one.nodes == nodes) for nodes in sizes}
            verify = fit_verify(medians, self.effort.max_nodes)
            self.costs[name] = fit_costs(self.plain_laps, laps[name], verify=verify)
        return self.costs[name]

    def plans(self, variant: Variant, costs: Costs) -> list[Candidate]:
        """Return the two best trees of a variant; none if its total variation is out of bounds."""
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
                Run(plan.seconds / self.setup.batch, plan.tau, found.total_variation),
            )
            for plan in plans[:2]
        ]

    def of_windows(self, chosen: Sequence[Variant]) -> list[Candidate]:
        """Return windows of several lengths; the best one of each method is also measured with other initial tokens."""
        found: list[Candidate] = []
        for name in dict.fromkeys(variant.method.name for variant in chosen):
            self.report(f"windows: {name}")
            lengths = [self.window(name, variant.settings) for variant in chosen if variant.method.name == name]
            best = min(lengths, key=lambda candidate: candidate.predicted.seconds)
            inits = OTHER_INITS if "init" in METHODS[name].settings else ()
            others = [Variant.of(METHODS[name], {**best.settings, "init": init}) for init in inits]
            has_drafter = self.setup.model.drafter is not None
            usable = [variant for variant in others if has_drafter or not variant.method.made.reads_drafter]
            found += [*lengths, *(self.window(name, variant.settings) for variant in usable)]
        return found

    def window(self, name: str, settings: Mapping[str, Any]) -> Candidate:
        """Return a window of one length, with its measured tokens per step and seconds."""
        method = METHODS[name].with_options(**settings)
        return Candidate(name, settings, measure.measure_window(self.setup, method, batches=self.effort.fewer))

    def try_best(self, plain: Candidate, candidates: Sequence[Candidate]) -> tuple[Candidate, list[Candidate]]:
        """Return plain decoding and all candidates; the most promising ones have figures of interleaved real runs."""
        most = plain.predicted.seconds * HOPEFUL
        hopeful = [candidate for candidate in candidates if candidate.predicted.seconds < most]
        finalists = distinct(hopeful)[: self.effort.finalists]
        self.report(f"real runs: plain and {len(finalists)} more")
        methods = [plain.method, *(candidate.method for candidate in finalists)]
        runs = measure.run_interleaved(self.setup, methods, batches=self.effort.trials)
        run_of = {id(candidate): run for candidate, run in zip(finalists, runs[1:], strict=True)}
        tried = [dataclasses.replace(candidate, run=run_of.get(id(candidate))) for candidate in candidates]
        return dataclasses.replace(plain, run=runs[0]), tried


def with_table(setup: Setup, chosen: Sequence[Variant]) -> Setup:
    """Return the setup with the proximity table of the candidates, so that it is computed once."""
    tokens = setup.model.target.config.vocab_size
    columns = max((variant.method.made.columns(tokens) for variant in chosen), default=0)
    if not columns:
        return setup
    model = dataclasses.replace(setup.model, neighbours=neighbours_for(setup.model, columns))
    return dataclasses.replace(setup, model=model)


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates in order with at most two of each method, so that finalists differ."""
    found: list[Candidate] = []
    for candidate in candidates:
        if sum(other.name == candidate.name for other in found) < 2:
            found.append(candidate)
    return found


def choose(plain: Candidate, candidates: Sequence[Candidate], bounds: Bounds) -> Candidate:
    """Return the candidate of least measured time within the bounds, if it beats plain decoding by MARGIN.

    Candidates without a real run are not chosen.
    """
    assert plain.run is not None
    best = plain
    least = plain.run.seconds / MARGIN
    for candidate in candidates:
        run = candidate.run
        if run is not None and run.seconds < least and bounds.admits_variation(run.total_variation):
            best, least = candidate, run.seconds
    return best


def tune(
    model: Model,
    *,
    sampling: Sampling | None = None,
    prompts: Sequence[str] = (),
    images: int = 4,
    batch: int = 1,
    seed: int = 0,
    bounds: Bounds = EXACT,
    methods: Sequence[str] = (),
    max_nodes: int = 32,
    max_depth: int = 8,
    out: Path | None = None,
    writes_model: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[Findings, dict[str, Any], Path]:
    """Measure the methods of a model on this machine, and write the fastest one to a profile that "auto" reads.

    Acceptance is counted on at least `images` images of `prompts` (default: PROMPTS) or of evenly spread classes,
    `batch` at a time. `methods` restricts what is measured. Return the findings, the profile, and its file: `out`, or
    the place where "auto" finds it. With `writes_model` the tokens per step of windows, which do not depend on the
    machine, are written into the model's folder. ValueError, before anything is measured, if there is no such place.
    """
    if out is None:
        check_place(model)
    if writes_model and (model.folder is None or sampling not in (None, model.sampling())):
        raise ValueError("tokens per step are written into a model's folder for its default sampling: leave others out")
    batches = -(-images // batch)
    requested = requests_to_measure(model, batches * batch, prompts or PROMPTS, seed)
    effort = Effort(max_nodes, max_depth, batches=batches, trials=min(batches, 3))
    tuner = Tuner(Setup(model, sampling or model.sampling(), requested, batch), effort, bounds, methods, report)
    found = tuner.run()
    profile = profile_of(tuner, found)
    if writes_model:
        assert model.folder is not None
        record_tokens_per_step(model.folder, windows_of(found))
    return found, profile, write_profile(profile, model, out)


def windows_of(found: Findings) -> dict[int, float]:
    """Return the tokens per step of `gumbel-jacobi` by window; ValueError if it was not measured."""
    every = [one for one in found.candidates if one.name == "gumbel-jacobi" and set(one.settings) == {"window"}]
    if not every:
        raise ValueError('tokens per step of windows were not measured: leave "gumbel-jacobi" in --methods')
    return {one.settings["window"]: one.predicted.tau for one in every}


def requests_to_measure(model: Model, count: int, prompts: Sequence[str], seed: int) -> list[Request]:
    """Return the images to measure on: prompts one after another, or evenly spread classes."""
    if model.takes_prompts:
        places = [(i % len(prompts), i // len(prompts)) for i in range(count)]
        requested = [Request(prompt=prompts[which], seed=seed, number=number) for which, number in places]
    else:
        classes = model.target.config.num_classes
        requested = [Request(label=i * classes // count % classes, seed=seed, number=i) for i in range(count)]
    check_requests(model, requested)
    return requested


def profile_of(tuner: Tuner, found: Findings) -> dict[str, Any]:
    """Return the findings as a profile."""
    setup, bounds = tuner.setup, tuner.bounds
    return {
        "version": VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(setup.model),
        "model": {"name": setup.model.name, "fingerprint": setup.model.fingerprint},
        "sampling": dataclasses.asdict(setup.sampling),
        "batch": setup.batch,
        "pictures": len(setup.requested),
        "bounds": {"max_tv": bounds.max_tv, "max_kid": bounds.max_kid},
        "effort": dataclasses.asdict(tuner.effort),
        "costs": {name: costs.as_dict() for name, costs in found.costs.items()},
        "acceptance": {label: acceptance.as_dict() for label, acceptance in found.acceptance.items()},
        "plain": found.plain.as_dict(found.plain),
        "candidates": [candidate.as_dict(found.plain) for candidate in found.candidates[:12]],
        "choice": found.choice.as_dict(found.plain),
    }
