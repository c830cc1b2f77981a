"""The networks of metrics by name. Each is loaded once and shared by all metrics that use it."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from lantern.core.config import one_line
from lantern.eval.metrics import clip_score, inception
from lantern.eval.metrics.weights import Found, find_weights

# both have `prepare`, from an image (uint8, h w 3) to input, in reader threads, and `embed`, to features on the CPU
Judge = clip_score.Clip | inception.Inception
Pair = Callable[[UInt8[Tensor, "b 3 h w"], UInt8[Tensor, "b 3 h w"]], Float[Tensor, " b"]]


def weights_of(judge: str, given: Mapping[str, Path]) -> str:
    """Return the name of the weights of a network, "" for a measure without weights; `given` are the user's files."""
    kind = judge.partition(":")[0]
    if kind == "logits" or (kind == "inception" and "inception" not in given and "inception-logits" in given):
        return "inception-logits"
    return "" if kind == "psnr" else kind


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
        if kind not in ("inception", "logits"):
            load = clip_score.load_clip if name == "clip" else clip_score.load_preference
            return load(find_weights(name, self.weights, cache=self.cache), device=self.device)
        stored = weights_of(name, self.weights)
        if stored not in self._inceptions:
            found = find_weights(stored, self.weights, cache=self.cache)
            self._inceptions[stored] = inception.load_inception(found, resize=resize, device=self.device)
        return dataclasses.replace(self._inceptions[stored], resize=resize, gives_logits=kind == "logits")

    def pair(self, name: str) -> tuple[Pair, Found | None]:
        """Return a measure of pairs and its weights."""
        if name == "psnr":
            return psnr, None
        found = find_weights(name, self.weights, cache=self.cache)
        return load_lpips(found, device=self.device), found


def psnr(a: UInt8[Tensor, "b 3 h w"], b: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, " b"]:
    """Return torchmetrics' peak signal-to-noise ratio of each pair in dB; infinite for equal images."""
    from torchmetrics.functional.image import peak_signal_noise_ratio

    pairs = zip(a.double(), b.double(), strict=True)
    return torch.stack([peak_signal_noise_ratio(one, other, data_range=255.0) for one, other in pairs])


def load_lpips(found: Found, *, device: torch.device | str = "cpu") -> Pair:
    """Return the LPIPS (arXiv:1801.03924) of pairs of images by torchvision's AlexNet in a file.

    The heads come with torchmetrics, whose class downloads AlexNet. ValueError for weights of another network.
    """
    from torchmetrics.functional.image.lpips import _LPIPS

    state = inception.read_tensors(found.path)
    network = _LPIPS(pretrained=True, net="alex", pnet_rand=True)
    try:
        # torchmetrics splits the layers into slices that keep torchvision's numbers
        for name, tensor in network.net.state_dict().items():
            tensor.copy_(state[f"features.{name.partition('.')[2]}"])
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"{found.path} is not torchvision's AlexNet: {one_line(error)}") from error
    network.eval().to(device)

    @torch.inference_mode()
    def lpips(a: UInt8[Tensor, "b 3 h w"], b: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, " b"]:
        if a.shape != b.shape:
            raise ValueError(f"pictures of {list(a.shape)} and {list(b.shape)}, expected pairs of one size")
        return network(*(one.to(device).float() / 127.5 - 1 for one in (a, b))).flatten().cpu()

    return lpips
