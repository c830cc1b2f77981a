"""How much of a picture survives the tokenizer: PSNR of reconstructions, and use of the codebook."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from lantern.models.llamagen.vqvae import VQVAE, to_uint8

LEAST_ERROR = 1e-3
PIXEL_BATCH = 8  # more pictures at a time cost a CPU more in memory traffic than they save


@dataclass(frozen=True)
class CodebookUse:
    """Share of the codes that occur at all, and how many equally frequent codes would be as hard to guess."""

    used: float
    perplexity: float


def mean_squared_error(made: UInt8[Tensor, "b 3 h w"], wanted: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, " b"]:
    """Per picture, of bytes."""
    return (made.float() - wanted.float()).square().mean((1, 2, 3))


def psnr(made: UInt8[Tensor, "b 3 h w"], wanted: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, " b"]:
    """Peak signal to noise in dB of each picture, of bytes; an error below LEAST_ERROR counts as that."""
    return 10 * torch.log10(255.0**2 / mean_squared_error(made, wanted).clamp(min=LEAST_ERROR))


def codebook_use(codes: Int[Tensor, "n codes"], size: int) -> CodebookUse:
    """Use of a codebook of `size` codes by some pictures."""
    counts = torch.bincount(codes.flatten().long(), minlength=size).double()
    law = counts / counts.sum()
    entropy = -torch.xlogy(law, law).sum()
    return CodebookUse(used=float((counts > 0).double().mean()), perplexity=float(entropy.exp()))


@torch.inference_mode()
def decode(vq: VQVAE, codes: Int[Tensor, "n codes"]) -> UInt8[Tensor, "n 3 h w"]:
    """The pictures that codes stand for, on the CPU."""
    device = vq.quantize.embedding.weight.device
    parts = [to_uint8(vq.decode(part.to(device))).permute(0, 3, 1, 2).cpu() for part in codes.split(PIXEL_BATCH)]
    return torch.cat(parts)
