"""The metrics of `lantern eval`: network, inputs and computation of each; figures with all that repeats them."""

import dataclasses
import hashlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial, reduce
from itertools import product
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import lantern
from lantern.core.config import hint_for, install_hint, installed, one_line
from lantern.core.io import sha256_of_lines
from lantern.eval.intervals import DRAWS, Estimate, mean_estimate
from lantern.eval.metrics import clip_score, distances
from lantern.eval.metrics.judges import NETWORKS, Judge, Seen, check_pairs, extract, load_judges, load_pairs, weights_of
from lantern.eval.metrics.moments import Moments, Reference, open_reference
from lantern.eval.metrics.pictures import Change
from lantern.eval.metrics.weights import Found, find_weights
from lantern.training.data import is_prepared

FEW = 2048  # dimension of Inception's features: with fewer images FID's covariance is singular
REFERENCE, PROMPTS, PAIRS = "reference", "prompts", "pairs"
LEAST_DRAWS = 20  # below which the 2.5 and 97.5 percentiles are little but the extremes
MANY = 1000  # images of both sets above which FID uses fewer draws
PREFIX = "A photo depicts "  # before the prompt, in LANTERN's CLIP score


@dataclass(frozen=True)
class Material:
    """Inputs of metrics: features of both sets, or of one and the reference's mean and covariance."""

    ours: Seen
    theirs: Seen
    pairs: Mapping[str, Float[Tensor, " n"]]
    reference: Reference
    judges: Mapping[str, Judge]
    prompts: Sequence[str]
    seed: int
    draws: int = DRAWS
    resized: str = ""

    def sets(self, judge: str) -> list[Float[Tensor, "n c"]]:
        """Return a network's features of both sets of images."""
        return [one.features[judge] for one in (self.ours, self.theirs)]

    @cached_property
    def neighbourhoods(self) -> Callable[[str, int], dict[str, Estimate]]:
        """Precision, recall, density and coverage by network and number of neighbours, computed together."""
        how = {"seed": self.seed, "draws": self.draws}
        return cache(lambda judge, nearest: distances.prdc(*reversed(self.sets(judge)), nearest=nearest, **how))

    def mean(self, values: Float[Tensor, " n"]) -> Estimate:
        """Return the mean of values over images; that of one image has no interval."""
        return mean_estimate(values, seed=self.seed, draws=self.draws if len(values) > 1 else 0)


@dataclass(frozen=True)
class Metric:
    """One metric: network, function of inputs and network, description in results, needs, least images of each set."""

    judge: str
    take: Callable[[Material, str], Estimate]
    protocol: str
    needs: tuple[str, ...] = (REFERENCE,)
    least: int = 1


def _frechet(given: Material, judge: str) -> Estimate:
    """Return the FID to images, or to statistics, which have no interval of their own."""
    fixed, expected = given.reference, made_with(judge, given.judges[judge], given.resized)
    if fixed.made_with not in ("", expected):
        raise ValueError(f"reference statistics made with {fixed.made_with!r}, wanted {expected!r}")
    ours, theirs = given.ours.features[judge], fixed.gaussian or given.theirs.features[judge]
    most = 100 if isinstance(theirs, Tensor) and len(ours) + len(theirs) <= MANY else 20
    return distances.frechet_distance(ours, theirs, seed=given.seed, draws=min(given.draws, most))


def _kernel(given: Material, judge: str) -> Estimate:
    return distances.kernel_distance(*given.sets(judge), seed=given.seed, draws=given.draws)


def _score(given: Material, judge: str) -> Estimate:
    return distances.inception_score(given.ours.features[judge], seed=given.seed, draws=min(given.draws, 100))


def _aligned(given: Material, judge: str, *, prefix: str = "", least: float = -math.inf) -> Estimate:
    """Return the mean of 100 x the cosine of each image and its prompt, not below `least`."""
    clip: Any = given.judges[judge]
    prompts = clip.embed_prompts([prefix + prompt for prompt in given.prompts])
    found = given.mean(clip_score.clip_scores(given.ours.features[judge], prompts))
    return dataclasses.replace(found, **{name: max(getattr(found, name), least) for name in ("value", "low", "high")})


def _pairwise(given: Material, judge: str) -> Estimate:
    values = given.pairs[judge]
    if judge == "psnr":
        values = values[values.isfinite()]  # that of equal images is infinite
    return given.mean(values) if len(values) else Estimate(math.inf)


def _near(name: str, resize: str, nearest: int) -> Metric:
    judge, protocol = f"inception:{resize}", f"{nearest} nearest neighbours in Inception's features"
    return Metric(judge, lambda given, judge: given.neighbourhoods(judge, nearest)[name], protocol, least=nearest + 1)


