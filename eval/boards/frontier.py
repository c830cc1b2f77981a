"""`lantern frontier` (or `python -m lantern.eval.boards.frontier`): speedup and quality over settings of methods.

All points, and plain decoding in every variant that may be its fastest, make the same images in one process, in
interleaved rounds. Each round is stored when it ends, so an interrupted sweep resumes. `frontier_report` draws plot and
page from the result file without a model.

A point is a method at one value of its settings; specs expand to points:
lantern:k=10/100,delta=0.1      is      lantern:k=10,delta=0.1  and  lantern:k=100,delta=0.1
"""

import dataclasses
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lantern.eval.boards.axes import QUALITY, fronts
from lantern.eval.boards.board import Board, BoardOptions
from lantern.eval.boards.contest import how_to_get, made_with
from lantern.eval.boards.rounds import (
    SweepFolder,
    as_dict,
    fastest,
    name_of,
    open_folder,
    pack,
    pixels_of,
    point_figures,
    seconds_of,
    unpack,
)
from lantern.eval.speed.contenders import PLAIN, Contender, Job, Lineup, Variant, line_up, method_of, warm_up
from lantern.eval.speed.race import Spread, warm
from lantern.generation.acceptance_map import data_uri, read_map
from lantern.methods.registry import METHODS, find

if TYPE_CHECKING:
    from lantern.eval.boards.judge import Judge

SEPARATOR = "/"
# the default sweep: windows and trees of exact methods, then the strength of relaxed ones
SWEEP = (
    "gumbel-jacobi:window=8/16/32",
    "eagle1:tree=chain_3/grown_8_2",
    "bounded-window:delta=0.1/0.2/0.4",
    "lantern:k=10/100,delta=0.2",
    "lantern++:lambda_=2/5",
    "cool:omega=1.5",
)
# one curve per relaxed rule, on the same tree or window, and the exact methods that they start from
RULES = (
    "eagle1-rejection",
    "gumbel-jacobi:window=16/32/64",
    "lantern:delta=0.02/0.05/0.1/0.2",
    "lantern++:lambda_=1.5/2/5/20",
    "grouped:group=2/6/14/40",
    "tolerance:samples=2/3/5/10",
    "vadusa:samples=2/3/5/10",
    "cool:omega=1.1/1.5/2/4",
    "pcg:k=2/4/8/16",
    "vvs:skip=1,tree=spine_1_8_2",
    "vvs:skip=2,tree=spine_2_8_2",
    "vvs:skip=3,tree=spine_3_8_2",
    "bounded:delta=0.05/0.1/0.2/0.4",
    "bounded-window:window=16,delta=0.05/0.1/0.2/0.4",
    "bounded-window:window=32/64,delta=0.1/0.4",
)
WORDS = {"lambda_": "λ", "delta": "δ", "omega": "ω"}  # symbols used in papers


@dataclass(frozen=True)
class Point:
    """A method at one value of its settings. `spec` is the method as written on the command line."""

    spec: str

    @property
    def family(self) -> str:
        """The method's name without settings."""
        return self.spec.partition(":")[0]

    @property
    def settings(self) -> dict[str, str]:
        """Settings as written in the spec."""
        pairs = (pair.partition("=") for pair in filter(None, self.spec.partition(":")[2].split(",")))
        return {name: value for name, _, value in pairs}

    @property
    def label(self) -> str:
        """Method and settings as shown: "lantern++ λ 2"."""
        return " ".join([self.family, self.setting]).strip()

    @property
    def setting(self) -> str:
        """Settings as shown: "k 10, δ 0.2"."""
        return ", ".join(f"{WORDS.get(name, name.rstrip('_'))} {value}" for name, value in self.settings.items())


def expand(specs: Sequence[str]) -> list[Point]:
    """Return all points of specs, each once and in order.

    ValueError for an unknown method, an unknown setting, a setting without a value, and plain decoding, which is
    always measured.
    """
    found = [one for spec in specs for one in _grid(spec)]
    for spec in found:
        if find(spec.partition(":")[0]).is_plain:
            raise ValueError(f"--points {spec[:60]!r}: plain decoding is always measured: give only methods that draft")
    return [Point(spec) for spec in dict.fromkeys(found)]


