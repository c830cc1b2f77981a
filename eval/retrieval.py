"""Does a picture lie nearest to its own concept among all concepts? In the feature space of an independent network."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

DRAWS = 2000


@dataclass(frozen=True)
class Gallery:
    """Real pictures to compare with: unit features, the concept of each (an index into `concepts`) and its style."""

    features: Float[Tensor, "n c"]
    labels: Int[Tensor, " n"]
    styles: tuple[str, ...]
    concepts: tuple[str, ...]

    def label(self, concept: str) -> int:
        """Index of a concept; ValueError for one that is not in the gallery."""
        if concept not in self.concepts:
            raise ValueError(f"concept {concept!r} is not among the {len(self.concepts)} trained ones")
        return self.concepts.index(concept)

    def similarity(
        self, features: Float[Tensor, "b c"], hidden: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b k"]:
        """Likeness to each concept: the cosine to the nearest of its pictures that are not hidden, else -inf."""
        cosine = features @ self.features.T
        if hidden is not None:
            cosine = cosine.masked_fill(hidden, -torch.inf)
        empty = torch.full((len(features), len(self.concepts)), -torch.inf)
        return empty.scatter_reduce(1, self.labels.expand(len(features), -1), cosine, "amax")

    def of_other_styles(self) -> tuple[Float[Tensor, "m k"], Int[Tensor, " m"]]:
        """Likeness of its own pictures to concepts as drawn in other styles, and their labels: the best to expect."""
        styles = torch.tensor([sorted(set(self.styles)).index(style) for style in self.styles])
        similarity = self.similarity(self.features, styles[:, None] == styles)
        has_other = similarity.gather(1, self.labels[:, None])[:, 0] > -torch.inf
        return similarity[has_other], self.labels[has_other]


def ranks(similarity: Float[Tensor, "b k"], labels: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """How many concepts a picture is more like than its own; 0 is a hit."""
    return (similarity > similarity.gather(1, labels[:, None])).sum(1)


def interval(hits: Bool[Tensor, " b"], *, seed: int) -> list[float]:
    """The 95 % bootstrap interval of a share."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(hits), (DRAWS, len(hits)), generator=generator)
    shares = hits.double()[picks].mean(1)
    ends = torch.quantile(shares, torch.tensor([0.025, 0.975], dtype=torch.float64))
    return [round(float(end), 4) for end in ends]


def accuracy(found: Int[Tensor, " b"], *, seed: int) -> dict[str, object]:
    """Top-1 and top-5 accuracy of ranks, with their intervals."""
    result: dict[str, object] = {"n": len(found)}
    for name, bound in (("top1", 1), ("top5", 5)):
        hits = found < bound
        result[name] = round(float(hits.double().mean()), 4)
        result[f"{name}_interval"] = interval(hits, seed=seed)
    return result


def misses(
    gallery: Gallery, similarity: Float[Tensor, "b k"], prompts: Sequence[str], found: Int[Tensor, " b"]
) -> list[list[str]]:
    """Of pictures whose concept is not among the nearest five: the prompt, and the concept they are most like."""
    nearest = similarity.argmax(1).tolist()
    return [[str(prompts[i]), gallery.concepts[nearest[i]]] for i in (found >= 5).nonzero()[:, 0].tolist()]