FRECHET = "Frechet distance of Inception's 2048 features"
KERNEL = "unbiased squared MMD x 1, kernel (x.y / 2048 + 1)^3, of all pairs of at most 10000 images of each set"
CLIP = "torchmetrics' CLIPScore: 100 x cosine, the mean not below 0"
CLIP_LANTERN = "LANTERN's: 100 x cosine, 'A photo depicts' before the prompt"
PICKSCORE = "PickScore: 100 x cosine of the fine-tuned ViT-H/14, without logit scale"
METRICS: dict[str, Metric] = {
    "kid": Metric("inception:clean", _kernel, KERNEL, least=2),
    "fid": Metric("inception:clean", _frechet, FRECHET, least=2),
    "fid-legacy": Metric("inception:legacy", _frechet, FRECHET, least=2),
    **{name: _near(name, "clean", 5) for name in ("precision", "recall", "density", "coverage")},
    **{f"{name}-legacy": _near(name, "legacy", 3) for name in ("precision", "recall")},
    "is": Metric("logits:legacy", _score, "exp of the mean KL, mean of splits of at most 5000 images", ()),
    "clip": Metric("clip", partial(_aligned, least=0.0), CLIP, (PROMPTS,)),
    "clip-lantern": Metric("clip", partial(_aligned, prefix=PREFIX), CLIP_LANTERN, (PROMPTS,)),
    "hps": Metric("hps", _aligned, "HPSv2.1: 100 x cosine of the fine-tuned ViT-H/14", (PROMPTS,)),
    "pickscore": Metric("pickscore", _aligned, PICKSCORE, (PROMPTS,)),
    "lpips": Metric("lpips", _pairwise, "AlexNet, version 0.1", (REFERENCE, PAIRS)),
    "psnr": Metric("psnr", _pairwise, "decibels, mean of images", (REFERENCE, PAIRS)),
}


def made_with(name: str, judge: Judge, resized: str) -> str:
    """Return a string that identifies network and resizes of moments; `name` is such as "inception:clean"."""
    return " ".join(["inception", judge.weights.sha256, *resized.split(), name.partition(":")[2]])