def _grid(spec: str) -> list[str]:
    name, _, rest = spec.partition(":")
    options = find(name).options if name in METHODS else ()
    axes = []
    for pair in filter(None, rest.split(",")):
        key, sign, values = pair.partition("=")
        if options and key not in options:
            find(name).option(key)  # raises an error that lists the settings
        if not sign or not all(values.split(SEPARATOR)):
            raise ValueError(f"--points {spec[:60]!r}: got {pair[:40]!r}, expected NAME=VALUE or NAME=A/B/C")
        axes.append([f"{key}={value}" for value in values.split(SEPARATOR)])
    return [":".join(filter(None, [name, ",".join(chosen)])) for chosen in itertools.product(*axes)]


@dataclass(frozen=True)
class FrontierOptions(BoardOptions):
    """Options of a sweep: `specs` as for `expand`, `images` images per point, of which the report shows `shown`.

    With `leaves_out` points are left out whose add-ons the model lacks.
    """

    leaves_out: bool = False
    specs: Sequence[str] = SWEEP
    images: int = 24
    shown: int = 4


class Sweep(Board):
    """A sweep with its model loaded. ValueError for invalid points or a folder of another sweep.

    `left_out` are the points whose add-ons the model lacks, each with the command that trains what is missing.
    """

    def __init__(self, options: FrontierOptions) -> None:
        super().__init__(options)
        self.options = dataclasses.replace(options, variant=self.variant)
        self.sampling = self.model.sampling(**options.sampling)
        self.points = expand(options.specs)
        for point in self.points:
            method_of(self.model, point.spec)
        self.left_out: dict[str, str] = {}
        if options.leaves_out:
            lacking = {point.spec: how_to_get(self.model, point.spec) for point in self.points}
            self.left_out = {spec: command for spec, command in lacking.items() if command is not None}
            self.points = [point for point in self.points if point.spec not in self.left_out]
        if not self.points:
            raise ValueError("got no points to measure: give --points")
        self.folder: SweepFolder = open_folder(options.run, self.header)

    @property
    def header(self) -> dict[str, Any]:
        """The settings of the sweep."""
        own = {"points": [point.spec for point in self.points], "sampling": dataclasses.asdict(self.sampling)}
        return super().header | own

    def measure(self) -> list[dict[str, str]]:
        """Run the missing rounds and shown images; return failed contenders with their reasons."""
        options = self.options
        known = self.folder.rounds(options.images)
        missing = [number for number in range(options.images) if number not in known]
        specs = [point.spec for point in self.points]
        variants = {PLAIN: self.plain_variants, "others": [options.variant]}
        names = {name_of(spec, one) for spec in specs for one in variants["others"]}
        names |= {name_of(PLAIN, one) for one in variants[PLAIN]}
        shown = min(options.shown, options.images)
        kept = {name: self.folder.portraits(name) for name in names}
        failed = [one for entry in known.values() for one in entry["failed"]]
        if not missing and all(len(kept[name]) >= shown for name in names - {one["contender"] for one in failed}):
            return unique(failed)
        lineup = line_up(self.stable, specs, variants, self.sampling)
        jobs = [self.job(number) for number in range(options.images)]
        self._warm_up(lineup, jobs)
        self._take_portraits(lineup.contenders, jobs[:shown])
        failed = [one | {"contender": f"{one['method']} | {one['variant']}"} for one in lineup.failed]
        self.run_rounds(
            self.folder,
            missing,
            lambda _: lineup.contenders,
            lambda contender, job, _: (contender.decode(job), {}),
            failed=failed,
        )
        return unique(failed)

    def _warm_up(self, lineup: Lineup, jobs: Sequence[Job]) -> None:
        bar = self.bar(len(lineup.contenders), "warming up", "points")

        def run(contender: Contender) -> None:
            warm(contender, jobs)
            bar.update(what=name_of(contender.label, contender.variant))

        warm_up(lineup, run)
        bar.close()

    def _take_portraits(self, contenders: Sequence[Contender], jobs: Sequence[Job]) -> None:
        """Decode the image of each job by each contender with its steps, untimed, unless it is stored."""
        bar = self.bar(len(contenders), "images to show", "points")
        for contender in contenders:
            name = name_of(contender.label, contender.variant)
            known = self.folder.portraits(name)
            if len(known) < len(jobs):
                for number in range(len(known), len(jobs)):
                    made = contender.decode(jobs[number], keep_steps=True)
                    accepted = read_map(made.steps, 0, made.codes.shape[1])
                    known.append({"number": number, "codes": pack(made.codes[0]), "map": accepted.as_dict()})
                self.folder.write_portraits(name, known)
            bar.update(what=name)
        bar.close()

    def figures(self, failed: Sequence[Mapping[str, str]], judge: "Judge | None" = None) -> dict[str, Any]:
        """Return all figures for JSON; ValueError without rounds."""
        rounds = list(self.folder.rounds(self.options.images).values())
        plain = [name_of(PLAIN, one) for one in self.plain_variants if self._took_part(rounds, PLAIN, one)]
        baseline = fastest(rounds, plain)
        who = [(Point(PLAIN), baseline)]
        variant = self.options.variant
        who += [(p, name_of(p.spec, variant)) for p in self.points if self._took_part(rounds, p.spec, variant)]
        points = [self._point(point, name, baseline, rounds, judge) for point, name in who]
        return {
            "what": "frontier",
            **self.header,
            "surroundings": self.surroundings,
            "prompts": {"sha256": self.header["prompts"], "used": [self.prompt(n) for n in range(len(rounds))]},
            "images": len(rounds),
            "baseline": baseline,
            "plain": {name: Spread.of(seconds_of(rounds, name)).as_dict() for name in plain},
            "commits": list(dict.fromkeys(entry["commit"] for entry in rounds)),
            "load_average": [entry["load"]["before"] for entry in rounds],
            "judges": judge.facts if judge else {},
            "points": points,
            "fronts": fronts(points),
            "failed": list(failed),
            "left_out": self.left_out,
        }

    def _took_part(self, rounds: Sequence[Mapping[str, Any]], spec: str, variant: Variant) -> bool:
        return any(name_of(spec, variant) in entry["made"] for entry in rounds)

    def _point(
        self, point: Point, name: str, baseline: str, rounds: Sequence[Mapping[str, Any]], judge: "Judge | None"
    ) -> dict[str, Any]:
        codes = self.model.target.config.block_size
        found = point_figures(rounds, baseline, name, codes)
        sampled_by = self._in_same_dtype(rounds, name) if name == baseline else name
        numbered = [(n, entry["made"][sampled_by]) for n, entry in enumerate(rounds) if sampled_by in entry["made"]]
        if judge is not None:
            pictures = pixels_of(self.model, unpack([made["codes"] for _, made in numbered]))
            judged = judge.estimates(pictures, [self.prompt(number) for number, _ in numbered])
            quality = found["quality"] | {axis: as_dict(value) for axis, value in judged.items()}
            found["quality"] = {axis: quality[axis] for axis in QUALITY if axis in quality}
        method = method_of(self.model, point.spec)
        facts = {"spec": point.spec, "family": point.family, "label": point.label, "exact": method.exact}
        facts |= {"variant": name.partition(" | ")[2], "drawn_by": sampled_by}
        kind, _, dtype = facts["variant"].rpartition(" ")
        variant = Variant(kind, dtype)
        facts["made_with"] = made_with(self.stable.model(variant), point.spec, variant)
        return facts | found | {"portraits": self._portraits(sampled_by)}

    def _in_same_dtype(self, rounds: Sequence[Mapping[str, Any]], baseline: str) -> str:
        """Return the plain contender whose images are shown: in the methods' dtype if possible, else the baseline."""
        same = [one for one in self.plain_variants if one.dtype == self.options.variant.dtype]
        names = [name_of(PLAIN, one) for one in same if self._took_part(rounds, PLAIN, one)]
        return fastest(rounds, names) if names else baseline

    def _portraits(self, name: str) -> list[dict[str, Any]]:
        """Return the shown images: number, prompt, data URI of the pixels ("" without a tokenizer), acceptance map."""
        kept = self.folder.portraits(name)[: self.options.shown]
        if not kept:
            return []
        pictures = [""] * len(kept)
        if self.model.vq is not None:
            pixels = pixels_of(self.model, unpack([one["codes"] for one in kept]))
            pictures = [data_uri(one) for one in pixels.permute(0, 2, 3, 1).contiguous()]
        return [
            {"number": one["number"], "prompt": self.prompt(one["number"]), "picture": picture, "map": one["map"]}
            for one, picture in zip(kept, pictures, strict=True)
        ]


def unique(failed: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return each failure once."""
    return [dict(pairs) for pairs in dict.fromkeys(tuple(one.items()) for one in failed)]


if __name__ == "__main__":
    from lantern.cli.frontier import main

    sys.exit(main())
