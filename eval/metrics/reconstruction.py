"""Quality of reconstructions: PSNR in dB, LPIPS (arXiv:1801.03924) by AlexNet, and codebook use.

The heads of LPIPS come with torchmetrics; the network below them is torchvision's AlexNet of ImageNet.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from lantern.core.config import one_line
from lantern.eval.metrics.extraction import Pair
from lantern.eval.metrics.inception import read_tensors
from lantern.eval.metrics.weights import Found
from lantern.models.llamagen.vqvae import VQVAE, to_uint8

if TYPE_CHECKING:
    from lantern.models.transformers.components import Pixels

PIXEL_BATCH = 8  # pictures at a time; larger batches are slower on a CPU because of memory traffic


@dataclass(frozen=True)
class CodebookUse:
    """Share of the codebook that occurs, and perplexity of the code frequencies."""

    used: float
    perplexity: float


def mean_squared_error(a: UInt8[Tensor, "b 3 h w"], b: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, " b"]:
    """Return the mean squared difference of bytes of each pair."""
    return (a.double() - b.double()).square().flatten(1).mean(1)


def psnr(a: UInt8[Tensor, "b 3 h w"], b: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, " b"]:
    """Return the peak signal-to-noise ratio of each pair in dB, 10 log10(255^2 / MSE); infinite for equal images."""
    return 10 * torch.log10(255.0**2 / mean_squared_error(a, b))


def codebook_use(codes: Int[Tensor, "n codes"], size: int) -> CodebookUse:
    """Return the use of a codebook of `size` codes."""
    counts = torch.bincount(codes.flatten().long(), minlength=size).double()
    entropy = torch.special.entr(counts / counts.sum()).sum()
    return CodebookUse(used=float((counts > 0).double().mean()), perplexity=float(entropy.exp()))


@torch.inference_mode()
def decode(vq: "VQVAE | Pixels", codes: Int[Tensor, "n codes"]) -> UInt8[Tensor, "n 3 h w"]:
    """Decode codes to images, on the CPU."""
    device = vq.codebook.device
    parts = [to_uint8(vq.decode(part.to(device))).permute(0, 3, 1, 2).cpu() for part in codes.split(PIXEL_BATCH)]
    return torch.cat(parts)


def load_lpips(found: Found, *, device: torch.device | str = "cpu") -> Pair:
    """Return the LPIPS of pairs of images by torchvision's AlexNet in a file, with the heads of torchmetrics.

    ValueError for weights of another network.
    """
    from torchmetrics.functional.image.lpips import _LPIPS

    state = read_tensors(found.path)
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
