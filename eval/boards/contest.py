"""Contests of a leaderboard: options, contenders, probes and rounds at one temperature."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from lantern.core.config import one_line, read_json_object
from lantern.core.io import TRAINING_NAME, write_json
from lantern.core.sampling import Sampling
from lantern.core.types import Generation, Step
from lantern.eval.boards import equal_budget
from lantern.eval.boards.board import Board, BoardOptions
from lantern.eval.boards.equal_budget import INT4, Claim, Constants
from lantern.eval.boards.results import part_hash
from lantern.eval.boards.rounds import SweepFolder, name_of, open_folder
from lantern.eval.speed.contenders import PLAIN, Contender, Job, Variant, assemble, method_of
from lantern.eval.speed.phases import DRAFTING, NetworkClock, time_phases
from lantern.eval.speed.race import rounded, warm
from lantern.methods.registry import METHODS, add_ons_of, find_add_on
from lantern.models.folder import FOLDER, Model


@dataclass(frozen=True)
class LeaderboardOptions(BoardOptions):
    """Options of a leaderboard: `specs` as for `contenders.method_of`; empty means all methods.

    `images` is the number of images at each of the `temperatures`. Comparisons at equal budget use the first
    `equal_budget` images of the first temperature. Plain decoding also runs in the variant of the methods.

    ValueError for numbers that do not fit together.
    """

    specs: Sequence[str] = ()
    temperatures: Sequence[float] = (1.0, 0.0)
    images: Sequence[int] = (8, 4)
    equal_budget: int = 4

    def __post_init__(self) -> None:
        if len(self.images) != len(self.temperatures) or len(set(self.temperatures)) != len(self.temperatures):
            raise ValueError(
                f"got {len(self.images)} numbers of images for temperatures {list(self.temperatures)}, "
                "expected different temperatures and one number for each"
            )
        if not 0 <= self.equal_budget <= self.images[0]:
            raise ValueError(
                f"got {self.equal_budget} images at equal budget, expected at most the {self.images[0]} of the first "
                "temperature"
            )


class Setting(Board):
    """The loaded model and everything that contests share. ValueError for invalid methods."""

    def __init__(self, options: LeaderboardOptions) -> None:
        super().__init__(options)
        self.options = dataclasses.replace(options, variant=self.variant)
        self.specs = list(dict.fromkeys(options.specs or catalogue()))
        for spec in self.specs:
            if method_of(self.model, spec).is_plain:
                raise ValueError(f"--methods {spec[:60]!r}: plain decoding is always measured: give methods that draft")

    @cached_property
    def header(self) -> dict[str, Any]:
        """The settings of every contest."""
        own = {
            "parts": parts_of(self.model),
            "methods": self.specs,
        }
        return super().header | own

    @property
    def plain_variants(self) -> list[Variant]:
        """The variants of plain decoding, that of the methods first."""
        return list(dict.fromkeys([self.variant, *super().plain_variants]))


def catalogue() -> list[str]:
    """Return all methods except plain decoding, which is always measured, and "auto", which is one of the others."""
    return [name for name in METHODS if name not in (PLAIN, "auto")]


def made_with(model: Model, spec: str, variant: Variant) -> dict[str, Any]:
    """Return for JSON what a row was measured with: engine, weights, dtype, draft tree and steps of training.

    `tree` is the static tree or the window; None for trees that a policy grows. `training_steps` are those of the
    networks that the method reads, by folder; None where the model's folder does not record them.
    """
    method = METHODS[PLAIN] if spec.removesuffix(INT4) == PLAIN else method_of(model, spec.removesuffix(INT4))
    names = [*(["drafter"] if method.spec.needs_drafter else []), *(f"{FOLDER}/{part}" for part in add_ons_of(method))]
    tree = method.tree
    if tree is None and "window" in method.settings:
        tree = f"window {method.settings['window']}"
    facts = variant.facts | ({"weights": "int4"} if spec.endswith(INT4) else {})
    return facts | {"tree": tree, "training_steps": {name: training_steps(model, name) for name in names}}


def training_steps(model: Model, name: str) -> int | None:
    """Return the steps that a component of a model's folder was trained for, None if it does not record them."""
    if model.folder is None:
        return None
    try:
        return int(read_json_object(model.folder / name / TRAINING_NAME)["loop"]["steps"])
    except (ValueError, KeyError, TypeError):
        return None


def parts_of(model: Model) -> dict[str, str]:
    """Return the trained parts of a model, each with the SHA-256 of its files."""
    folders = sorted((model.folder / FOLDER).glob("*/")) if model.folder else ()
    return {folder.name: part_hash(folder) for folder in folders}


def how_to_get(model: Model, spec: str) -> str | None:
    """Return the command that trains the first missing part of a method, or None if the model has all parts."""
    try:
        method = method_of(model, spec)
    except ValueError:
        return None
    if method.is_plain:
        return None
    for part in add_ons_of(method):
        if part not in model.add_ons:
            return command_of(part)
    return command_of("eagle1") if model.drafter is None else None


