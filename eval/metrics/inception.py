"""The network of FID: TensorFlow's Inception of December 2015, with its 2048 pooled features.

Two files of it are supported: a TorchScript file without logits (of NVIDIA's metrics, used by clean-fid) and a file of
tensors with logits (of pytorch-fid and torch-fidelity). The resize to 299 x 299 differs between metrics and changes
FID.
"""

import io
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from lantern.core.config import one_line
from lantern.core.io import read_pickled
from lantern.eval.metrics.pictures import raw
from lantern.eval.metrics.weights import Found

SIDE = 299
LOGITS_FILE = "pt_inception-2015-12-05-6726825d.pth"


@dataclass(frozen=True)
class Inception:
    """Maps images to pooled features, or to their logits if `gives_logits`, after the resize named `resize`.

    network: maps (b 3 299 299), as (bytes - 128) / 128, to 2048 features. head: to 1008 logits without bias, or None.
    """

    network: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor] | None
    resize: str
    weights: Found
    device: torch.device
    gives_logits: bool = False

    def prepare(self, pixels: np.ndarray) -> Float[Tensor, "3 299 299"]:
        """Return an image (uint8, h w 3) at the network's size, values 0 to 255."""
        if self.resize == "clean":
            from cleanfid.resize import build_resizer

            return torch.from_numpy(np.ascontiguousarray(build_resizer("clean")(pixels).transpose(2, 0, 1)))
        from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x

        wide = raw(pixels)[None].float()
        return interpolate_bilinear_2d_like_tensorflow1x(wide, (SIDE, SIDE), align_corners=False)[0]

    @torch.inference_mode()
    def embed(self, inputs: Float[Tensor, "b 3 299 299"]) -> Float[Tensor, "b c"]:
        """Return features or logits of prepared images, on the CPU; ValueError for a file without logits."""
        features = self.network((inputs.to(self.device) - 128) / 128).flatten(1)
        if not self.gives_logits:
            return features.float().cpu()
        if self.head is None:
            why = f"{self.weights.path} has no logits, which the Inception score needs"
            raise ValueError(f"{why}: give {LOGITS_FILE} with --weights inception-logits=PATH")
        return self.head(features).float().cpu()


def load_inception(found: Found, *, resize: str = "clean", device: torch.device | str = "cpu") -> Inception:
    """Load the network from a file; ValueError for a file of another kind."""
    network, head = (_from_script if _is_script(found.path) else _from_tensors)(found.path, torch.device(device))
    return Inception(network, head, resize, found, torch.device(device))


def _is_script(path: Path) -> bool:
    """Return whether a file is a TorchScript archive, which contains code."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any("/code/" in name for name in archive.namelist())


def _from_script(path: Path, device: torch.device) -> tuple[Callable[[Tensor], Tensor], None]:
    with warnings.catch_warnings():
        # Deprecated (FutureWarning since torch 2.14), but the released network is a TorchScript file
        warnings.filterwarnings("ignore", r".*torch\.jit")
        try:
            script = torch.jit.load(path, map_location=device).eval()
        except RuntimeError as error:
            raise ValueError(f"{path} is not a TorchScript network: {one_line(error)}") from error
    # NVIDIA's file resizes its input unless its layers are called
    return (script.layers if hasattr(script, "layers") else script), None


def _from_tensors(path: Path, device: torch.device) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    # it unpickles its file without checks, so it gets a file of tensors that were read with weights_only
    file = io.BytesIO()
    torch.save(read_tensors(path), file)
    file.seek(0)
    try:
        network = FeatureExtractorInceptionV3("inception", ["2048"], feature_extractor_weights_path=file)
    except RuntimeError as error:
        raise ValueError(f"{path} holds a network other than Inception: {one_line(error)[:200]}") from error
    # its own forward pass resizes first
    *layers, head = network.eval().to(device).children()
    head.register_parameter("bias", None)  # as in ADM's and torch-fidelity's Inception score
    return nn.Sequential(*layers), head


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .pth file; ValueError for a file with anything else."""
    state = read_pickled(path)
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} is not a file of named tensors")
    return state
