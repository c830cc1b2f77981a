"""The metrics of `lantern eval`: the network, inputs and computation of each."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from lantern.eval.intervals import DRAWS, Estimate, mean_estimate
from lantern.eval.metrics import clip_score, inception
from lantern.eval.metrics.distances import frechet_distance, inception_score, kernel_distance, prdc
from lantern.eval.metrics.extraction import Extracted
from lantern.eval.metrics.judges import Judge
from lantern.eval.metrics.reference import Reference, made_with

REFERENCE, PROMPTS, PAIRS = "reference", "prompts", "pairs"
MANY = 1000  # pictures of both sets above which FID uses fewer bootstrap draws


@dataclass(frozen=True)
class Material:
    """Inputs of metrics: features of both sets, or of one and the reference's mean and covariance."""

    extracted: Extracted
    reference: Reference
    judges: Mapping[str, Judge]
    prompts: Sequence[str]
    seed: int
    draws: int = DRAWS

    def sets(self, judge: str) -> tuple[Float[Tensor, "n c"], Float[Tensor, "m c"]]:
        """Return the features of both sets of images."""
        return self.extracted.ours.features[judge], self.extracted.theirs.features[judge]

    @cached_property
    def neighbourhoods(self) -> dict[str, Estimate]:
        """Precision, recall, density and coverage, computed together."""
        ours, theirs = self.sets("inception:clean")
        return prdc(theirs, ours, seed=self.seed)

    def frechet(self, judge: str) -> Estimate:
        """Return the FID to images, or to statistics, which the bootstrap holds fixed.

        ValueError for statistics of another network or resize.
        """
        fixed, expected = self.reference, made_with(judge, self.judges[judge])
        if fixed.made_with not in ("", expected):
            raise ValueError(f"reference statistics made with {fixed.made_with!r}, expected {expected!r}")
        ours, theirs = self.extracted.ours.features[judge], fixed.gaussian or self.extracted.theirs.features[judge]
        most = 100 if fixed.gaussian is None and len(ours) + len(theirs) <= MANY else 20
        return frechet_distance(ours, theirs, seed=self.seed, draws=min(self.draws, most))

    def alignment(self, judge: str, *, prefix: str = "") -> Float[Tensor, " n"]:
        """Return 100 x the cosine of each image and its prompt."""
        clip = self.judges[judge]
        assert isinstance(clip, clip_score.Clip)
        prompts = clip.embed_prompts([prefix + prompt for prompt in self.prompts])
        return clip_score.clip_scores(self.extracted.ours.features[judge], prompts)

    def mean(self, values: Float[Tensor, " n"]) -> Estimate:
        """Return the mean of values over images."""
        return mean_estimate(values, seed=self.seed, draws=self.draws)


@dataclass(frozen=True)
class Metric:
    """One metric: its network, inputs, computation, and description in results.

    packages: the Python packages whose versions its value depends on.
    """

    judge: str
    needs: frozenset[str]
    take: Callable[[Material], Estimate]
    resize: str
    packages: tuple[str, ...]
    protocol: str


def _of_inception(judge: str, take: Callable[[Material], Estimate], protocol: str, *needs: str) -> Metric:
    resize, package = inception.RESIZES[judge.partition(":")[2]]
    return Metric(judge, frozenset(needs), take, resize, (package,), protocol)


def _frechet(resize: str) -> Metric:
    judge = f"inception:{resize}"
    protocol = "Frechet distance of Inception's 2048 features"
    return _of_inception(judge, lambda material: material.frechet(judge), protocol, REFERENCE)


def _neighbourhood(name: str) -> Metric:
    protocol = "5 nearest neighbours in Inception's features"
    return _of_inception("inception:clean", lambda material: material.neighbourhoods[name], protocol, REFERENCE)


def _aligned(judge: str, protocol: str, *, prefix: str = "", is_positive: bool = False) -> Metric:
    def take(material: Material) -> Estimate:
        found = material.mean(material.alignment(judge, prefix=prefix))
        if not is_positive:
            return found
        cut = {name: max(getattr(found, name), 0.0) for name in ("value", "low", "high")}
        return dataclasses.replace(found, **cut)

    packages = ("transformers", "open_clip_torch")
    return Metric(judge, frozenset({PROMPTS}), take, clip_score.RESIZE, packages, protocol)


def _pairwise(name: str, packages: tuple[str, ...], protocol: str) -> Metric:
    def take(material: Material) -> Estimate:
        values = material.extracted.pairs[name]
        if name == "psnr":
            values = values[values.isfinite()]
            if not len(values):
                raise ValueError("every image is equal to its reference, so PSNR is infinite: leave psnr out")
        return material.mean(values)

    return Metric(name, frozenset({REFERENCE, PAIRS}), take, "none", packages, protocol)


def _kernel(material: Material) -> Estimate:
    return kernel_distance(*material.sets("inception:clean"), seed=material.seed, draws=material.draws)


def _score(material: Material) -> Estimate:
    logits = material.extracted.ours.features["logits:legacy"]
    return inception_score(logits, seed=material.seed, draws=min(material.draws, 100))


METRICS: dict[str, Metric] = {
    "kid": _of_inception(
        "inception:clean", _kernel, "unbiased squared MMD x 1, kernel (x.y / 2048 + 1)^3, of all pairs", REFERENCE
    ),
    "fid": _frechet("clean"),
    "fid-legacy": _frechet("legacy"),
    **{name: _neighbourhood(name) for name in ("precision", "recall", "density", "coverage")},
    "is": _of_inception("logits:legacy", _score, "exp of the mean KL, one split"),
    "clip": _aligned("clip", "torchmetrics' CLIPScore: 100 x cosine, the mean not below 0", is_positive=True),
    "clip-lantern": _aligned(
        "clip", "LANTERN's: 100 x cosine, 'A photo depicts' before the prompt", prefix=clip_score.LANTERN_PREFIX
    ),
    "hps": _aligned("hps", "HPSv2.1: 100 x cosine of the fine-tuned ViT-H/14"),
    "pickscore": _aligned("pickscore", "PickScore: 100 x cosine of the fine-tuned ViT-H/14, without logit scale"),
    "lpips": _pairwise("lpips", ("torchmetrics", "torchvision"), "AlexNet, version 0.1"),
    "psnr": _pairwise("psnr", ("torchmetrics",), "decibels, mean of images"),
}