def command_of(part: str) -> str:
    """Return the command that trains a part; MODEL is the model's folder, and OUT belongs in its parts/."""
    kind = find_add_on(part)
    return f"train the part {part} and put it into MODEL/parts/{part}" if kind is None else kind.command


PASSES = ("forward", "guess")  # methods of drafter modules that are a pass
HEAD = "_log_q"  # method of EAGLE drafters from features to log q: head, guidance and truncation


class NodeCount:
    """Callback that counts steps and the drafted nodes that the target scored, without roots."""

    def __init__(self) -> None:
        self.nodes, self.steps = 0, 0

    def __call__(self, step: Step) -> None:
        """Count a step, without synchronising the device."""
        if step.tree is not None:
            shape = step.tree.shape
            self.nodes, self.steps = self.nodes + shape.num_nodes - 1, self.steps + 1

    @property
    def per_pass(self) -> float:
        """Drafted nodes per pass of the target."""
        return self.nodes / max(self.steps, 1)


def probe(contender: Contender, job: Job) -> dict[str, Any]:
    """Return the figures of one image for JSON; drafter passes are None in compiled and graphed variants.

    The first step is not part of the figures of passes, since it may process the prompt.
    """
    parts, count = contender.parts, NodeCount()
    modules = networks_of(parts.drafter, parts.target)
    clock = NetworkClock(job.condition.device)

    def report(step: Step) -> None:
        count(step)
        if step.index == 1:
            clock.reset()

    # traced modules must not be patched, and passes inside CUDA graphs cannot be timed
    is_hidden = contender.variant.is_compiled or contender.variant.is_graphed
    deciding = networks_of(parts.drafter and parts.drafter.policy, parts.target)
    drafting = [module for module in modules if all(module is not one for one in deciding)]
    watched: dict[str, tuple[object, Sequence[str]]] = {f"network {i}": (one, PASSES) for i, one in enumerate(drafting)}
    with clock.watching({} if is_hidden else watched | {"drafter": (parts.drafter, (HEAD,))}):
        timed = time_phases(contender, job, callback=report)
    found = {
        "parameters": sum(p.numel() for p in {id(p): p for m in modules for p in m.parameters()}.values()),
        "nodes_per_pass": rounded(count.per_pass),
        "step_ms": rounded(1e3 * timed.total / timed.steps),
        "shares": {name: rounded(seconds / timed.total) for name, seconds in timed.phases.items()},
        "draft_share": rounded(timed.phases.get(DRAFTING, 0.0) / timed.total),
        "kv_length": parts.drafter and parts.drafter.kv_length,
    }
    return found | pass_figures(clock, 0 if is_hidden else count.steps - 1)


def pass_figures(clock: NetworkClock, num_steps: int) -> dict[str, float | None]:
    """Return drafter passes per step, milliseconds per pass, and milliseconds of the head per call."""
    if num_steps < 1:
        return dict.fromkeys(("draft_passes", "draft_pass_ms", "head_ms"))
    made = [calls for label, calls in clock.calls.items() if label.startswith("network")]
    head = clock.typical(f"drafter.{HEAD}")
    count = sum(map(len, made))
    return {
        "draft_passes": rounded(count / num_steps),
        "draft_pass_ms": rounded(1e3 * sum(map(sum, made)) / count) if count else None,
        "head_ms": None if head is None else rounded(1e3 * head),
    }


def networks_of(drafter: object, target: object) -> list[nn.Module]:
    """Return the trained networks of a drafter, including those of its policy and members."""
    found: list[nn.Module] = []
    seen, pending = {id(target)}, [drafter]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found.append(value)
        elif isinstance(value, list | tuple):
            pending += value
        elif isinstance(value, Mapping):
            pending += value.values()
        elif type(value).__module__.partition(".")[0] == "lantern":
            pending += vars(value).values() if hasattr(value, "__dict__") else ()
    return found


