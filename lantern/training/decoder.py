"""Training of a tokenizer's decoder alone, under fixed codes: the pictures of a trained target get better.

Half the time it reads the codes as the encoder gives them, half the time with bare ground under one code, as a target
that was trained on settled ground gives them.
"""

from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.io import load_module
from lantern.models.llamagen.vqvae import to_pixels
from lantern.training.data import Prepared
from lantern.training.features import cached, encode_pictures, fingerprint
from lantern.training.ground import settle_ground
from lantern.training.loop import step_seed, with_overrides
from lantern.training.loop import train as run_loop
from lantern.training.tokenizer import TokenizerConfig, TokenizerTask

__all__ = ["DecoderTask", "TokenizerConfig", "train"]


class DecoderTask(TokenizerTask):
    """The tokenizer's task with encoder and codebook frozen."""

    def __init__(self, config: TokenizerConfig, pictures: Prepared, packages: Path, vq: Path, cache: Path) -> None:
        super().__init__(config, pictures, packages)
        load_module(self.vq, vq)
        for module in (self.vq.encoder, self.vq.quant_conv):
            module.requires_grad_(False)
        seen = fingerprint([vq / "model.safetensors", pictures.folder / "pictures.tar"])
        raw = cached(cache / f"codes-{seen}.safetensors", lambda: {"codes": encode_pictures(self.vq, pictures)})[
            "codes"
        ]
        self._codes = torch.stack([raw, settle_ground(raw, self._images, config.model.downsample)])

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        """Pictures and their codes."""
        config = self.config
        generator = torch.Generator().manual_seed(step_seed(config.loop.seed, step, rank))
        draw = torch.rand(config.batch, 3, generator=generator)
        chosen = torch.where(
            draw[:, 0] < config.composites,
            self._others[(draw[:, 1] * len(self._others)).long()],
            self._plain[(draw[:, 1] * len(self._plain)).long()],
        )
        codes = self._codes[(draw[:, 2] < 0.5).long(), chosen].long()
        return to_pixels(self._images[chosen]).to(device), codes.to(device)

    def forward(self, pixels: Float[Tensor, "b 3 h w"], codes: Int[Tensor, "b n"]) -> dict[str, Tensor]:
        """Likeness of the decoded codes to the pictures."""
        return self.likeness(self.vq.decode(codes), pixels)

    def after_step(self, step: int) -> None:
        """Nothing: the codebook stays."""


def train(
    config: TokenizerConfig,
    *,
    out: Path,
    data: Path,
    packages: Path,
    vq: Path,
    steps: int | None = None,
    decay: int | None = None,
) -> None:
    """Trains the decoder of the tokenizer in `vq` and writes `out/vqvae`; resumes what `out` holds."""
    config = with_overrides(config, loop=with_overrides(config.loop, steps=steps, decay=decay))
    out.mkdir(parents=True, exist_ok=True)
    run_loop(DecoderTask(config, Prepared.open(data), packages, vq, out), config.loop, out=out)
