"""One board: methods and plain decoding make the same images in interleaved rounds; every result is a JSON line.

    {"fingerprint": {...}}                      model, weights, methods, sampling, seed, machine
    {"round": 0, "contender": "eagle1 | cpu bf16", ...}     a record of `lantern.eval.speed.race`, with the commit
    {"absent": "eagle3 | cpu bf16", "temperature": 1.0, "status": "lacking", "reason": "..."}
    {"quality": "lantern | cpu bf16", "temperature": 1.0, "images": 64, "judged": {"metrics": ["kid"], ...},
     "metrics": {"kid": {"value": ..., ...}}}

Lines are only appended: an interrupted run resumes, and one with more images extends a shorter one. A method that fails
is tried again when the run resumes. `table` computes the figures from the lines, `plot` draws them; neither needs the
model.
"""

import dataclasses
import hashlib
import itertools
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from lantern.core.config import one_line
from lantern.core.io import sha256_of_lines, trained_steps
from lantern.core.sampling import Sampling
from lantern.eval.json_lines import JsonLines, Line
from lantern.eval.metrics import quality
from lantern.eval.speed import contenders
from lantern.eval.speed.contenders import AUTO, PLAIN, Contender, RoundImages, Variant, name_of
from lantern.eval.speed.race import first_passes, images_of, race, reporter, take, unpack, warm
from lantern.eval.speed.surroundings import file_hashes, surroundings
from lantern.generation.choice import choose_method
from lantern.generation.images import save_image, to_image
from lantern.methods import METHODS
from lantern.methods.method import ADD_ONS
from lantern.models.folder import FOLDER, Model, load_model

VERSUS = "=="  # between the methods of a pair on the command line
SEPARATOR = "/"  # between the values of a setting: "lantern:delta=0.1/0.2" is two methods
# fields of the surroundings that must be equal when a run resumes
SAME = ("lantern", "python", "torch", "torchao", "cpu", "cores", "threads", "device", "gpu")


@dataclass(frozen=True)
class BoardOptions:
    """How methods are measured: in `variant`, on `prompts`, which are used in order and repeated; lines go to `out`.

    Empty `methods` and `pairs` mean all methods. Both methods of a pair are measured and compared. Plain decoding also
    runs in each of the kinds `baselines` (empty: all kinds of the device) and each of `baseline_dtypes`. Everything is
    measured at each of `temperatures` (empty: the model's own).
    """

    out: Path
    prompts: Sequence[str]
    methods: Sequence[str] = ()
    pairs: Sequence[tuple[str, str]] = ()
    images: int = 8
    batch: int = 1
    model: str = "lantern-emoji"
    variant: Variant = field(default_factory=lambda: Variant(AUTO, "fp32"))
    baselines: Sequence[str] = ()
    baseline_dtypes: Sequence[str] = ("fp32", "bf16")
    sampling: Mapping[str, Any] = field(default_factory=dict)
    temperatures: Sequence[float] = ()
    seed: int = 0
    device: str = "auto"
    is_quiet: bool = False