class Contest:
    """All methods at one temperature: `images` images each, and `claims` images for comparisons at equal budget.

    After `measure`: `probes` by contender name, `claims` with their contenders, and `absent` contenders with reasons.
    """

    def __init__(self, setting: Setting, temperature: float, images: int, *, claims: int) -> None:
        self.setting, self.temperature, self.images, self.equal = setting, temperature, images, claims
        given = dict(setting.options.sampling) | {"temperature": temperature}
        self.sampling: Sampling = setting.model.sampling(**given)
        header = setting.header | {"sampling": dataclasses.asdict(self.sampling), "equal_budget": claims}
        self.folder: SweepFolder = open_folder(setting.options.run / f"temperature-{temperature:g}", header)
        self.probes: dict[str, dict[str, Any]] = {}
        self.absent: list[dict[str, str]] = []
        self.claims: list[Claim] = []

    def name(self, spec: str) -> str:
        """Return the name of a method in the rounds."""
        return name_of(spec, self.setting.options.variant)

    @property
    def plain_name(self) -> str:
        """Name of plain decoding in the engine of the methods."""
        return self.name(PLAIN)

    def measure(self) -> None:
        """Run the missing probes and rounds. RuntimeError if plain decoding does not run."""
        self.absent, setting = [], self.setting
        known = self.folder.rounds(self.images)
        missing = [number for number in range(self.images) if number not in known]
        entries = [(PLAIN, one) for one in setting.plain_variants]
        entries += [(spec, setting.options.variant) for spec in setting.specs]
        field = self._probed(entries, is_running=bool(missing))
        if all(one.label != PLAIN or one.variant != setting.plain_variants[0] for one in field):
            reasons = {one["reason"] for one in self.absent if one["method"] == PLAIN}
            raise RuntimeError(
                f"plain decoding does not run as {setting.plain_variants[0]}: {'; '.join(sorted(reasons))}"
            )
        more: list[Contender] = []
        if self.equal:
            nodes = {
                spec: self.probes[self.name(spec)]["nodes_per_pass"]
                for spec in setting.specs
                if self.name(spec) in self.probes
            }
            self.claims = equal_budget.claims(nodes, self.constants)
            specs = dict.fromkeys(spec for claim in self.claims for spec in claim.contenders)
            there = {one.label for one in field} | {one["method"] for one in self.absent}
            rest = [(spec, setting.options.variant) for spec in specs if spec not in there]
            more = self._probed(rest, is_running=any(number < self.equal for number in missing))
        setting.run_rounds(
            self.folder,
            missing,
            lambda number: [*field, *(more if number < self.equal else ())],
            self._run,
            name=f"temperature {self.temperature:g}: rounds",
        )

    def enter(self, spec: str, variant: Variant) -> Contender:
        """Build a contender, with a 4-bit target if the spec ends in INT4; ValueError for missing parts."""
        model, base = self.setting.stable.model(variant), spec.removesuffix(INT4)
        if spec.endswith(INT4):
            model = dataclasses.replace(model, engine=model.engine.changed(weights="int4"))
        method = METHODS[PLAIN] if base == PLAIN else method_of(model, base)
        return Contender(spec, method, variant, assemble(model, method, self.sampling))

    def constants(self, base: str, depth: int) -> Constants:
        """Return the acceptance rates of constant trees for a drafter, measured once on images of another seed."""
        path = self.folder.path / f"rates-{base}-{depth}.json"
        if not path.is_file():
            job_seed = (self.setting.options.seed + 1) % 2**63
            jobs = [self.setting.job(number, seed=job_seed) for number in range(equal_budget.PILOTS)]
            tree = Constants.probing(depth, self.setting.model.target.config.vocab_size)
            pilot = self.enter(f"{base}:tree={tree.spelling}", self.setting.options.variant)
            found = Constants.measured(pilot, jobs, depth, self.setting.model.target.config)
            write_json(path, {"rates": found.rates})
        return Constants(read_json_object(path)["rates"], depth)

    def _probed(self, entries: Sequence[tuple[str, Variant]], *, is_running: bool) -> list[Contender]:
        """Return the contenders that run, after a probe of one image each; the others are added to `absent`."""
        field, bar = [], self.setting.bar(len(entries), f"temperature {self.temperature:g}: probes", "contenders")
        for spec, variant in entries:
            try:
                contender = self.enter(spec, variant)
                self._probe(contender, is_running=is_running)
            except Exception as error:  # the reason is shown in the method's row
                self._add_absent(spec, variant, error)
            else:
                field.append(contender)
            bar.update(what=name_of(spec, variant))
        bar.close()
        return field

    def _probe(self, contender: Contender, *, is_running: bool) -> None:
        name = name_of(contender.label, contender.variant)
        job, file = self.setting.job(0), f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
        path = self.folder.path / "probes" / file
        if contender.variant.is_compiled and (is_running or not path.is_file()):
            warm(contender, [job])
        if not path.is_file():
            write_json(path, {"contender": name, "probe": probe(contender, job)})
        self.probes[name] = read_json_object(path)["probe"]

    def _add_absent(self, spec: str, variant: Variant, error: Exception) -> None:
        """Record an absent contender; an error other than ValueError is a failure."""
        is_lacking = isinstance(error, ValueError)
        reason = one_line(error) if is_lacking else f"{type(error).__name__}: {one_line(error)}"
        found = {"method": spec, "variant": str(variant), "status": "absent" if is_lacking else "failed"}
        how = how_to_get(self.setting.model, spec.removesuffix(INT4)) if is_lacking else None
        self.absent.append(found | {"reason": reason[:300]} | ({"command": how} if how else {}))

    @staticmethod
    def _run(contender: Contender, job: Job, _: int) -> tuple[Generation, dict[str, int]]:
        """Decode a job and count steps and drafted nodes."""
        count = NodeCount()
        return contender.decode(job, callback=count), vars(count)
