"""Retrieval accuracy: whether an image is nearest to its own concept in the features of an independent network."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.eval.metrics.distances import mean_estimate

DRAWS = 2000


@dataclass(frozen=True)
class Gallery:
    """Real images: unit features, concept of each (an index into `concepts`) and style."""

    features: Float[Tensor, "n c"]
    labels: Int[Tensor, " n"]
    styles: tuple[str, ...]
    concepts: tuple[str, ...]

    def label(self, concept: str) -> int:
        """Return the index of a concept; ValueError if it is not in the gallery."""
        if concept not in self.concepts:
            raise ValueError(f"got concept {concept!r}, expected one of the {len(self.concepts)} trained ones")
        return self.concepts.index(concept)

    def similarity(
        self, features: Float[Tensor, "b c"], hidden: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b k"]:
        """Return the similarity to each concept: the largest cosine over its visible images, else -inf."""
        cosine = features @ self.features.T
        if hidden is not None:
            cosine = cosine.masked_fill(hidden, -torch.inf)
        empty = torch.full((len(features), len(self.concepts)), -torch.inf)
        return empty.scatter_reduce(1, self.labels.expand(len(features), -1), cosine, "amax")

    def of_other_styles(self) -> tuple[Float[Tensor, "m k"], Int[Tensor, " m"]]:
        """Return the similarity of the gallery's images to concepts in other styles, and their labels."""
        styles = torch.tensor([sorted(set(self.styles)).index(style) for style in self.styles])
        similarity = self.similarity(self.features, styles[:, None] == styles)
        has_other = similarity.gather(1, self.labels[:, None])[:, 0] > -torch.inf
        return similarity[has_other], self.labels[has_other]


def ranks(similarity: Float[Tensor, "b k"], labels: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """Return the number of concepts more similar than the image's own; 0 is a hit."""
    return (similarity > similarity.gather(1, labels[:, None])).sum(1)


def interval(hits: Bool[Tensor, " b"], *, seed: int) -> list[float]:
    """Return the 95 % bootstrap interval of a share."""
    found = mean_estimate(hits.double(), seed=seed, draws=DRAWS)
    assert found.low is not None and found.high is not None
    return [round(found.low, 4), round(found.high, 4)]


def accuracy(found: Int[Tensor, " b"], *, seed: int) -> dict[str, object]:
    """Return top-1 and top-5 accuracy of ranks, with 95 % intervals."""
    result: dict[str, object] = {"n": len(found)}
    for name, bound in (("top1", 1), ("top5", 5)):
        hits = found < bound
        result[name] = round(float(hits.double().mean()), 4)
        result[f"{name}_interval"] = interval(hits, seed=seed)
    return result


def misses(
    gallery: Gallery, similarity: Float[Tensor, "b k"], prompts: Sequence[str], found: Int[Tensor, " b"]
) -> list[list[str]]:
    """Return prompt and most similar concept of each image whose own concept is not among the nearest five."""
    nearest = similarity.argmax(1).tolist()
    return [[str(prompts[i]), gallery.concepts[nearest[i]]] for i in (found >= 5).nonzero()[:, 0].tolist()]