@dataclass(frozen=True)
class Figure:
    """A figure of images and how it was computed; `interval` is of 95 %, or None. PSNR of equal images is infinite.

    `reference_images` is None for statistics that do not state their number, and 0 without a reference.
    """

    name: str
    value: float
    protocol: str
    library: str
    resize: str
    weights: str
    weights_sha256: str
    images: int
    images_sha256: str
    reference: str
    reference_sha256: str
    reference_images: int | None
    seed: int
    interval: tuple[float, float] | None = None
    interval_means: str = ""
    prompts: str = ""
    warning: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, which has no infinity: the value is None then."""
        return dataclasses.asdict(self) | {"value": self.value if math.isfinite(self.value) else None}


@dataclass(frozen=True)
class Options:
    """Options of a measurement.

    reference_name, prompts_name: names in the results. cache: folder of weights. draws: of an interval, or 0. batch:
    images at a time. moments: folder for Inception's moments of both sets, to merge shards. before: a function applied
    to every image of both sets first; `resized` describes it. ValueError for too few draws.
    """

    reference_name: str = ""
    prompts_name: str = ""
    cache: Path | None = None
    draws: int = DRAWS
    batch: int = 32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    moments: Path | None = None
    before: Change | None = None
    resized: str = ""
    is_quiet: bool = True

    def __post_init__(self) -> None:
        if 0 < self.draws < LEAST_DRAWS:
            raise ValueError(f"draws is {self.draws}, wanted at least {LEAST_DRAWS}, or 0 for no interval")


def measure(
    pictures: Sequence[Path],
    reference: Path | Sequence[Path] | None,
    metrics: Sequence[str],
    *,
    prompts: Sequence[str] | None = None,
    weights: Mapping[str, Path] | None = None,
    seed: int = 0,
    options: Options | None = None,
) -> dict[str, Figure]:
    """Return the figures of `metrics` by name; each image is read once.

    reference: folder, files, or statistics (see `open_reference`). prompts: one per image in order, or None to read
    them from the files. weights: files of networks by name. Below 2,048 images FID has a warning and KID is added.
    ValueError for missing inputs, FileNotFoundError for missing weights.
    """
    options, weights = options or Options(), weights or {}
    for name in in_order(metrics):
        if why := reference_obstacle(name, reference):
            raise ValueError(f"{name}: {why}")
    if options.moments is not None and not any(METRICS[name].judge.startswith("inception:") for name in metrics):
        raise ValueError("moments are Inception's, which no metric here uses: add fid, or leave --keep-moments out")
    if prompts is not None and len(prompts) != len(pictures):
        raise ValueError(f"{len(prompts)} prompts for {len(pictures)} images, wanted one each, in order of names")
    with tempfile.TemporaryDirectory(prefix="lantern-eval-") as folder:
        known = open_reference(reference, name=options.reference_name, room=Path(folder, "reference"))
        names = in_order(metrics, images=len(pictures), has_pictures=bool(known.pictures))
        check_numbers(metrics, len(pictures), len(known.pictures))
        chosen = {name: METRICS[name] for name in names}
        where: dict[str, Any] = {"cache": options.cache, "device": options.device}
        ours = load_judges([one.judge for one in chosen.values() if PAIRS not in one.needs], weights, **where)
        pairs = load_pairs([name for name, one in chosen.items() if PAIRS in one.needs], weights, **where)
        of_reference = {one.judge for one in chosen.values() if REFERENCE in one.needs and known.pictures}
        theirs = {name: judge for name, judge in ours.items() if name in of_reference}
        found = {name: judge.weights for name, judge in ours.items()} | {name: one for name, (_, one) in pairs.items()}
        seen, values = extract(
            Path(folder),
            ((pictures, ours), (known.pictures if theirs or pairs else (), theirs)),
            {name: measure for name, (measure, _) in pairs.items()},
            batch=options.batch,
            before=options.before,
            prompts=prompts if any(PROMPTS in one.needs for one in chosen.values()) else (),
            is_quiet=options.is_quiet,
        )
        if options.moments is not None:
            for name, (role, one) in product(ours, zip(("pictures", "reference"), seen, strict=True)):
                if name.startswith("inception:") and name in one.features:
                    path = options.moments / f"{role}-{name.replace(':', '-')}.safetensors"
                    how: Any = {"made_with": made_with(name, ours[name], options.resized), "sets": (one.sha256,)}
                    Moments.of(one.features[name], **how).save(path)
        texts = [str(prompt) for prompt in (seen[0].prompts if prompts is None else prompts)]
        material = Material(seen[0], seen[1], values, known, ours, texts, seed, options.draws, options.resized)
        return {name: _figure(name, material, found.get(METRICS[name].judge), options) for name in names}


def in_order(metrics: Sequence[str], *, images: int = FEW, has_pictures: bool = True) -> list[str]:
    """Return the metrics to compute, in printed order, KID beside FID of few images; ValueError for unknown ones."""
    for name in metrics:
        if name not in METRICS:
            raise ValueError(f"metric {name[:40]!r} is unknown: {hint_for(name, METRICS)}")
    adds_kid = images < FEW and has_pictures and any(name.startswith("fid") for name in metrics)
    return [name for name in METRICS if name in metrics or (adds_kid and name == "kid")]


def reference_obstacle(name: str, reference: Path | Sequence[Path] | None, origin: str = "") -> str:
    """Return what a metric lacks in a reference, or "" if nothing; `origin` says where a missing one can be found."""
    if REFERENCE not in METRICS[name].needs:
        return ""
    if reference is None:
        return f"it compares with real images: give them with --reference{origin}"
    if isinstance(reference, Path) and not reference.is_dir() and not name.startswith("fid"):
        return f"{reference.name} is a file of statistics, which support only FID: wanted a folder of images"
    return ""


def check_reference(metrics: Sequence[str], pictures: Sequence[Path], reference: Path | None) -> None:
    """Raise ValueError for no reference, too few images, or pairs that do not fit; prepared data are not read."""
    if reference is None:
        return
    real = () if is_prepared(reference) else open_reference(reference, room=reference).pictures
    check_numbers(metrics, len(pictures), len(real))
    if real and (names := [name for name in metrics if PAIRS in METRICS[name].needs]):
        check_pairs(names, pictures, real)


def check_numbers(metrics: Sequence[str], ours: int, theirs: int) -> None:
    """Raise ValueError for a metric of too few images; `theirs` is 0 if the reference's number is not known."""
    for name in metrics:
        if (count := min(ours, theirs or ours)) < (least := METRICS[name].least):
            raise ValueError(f"{name}: a set has {count} images, wanted at least {least}, or leave it out of --metrics")


def obstacle(name: str, reference: Path | None, weights: Mapping[str, Path], origin: str = "") -> str:
    """Return what a metric lacks (a reference, weights, a package), or "" if nothing; images are not needed yet."""
    metric = METRICS[name]
    if why := reference_obstacle(name, reference, origin):
        return why
    network = weights_of(metric.judge, weights)
    try:
        if network:
            find_weights(network, weights)
    except (FileNotFoundError, ConnectionError) as error:
        return one_line(error, 2000)  # a command that it names is whole
    lacking = [package for package in NETWORKS[metric.judge][1] if installed(package) is None]
    return f"{lacking[0]} is not installed; {install_hint('eval')}" if lacking else ""


