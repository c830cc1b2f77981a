from pathlib import Path

import pytest
import torch

from lantern.eval.metrics.distances import moments_of
from lantern.eval.metrics.moments import Moments


def features(count: int, width: int = 12, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator) * 3


@pytest.mark.parametrize("cuts", [[100], [1, 99], [33, 33, 34], [7] * 14 + [2], [1] * 100])
def test_any_split_and_order_give_the_same_bits(cuts: list[int]) -> None:
    x = features(100)
    whole, merged, shuffled = moments_of(x), Moments(12), Moments(12)
    for part in x.split(cuts):
        merged.merge(moments_of(part))
    for part in x[torch.randperm(100, generator=torch.Generator().manual_seed(5))].split(cuts):
        shuffled.add(part)
    assert merged.count == shuffled.count == 100
    for one in (merged, shuffled):
        assert all(map(torch.equal, one.gaussian, whole.gaussian))


def test_mean_and_covariance_match_the_features() -> None:
    x = features(200)
    mean, covariance = moments_of(x).gaussian
    # the grid of 2**-28 is the only rounding
    assert torch.allclose(mean, x.double().mean(0), rtol=0, atol=2**-28)
    assert torch.allclose(covariance, x.double().T.cov(), rtol=0, atol=1e-6)


def test_saved_moments_are_loaded_to_the_bit(tmp_path: Path) -> None:
    moments = moments_of(features(50))
    moments.made_with, moments.sets = "a network", ("abc",)
    moments.save(tmp_path / "m.safetensors")
    loaded = Moments.load(tmp_path / "m.safetensors")
    assert (loaded.count, loaded.made_with, loaded.sets) == (50, "a network", ("abc",))
    assert all(map(torch.equal, loaded.gaussian, moments.gaussian))


def test_moments_of_two_networks_are_not_merged() -> None:
    with pytest.raises(ValueError, match="made with 'b', expected 3 made with 'a'"):
        Moments(3, made_with="a").merge(Moments(3, made_with="b"))
    with pytest.raises(ValueError, match="of 4 values made with"):
        Moments(3).merge(Moments(4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 32.0, -40.0])
def test_values_beyond_the_limit_are_rejected(bad: float) -> None:
    x = features(3)
    x[1, 2] = bad
    with pytest.raises(ValueError, match="expected below 32"):
        Moments(12).add(x)


def test_too_few_features_have_no_covariance() -> None:
    for few in (Moments(3), moments_of(features(1))):
        with pytest.raises(ValueError, match="at least 2"):
            _ = few.gaussian


def test_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "torn.safetensors"
    moments_of(features(5)).save(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"torn.safetensors is not a file of moments"):
        Moments.load(path)
