"""The networks of metrics by name. Each is loaded once and shared by all metrics that use it."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lantern.eval.metrics import clip_score, inception
from lantern.eval.metrics.extraction import Judge, Pair
from lantern.eval.metrics.pictures import raw
from lantern.eval.metrics.weights import Found, find_weights


@dataclass(frozen=True)
class Network:
    """A judge made of two functions, which `extraction.Judge` describes."""

    weights: Found
    prepare: Callable[[np.ndarray], Tensor]
    embed: Callable[[Tensor], Tensor]


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
            pooled = self._inception("inception-logits", resize)
            return Network(pooled.weights, pooled.prepare, lambda inputs: pooled.logits(pooled.embed(inputs)))
        found = self.find(name)
        if name == "retrieval":
            from lantern.eval.metrics.efficientnet import EfficientNet

            network = EfficientNet.from_package(found.path.parent).to(self.device)
            return Network(found, raw, lambda inputs: network(inputs.to(self.device)).float().cpu())
        load = clip_score.load_clip if name == "clip" else clip_score.load_preference
        return load(found, device=self.device)

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