def _figure(name: str, material: Material, weights: Found | None, options: Options) -> Figure:
    metric, ours, reference = METRICS[name], material.ours, material.reference
    estimate, uses_reference = metric.take(material, metric.judge), REFERENCE in metric.needs
    real = material.theirs if reference.gaussian is None else reference
    prompts = ""
    if PROMPTS in metric.needs:
        prompts = f"{options.prompts_name or 'from the image files'} (sha256 {sha256_of_lines(material.prompts)})"
    return Figure(
        **described(name, options.resized),
        value=estimate.value,
        interval=None if math.isnan(estimate.low) else (estimate.low, estimate.high),
        interval_means=estimate.means,
        weights=weights.path.name if weights else "",
        weights_sha256=weights.sha256 if weights else "",
        images=ours.count,
        images_sha256=ours.sha256,
        reference=reference.name if uses_reference else "",
        reference_sha256=real.sha256 if uses_reference else "",
        reference_images=(real.count or None) if uses_reference else 0,
        prompts=prompts,
        seed=material.seed,
        warning=_warning(name, material),
    )


def described(name: str, resized: str = "") -> dict[str, Any]:
    """Return the fields of a figure that its metric states; `resized` describes a resize before the network's own."""
    resize, packages = NETWORKS[METRICS[name].judge]
    library = ", ".join([f"lantern {lantern.__version__}", *(f"{one} {installed(one)}" for one in packages)])
    resize = f"{resized}, then {resize}" if resized else resize
    return {"name": name, "protocol": METRICS[name].protocol, "library": library, "resize": resize}


def few_warning(images: int) -> str:
    """Return the warning for FID of fewer than FEW images, "" for more."""
    if images >= FEW:
        return ""
    return f"{images} images are fewer than {FEW}: FID is biased upwards and depends on their number; use KID"


def _warning(name: str, material: Material) -> str:
    if METRICS[name].judge.startswith("inception") and material.ours.sha256 == material.theirs.sha256:
        return "the reference has the same images"
    if name.startswith("fid"):
        fixed, ours, theirs = material.reference, material.ours.count, material.theirs.count
        warnings = [few_warning(min(ours, theirs) if fixed.gaussian is None else ours)]
        if fixed.gaussian is not None and not fixed.made_with:
            warnings.append("the reference file does not name its network and resize")
        return "; ".join(filter(None, warnings))
    if name == "psnr" and (equal := int(material.pairs["psnr"].isinf().sum())):
        left = "" if equal == len(material.pairs["psnr"]) else " and left out"
        return f"{equal} images are equal to their reference{left} (infinite PSNR)"
    if PROMPTS in METRICS[name].needs:
        prefix = PREFIX if name == "clip-lantern" else ""
        cut = clip_score.cut_prompts([prefix + prompt for prompt in material.prompts])
        return f"{cut} prompts are truncated to 77 tokens" if cut else ""
    return ""


def fid_of_shards(paths: Sequence[Path], reference: Path, metrics: Sequence[str] | None = None) -> Figure:
    """Return the FID of images made in shards, from the saved moments of each shard and of the reference.

    ValueError for moments without the names of network and resize, or with others, and for `metrics` other than it.
    """
    shards = [Moments.load(path) for path in paths]
    if reference.is_dir() or reference.suffix == ".npz":
        raise ValueError(f"got reference {reference} for moments, wanted moments of it: save them with --keep-moments")
    theirs, ours = Moments.load(reference), reduce(Moments.merged, shards)
    network, _, resize = ours.made_with.rpartition(" ")
    sha256, _, resized = network.removeprefix("inception ").partition(" ")
    name = "fid" if resize == "clean" else f"fid-{resize}"
    if name not in METRICS:
        raise ValueError(f"{paths[0]} does not name its network and resize: save moments with --keep-moments")
    if metrics is not None and set(metrics) != {name}:
        raise ValueError(f"got metrics {', '.join(metrics)} of moments, which give only {name}: leave --metrics out")
    if theirs.made_with not in ("", ours.made_with):
        raise ValueError(f"features made with {ours.made_with!r} and with {theirs.made_with!r}, wanted the same")
    return Figure(
        **described(name, resized),
        value=distances.frechet(ours.gaussian, theirs.gaussian),
        weights="inception",
        weights_sha256=sha256,
        images=ours.count,
        images_sha256=_digest(ours.sets),
        reference=reference.name,
        reference_sha256=_digest(theirs.sets),
        reference_images=theirs.count,
        seed=0,
        warning=few_warning(ours.count),
    )


def _digest(sets: Sequence[str]) -> str:
    return sets[0] if len(sets) == 1 else hashlib.sha256(" ".join(sets).encode()).hexdigest()