class Board:
    """A measurement with its model loaded. ValueError for an unknown method or setting."""

    def __init__(self, options: BoardOptions) -> None:
        self.model: Model = load_model(options.model, device=options.device, dtype="fp32", engine="eager")
        self.stable = contenders.Stable(self.model)
        self.options, self.variant = options, options.variant.resolved(self.stable)
        own: Sampling = self.model.sampling(**options.sampling)
        temperatures = dict.fromkeys(options.temperatures or [own.temperature])
        self.samplings = [dataclasses.replace(own, temperature=temperature) for temperature in temperatures]
        of_pairs = tuple(itertools.chain.from_iterable(options.pairs))
        given = (*options.methods, *of_pairs) or [name for name in METHODS if name not in (PLAIN, "auto")]
        self.specs = list(dict.fromkeys(one for spec in given for one in expand(spec)))
        for spec in self.specs:
            if choose_method(self.model, spec).is_plain:
                raise ValueError(f"--methods {spec[:60]!r}: plain decoding is always measured: give methods that draft")
        kinds = options.baselines or contenders.kinds_of(self.model.device)
        more = [Variant(kind, dtype) for dtype in options.baseline_dtypes for kind in kinds]
        self.plain_variants = list(dict.fromkeys([self.variant, *more]))  # that of the methods first
        self.surroundings = surroundings(self.model.device)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """The settings of the run, without the number of images, so that more can be added later."""
        folder, options = self.model.folder, self.options
        parts = sorted((folder / FOLDER).glob("*/")) if folder else ()
        return {
            "what": "leaderboard",
            "model": self.model.name,
            "weights": self.model.fingerprint,
            "parts": {part.name: file_hashes(part) for part in parts},
            "tokens": self.model.target.config.block_size,
            "variant": str(self.variant),
            "plain": [name_of(PLAIN, one) for one in self.plain_variants],
            "methods": {spec: self.facts(spec) for spec in self.specs},
            "pairs": [list(pair) for pair in options.pairs],
            "sampling": dataclasses.asdict(self.samplings[0])
            | {"temperature": [sampling.temperature for sampling in self.samplings]},
            "seed": options.seed,
            "batch": options.batch,
            "prompts": sha256_of_lines(options.prompts),
            "surroundings": {name: self.surroundings[name] for name in SAME},
        }

    def facts(self, spec: str) -> dict[str, Any]:
        """Return a method's promise, the steps that its networks were trained for, and settings that fit no engine."""
        method, folder = choose_method(self.model, spec), self.model.folder
        names = [ADD_ONS[name].folder for name in method.made.needs]
        settings = {} if spec == "auto" else {k: v for k, v in method.settings.items() if not method.options[k].fits}
        training = {name: folder and trained_steps(folder / name) for name in names}
        return {"promise": method.promise, "training": training, "settings": settings}

    def measure(self) -> None:
        """Run what is missing of all rounds, without methods that fail; RuntimeError if plain decoding does."""
        options = self.options
        rounds = -(-options.images // options.batch)
        jobs = contenders.jobs_of(self.model, options.prompts, rounds=rounds, batch=options.batch, seed=options.seed)
        entries = [(PLAIN, one) for one in self.plain_variants] + [(spec, self.variant) for spec in self.specs]
        report = reporter(options.is_quiet)
        with JsonLines(options.out, self.fingerprint) as file:
            done = {(line["contender"], line["temperature"], line["round"]) for line in file.lines if "round" in line}
            field, failed = list[Contender](), set[tuple[str, float]]()
            for (spec, variant), sampling in itertools.product(entries, self.samplings):
                key = name_of(spec, variant), sampling.temperature
                missing = [job for number, job in enumerate(jobs) if (*key, number) not in done]
                if not missing:
                    continue
                report(f"preparing {key[0]} at temperature {key[1]:g}")
                try:
                    # on a GPU every new shape is captured or compiled, on a CPU a whole batch would only take time
                    is_cuda = self.model.device.type == "cuda"
                    run = partial(warm, jobs=missing[:1]) if is_cuda else partial(first_passes, job=missing[0])
                    field.append(contenders.entered(self.stable, spec, variant, contenders.built(sampling), run))
                except Exception as error:  # the reason is shown in the method's row
                    line = self._absent(key, error)
                    if line not in file.lines:
                        file.append(line)

            for one in field:  # times of passes choose a window
                own = one.parts.method.settings.get("window")
                windows = {line.get("window") for line in file.lines if line.get("contender") == one.name}
                if other := windows - {own}:
                    what = f"{options.out} has {one.label} with window {other.pop()}, here it is {own}"
                    raise ValueError(f"{what}: name the window, or use another --out")

            def wants(one: Contender, number: int) -> bool:
                return one.key not in failed and (*one.key, number) not in done

            def line_of(one: Contender, number: int, job: RoundImages) -> Line:
                try:
                    return take(one, number, job, watches=True) | {"commit": self.surroundings["commit"]}
                except Exception as error:
                    failed.add(one.key)
                    return self._absent(one.key, error)

            for line in race(field, jobs, line_of, wants=wants, report=report):
                file.append(line)

    def _absent(self, key: tuple[str, float], error: Exception) -> Line:
        """Return the line of a contender that fails, or lacks a part; raise for the plain decoding of the table."""
        name, temperature = key
        status, reason = "lacking", one_line(error)
        if name == name_of(PLAIN, self.variant):
            raise RuntimeError(f"plain decoding does not run as {self.variant}: {reason}") from error
        if not isinstance(error, ValueError):
            status, reason = "failed", f"{type(error).__name__}: {reason}"
        return {"absent": name, "temperature": temperature, "status": status, "reason": reason[:300]}

    def judge(self, metrics: Sequence[str], reference: Path | None, weights: Mapping[str, Path]) -> None:
        """Append the quality of plain decoding's images and of each relaxed method's, measured where it is missing.

        The metrics, with real images or statistics, and weights by network, are as `lantern eval` has them. The last
        line of a method is that of these.
        """
        judged: dict[str, Any] = {"metrics": sorted(set(metrics)), "reference": reference and version_of(reference)}
        judged["weights"] = {name: version_of(path) for name, path in sorted(weights.items())}
        with JsonLines(self.options.out, self.fingerprint) as file:
            relaxed = [spec for spec in self.specs if self.fingerprint["methods"][spec]["promise"] == "relaxed"]
            names = [name_of(spec, self.variant) for spec in (PLAIN, *relaxed)]
            for name, sampling in itertools.product(names, self.samplings):
                lines = at_temperature(file.lines, sampling.temperature)
                images = images_of(lines, name)[: self.options.images]
                line = {"quality": name, "temperature": sampling.temperature, "images": len(images), "judged": judged}
                before = [one for one in lines if one.get("quality") == name]
                known = [one for one in before if one | line == one]
                if images and not known:
                    reporter(self.options.is_quiet)(f"metrics of {name}")
                    file.append(line | {"metrics": self._metrics(images, metrics, reference, weights)})
                elif images and known[-1] != before[-1]:
                    file.append(known[-1])

    def _metrics(
        self, images: Sequence[Line], metrics: Sequence[str], reference: Path | None, weights: Mapping[str, Path]
    ) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="lantern-board-") as folder:
            paths = [Path(folder, f"{number:06}.png") for number in range(len(images))]
            for path, image in zip(paths, images, strict=True):
                tokens = unpack([image["tokens"]]).to(self.model.device)
                save_image(to_image(self.model.pictures(tokens)[0]), path, {})
            classes = [f"class {number}" for number in range(self.model.target.config.num_classes)]
            subjects = self.options.prompts if self.model.takes_prompts else classes  # in order and repeated
            prompts = list(itertools.islice(itertools.cycle(subjects), len(images)))
            how = {"seed": self.options.seed, "options": quality.Options(device=self.model.device)}
            found = quality.measure(paths, reference, metrics, prompts=prompts, weights=weights, **how)
        ends = {name: one.interval or (None, None) for name, one in found.items() if math.isfinite(one.value)}
        return {name: {"value": found[name].value, "low": low, "high": high} for name, (low, high) in ends.items()}


