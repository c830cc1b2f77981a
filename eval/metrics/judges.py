"""The networks of metrics by name. Each is loaded once and shared by all metrics that use it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from lantern.eval.metrics import clip_score, inception
from lantern.eval.metrics.extraction import Judge, Pair
from lantern.eval.metrics.pictures import raw
from lantern.eval.metrics.weights import Found, find_weights


@dataclass(frozen=True)
class Logits:
    """Inception with its logits as features."""

    network: inception.Inception

    @property
    def weights(self) -> Found:
        """The file with the logits."""
        return self.network.weights

    def prepare(self, pixels: np.ndarray) -> Float[Tensor, "3 299 299"]:
        """Return an image as network input."""
        return self.network.prepare(pixels)

    def embed(self, inputs: Float[Tensor, "b 3 299 299"]) -> Float[Tensor, "b 1008"]:
        """Return logits."""
        return self.network.logits(self.network.embed(inputs))


@dataclass(frozen=True)
class Recogniser:
    """The network of retrieval."""

    network: nn.Module
    weights: Found
    device: torch.device

    def prepare(self, pixels: np.ndarray) -> UInt8[Tensor, "3 h w"]:
        """Return an image as a tensor, unchanged."""
        return raw(pixels)

    @torch.inference_mode()
    def embed(self, inputs: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, "b 1280"]:
        """Return unit features."""
        return self.network(inputs.to(self.device)).float().cpu()


@dataclass
class Judges:
    """Loads networks by name. weights: files given by the user. cache: folder of the others."""

    weights: Mapping[str, Path]
    cache: Path | None
    device: torch.device
    _inceptions: dict[str, inception.Inception] = field(default_factory=dict)

    def load(self, name: str) -> Judge:
        """Return a network; FileNotFoundError for missing weights."""
        kind, _, resize = name.partition(":")
        if kind == "inception":
            has_other = "inception" not in self.weights and "inception-logits" in self.weights
            return self._inception("inception-logits" if has_other else "inception", resize)
        if kind == "logits":
            return Logits(self._inception("inception-logits", resize))
        found = self.find(name)
        if name == "retrieval":
            from lantern.eval.metrics.efficientnet import EfficientNet

            return Recogniser(EfficientNet.from_package(found.path.parent).to(self.device), found, self.device)
        if name == "clip":
            return clip_score.load_clip(found, device=self.device)
        from lantern.eval.metrics.clip_score import load_preference

        return load_preference(found, device=self.device)

    def pair(self, name: str) -> tuple[Pair, Found | None]:
        """Return a measure of pairs and its weights."""
        from lantern.eval.metrics.reconstruction import load_lpips, psnr

        if name == "psnr":
            return psnr, None
        found = self.find(name)
        return load_lpips(found, device=self.device), found

    def find(self, name: str) -> Found:
        """Return the location of weights."""
        return find_weights(name, self.weights, cache=self.cache)

    def _inception(self, name: str, resize: str) -> inception.Inception:
        if name not in self._inceptions:
            self._inceptions[name] = inception.load_inception(self.find(name), resize=resize, device=self.device)
        return dataclasses.replace(self._inceptions[name], resize=resize)
