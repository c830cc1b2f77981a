"""Quality of the images of frontier and leaderboard, by networks that took no part in making them."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from lantern.core.io import atomic_write
from lantern.eval.boards.study import Study
from lantern.eval.metrics import clip_score, efficientnet
from lantern.eval.metrics.distances import Estimate, frechet_distance, kernel_distance, mean_estimate
from lantern.eval.metrics.inception import RESIZES, Inception, load_inception
from lantern.eval.metrics.reconstruction import PIXEL_BATCH
from lantern.eval.metrics.retrieval import ranks
from lantern.eval.metrics.weights import find_weights

Pictures = UInt8[Tensor, "n 3 h w"]


class Judge:
    """Computes "kid", "fid" and "clip" with `weights`, others with the retrieval network of the study's packages.

    The others are "retrieval", "likeness" and, of two images or more, "kid-efficientnet".

    weights: {"inception": file, "clip": folder}, as for `weights.find_weights`. study: the real images and, if
    `has_packages`, the retrieval network; None for CLIP only. Inception compares with a random choice of at most
    `references` real images; their features are cached in the folder `cache`. FileNotFoundError for missing weights.
    """

    def __init__(
        self,
        study: Study | None,
        *,
        weights: Mapping[str, Path],
        has_packages: bool,
        cache: Path,
        references: int = 1000,
        seed: int = 0,
    ) -> None:
        self.weights = {name: find_weights(name, weights) for name in weights}
        self.has_packages, self.cache, self.references, self.seed = has_packages, cache, references, seed
        self._study = study

    @property
    def study(self) -> Study:
        """The study with the real images."""
        assert self._study is not None, "only CLIP works without real images"
        return self._study

    @property
    def facts(self) -> dict[str, Any]:
        """Networks, files and reference images, to repeat the figures."""
        found: dict[str, Any] = {"seed": self.seed}
        for name, weights in self.weights.items():
            found[name] = {"file": weights.path.name, "sha256": weights.sha256}
        if "inception" in self.weights:
            found["inception"] |= {"resize": RESIZES["clean"], "data": self.study.prepared.folder.name}
            found["inception"] |= {"real_pictures": len(self.real), "real_sha256": fingerprint(self.real)}
        if "clip" in self.weights:
            found["clip"] |= {"resize": clip_score.RESIZE, "prefix": clip_score.LANTERN_PREFIX}
        if self.has_packages:
            network, concepts = efficientnet.NAME, len(self.study.gallery.concepts)
            found["retrieval"] = {"network": network, "data": self.study.prepared.folder.name, "concepts": concepts}
        return found

    def estimates(self, pictures: Pictures, prompts: Sequence[str]) -> dict[str, Estimate]:
        """Return the figures of images by axis; for retrieval, prompts are names of concepts."""
        found: dict[str, Estimate] = {}
        if "inception" in self.weights:
            seen = self.see(pictures)
            found["kid"] = kernel_distance(seen, self.real_features, seed=self.seed)
            found["fid"] = frechet_distance(seen, self.real_features, seed=self.seed, draws=0)
        if "clip" in self.weights:
            found["clip"] = mean_estimate(self.clip_scores(pictures, prompts), seed=self.seed)
        if self.has_packages:
            features = self.study.features(pictures)
            if len(pictures) > 1:
                found["kid-efficientnet"] = kernel_distance(features, self.real_looks, seed=self.seed)
            similarity = self.study.gallery.similarity(features)
            labels = torch.tensor([self.study.gallery.label(prompt) for prompt in prompts])
            found["retrieval"] = mean_estimate((ranks(similarity, labels) == 0).double(), seed=self.seed)
            found["likeness"] = mean_estimate(similarity.gather(1, labels[:, None])[:, 0], seed=self.seed)
        return found

    def clip_scores(self, pictures: Pictures, prompts: Sequence[str]) -> Float[Tensor, " n"]:
        """Return 100 x the cosine of each image and its prompt, with the prefix of LANTERN's protocol."""
        ready = torch.stack([self.clip.prepare(one.permute(1, 2, 0).numpy()) for one in pictures])
        seen = torch.cat([self.clip.embed(block) for block in ready.split(PIXEL_BATCH)])
        return clip_score.clip_scores(seen, self.clip.embed_prompts([clip_score.LANTERN_PREFIX + p for p in prompts]))

    @cached_property
    def clip(self) -> clip_score.Clip:
        """The network of CLIP scores."""
        return clip_score.load_clip(self.weights["clip"])

    @cached_property
    def inception(self) -> Inception:
        """The network of KID and FID."""
        return load_inception(self.weights["inception"])

    def see(self, pictures: Pictures) -> Float[Tensor, "n c"]:
        """Return Inception's features of images."""
        return torch.cat([self.inception(block) for block in Study.bar(pictures.split(PIXEL_BATCH), "inception")])

    @cached_property
    def real(self) -> Pictures:
        """The reference images of Inception."""
        study = self.study
        return study.images_of(study.some(study.records("train"), most=self.references))

    @cached_property
    def real_looks(self) -> Float[Tensor, "n c"]:
        """The retrieval network's features of the reference images."""
        return self.study.features(self.real)

    @cached_property
    def real_features(self) -> Float[Tensor, "n c"]:
        """Inception's features of the reference images; cached under a name that depends on images and weights."""
        from safetensors.torch import load_file, save_file

        key = hashlib.sha256(f"{self.weights['inception'].sha256} {fingerprint(self.real)}".encode()).hexdigest()
        path = self.cache / f"real-{key[:16]}.safetensors"
        if not path.is_file():
            with atomic_write(path) as temporary:
                save_file({"features": self.see(self.real).contiguous()}, temporary)
        return load_file(path)["features"]


def fingerprint(pictures: Pictures) -> str:
    """Return the SHA-256 of the bytes of images."""
    return hashlib.sha256(pictures.contiguous().numpy().tobytes()).hexdigest()