def expand(spec: str) -> Iterator[str]:
    """Yield the methods of a spec whose settings may have several values: "lantern:k=10/100" is two methods."""
    name, _, rest = spec.partition(":")
    settings = [pair.partition("=") for pair in rest.split(",") if pair]
    for values in itertools.product(*(value.split(SEPARATOR) for _, _, value in settings)):
        pairs = [f"{setting}{sign}{value}" for (setting, sign, _), value in zip(settings, values, strict=True)]
        yield ":".join([name, ",".join(pairs)]) if pairs else name


def shipped(name: str) -> list[str]:
    """Return the entries of a list beside this file: "pairs" of the papers, or "rules" at several strengths."""
    lines = Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def parse_pair(text: str) -> tuple[str, str]:
    """Return the two methods of "A==B"; ValueError for another form."""
    first, sign, second = text.partition(VERSUS)
    if not sign or not first or not second or VERSUS in second:
        raise ValueError(f"--pairs {text[:60]!r}, wanted METHOD{VERSUS}METHOD, such as eagle2{VERSUS}eagle1")
    return first, second


def version_of(path: Path) -> str:
    """Return a digest of a file's or folder's place and of the sizes and times of its files, which are not read."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    facts = [(str(one.resolve()), one.stat().st_size, one.stat().st_mtime_ns) for one in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def at_temperature(lines: Sequence[Line], temperature: float) -> list[Line]:
    """Return the lines of a temperature, with those of all."""
    return [line for line in lines if line.get("temperature", temperature) == temperature]
