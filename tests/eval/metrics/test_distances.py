import math
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch

from lantern.eval.intervals import mean_estimate, share_estimate
from lantern.eval.metrics import distances
from lantern.eval.metrics.distances import frechet, frechet_distance, inception_score, kernel_distance, prdc
from lantern.eval.metrics.moments import Moments
from tests.refusals import refused


def features(count: int, width: int = 8, *, seed: int = 0, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator) + shift


@pytest.mark.parametrize(("counts", "width"), [((30, 40), 64), ((200, 150), 8)])  # fewer and more than values
def test_the_frechet_distance_is_its_formula_also_to_a_fixed_gaussian(counts: tuple[int, int], width: int) -> None:
    x, y = features(counts[0], width), features(counts[1], width, seed=1, shift=0.3)
    (mean_a, a), (mean_b, b) = ((one.double().mean(0), one.double().T.cov()) for one in (x, y))
    values, vectors = torch.linalg.eigh(a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    shared = torch.linalg.eigvalsh(root @ b @ root).clamp(min=0).sqrt().sum()
    expected = float((mean_a - mean_b).square().sum() + a.trace() + b.trace() - 2 * shared)
    assert frechet_distance(x, y, seed=0, draws=0).value == pytest.approx(expected, abs=1e-6)
    # torch-fidelity's eigenvalues of a singular product are less exact
    assert frechet((mean_a, a), (mean_b, b)) == pytest.approx(expected, rel=1e-7)
    fixed = frechet_distance(x, (mean_b, b), seed=0)
    assert fixed.value == pytest.approx(expected, rel=1e-5) and fixed.low < fixed.value < fixed.high


@pytest.mark.parametrize("counts", [(60, 60), (40, 60)])
def test_the_kernel_distance_is_that_of_all_pairs_in_blocks_of_any_size(
    counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = features(counts[0]), features(counts[1], seed=1, shift=0.3)
    a, b = x.double(), y.double()
    within = [((one @ one.T / 8 + 1) ** 3).fill_diagonal_(0).sum() / (len(one) * (len(one) - 1)) for one in (a, b)]
    whole = kernel_distance(x, y, seed=0, draws=20)
    assert whole.value == pytest.approx(float(sum(within) - 2 * ((a @ b.T / 8 + 1) ** 3).mean()), rel=1e-9)
    monkeypatch.setattr(distances, "BLOCK", 7)
    parts = kernel_distance(x, y, seed=0, draws=20)
    assert (parts.value, parts.low) == pytest.approx((whole.value, whole.low), abs=1e-12)
    assert math.isnan(kernel_distance(x, y, seed=0, draws=0).low)


@pytest.mark.parametrize("count", [3, 200])  # three are often resampled to one repeated picture
def test_kernel_interval_of_similar_sets_contains_zero(count: int) -> None:
    found = kernel_distance(features(count), features(count, seed=1), seed=0)
    assert found.low < 0 < found.high and found.low < found.value < found.high


def test_prdc_by_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distances, "BLOCK", 13)
    real, fake = features(40).double(), features(30, seed=1, shift=0.7).double()
    k = 3
    real_radius, fake_radius = (torch.cdist(s, s).sort(1).values[:, k] for s in (real, fake))
    apart = torch.cdist(real, fake)
    expected = {
        "precision": (apart < real_radius[:, None]).any(0).double().mean(),
        "recall": (apart < fake_radius).any(1).double().mean(),
        "density": (apart < real_radius[:, None]).sum(0).double().mean() / k,
        "coverage": (apart.min(1).values < real_radius).double().mean(),
    }
    found = prdc(real, fake, nearest=k)
    assert {name: one.value for name, one in found.items()} == pytest.approx({n: float(w) for n, w in expected.items()})
    assert all(math.isnan(one.low) for one in prdc(real, fake, nearest=k, draws=0).values())


def test_inception_score_is_its_formula_and_an_interval_the_normal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = features(200, 10)
    distribution = logits.double().softmax(-1).numpy()
    expected = math.exp(np.mean(np.sum(distribution * (np.log(distribution) - np.log(distribution.mean(0))), 1)))
    assert inception_score(logits, seed=0).value == pytest.approx(expected, abs=1e-9)
    monkeypatch.setattr(distances, "SPLIT", 100)  # of the images, shuffled as torch-fidelity does
    halves = logits[np.random.RandomState(2020).permutation(200)].split(100)
    expected = np.mean([inception_score(half, seed=0, draws=0).value for half in halves])
    assert inception_score(logits, seed=0, draws=0).value == pytest.approx(expected, abs=1e-9)
    values = features(4000, 1)[:, 0]
    found = mean_estimate(values, seed=0)
    assert found.high - found.low == pytest.approx(2 * 1.96 / 4000**0.5, rel=0.15)
    assert math.isnan(mean_estimate(values, seed=0, draws=0).low)
    share = share_estimate(torch.ones(10, dtype=torch.bool))  # of all images is not certain
    assert (
        share.value == 1 and share.low == pytest.approx(1 / (1 + 1.959964**2 / 10)) and share.high == pytest.approx(1)
    )


@pytest.mark.parametrize("cuts", [[1, 99], [33, 33, 34], [1] * 100])
def test_any_split_and_order_give_the_same_bits(cuts: list[int]) -> None:
    x = features(100)
    for order in (torch.arange(100), torch.randperm(100, generator=torch.Generator().manual_seed(5))):
        merged = reduce(Moments.merged, map(Moments.of, x[order].split(cuts)))
        assert merged.count == 100 and all(map(torch.equal, merged.gaussian, Moments.of(x).gaussian))


def test_moments_are_those_of_the_features_and_saved_to_the_bit(tmp_path: Path) -> None:
    x = features(200)
    mean, covariance = Moments.of(x).gaussian
    # the grid of 2**-28 is the only rounding
    assert torch.allclose(mean, x.double().mean(0), rtol=0, atol=2**-28)
    assert torch.allclose(covariance, x.double().T.cov(), rtol=0, atol=1e-6)
    moments = Moments.of(features(50), made_with="a network", sets=("abc",))
    moments.save(tmp_path / "m.safetensors")
    loaded = Moments.load(tmp_path / "m.safetensors")
    assert (loaded.count, loaded.made_with, loaded.sets) == (50, "a network", ("abc",))
    assert all(map(torch.equal, loaded.gaussian, moments.gaussian))


def test_moments_of_other_networks_or_too_few_or_damaged_are_refused(tmp_path: Path) -> None:
    one, other = (Moments.of(features(1), made_with=name) for name in "ab")
    refused(one.merged, other, match="of 8 values made with 'b', wanted 8 values made with 'a'")
    assert "moments of 1 values" in refused(one.merged, Moments.of(features(1, 1), made_with="a"))
    refused(lambda: one.gaussian, match="at least 2")
    path = tmp_path / "torn.safetensors"
    Moments.of(features(5)).save(path)
    path.write_bytes(path.read_bytes()[:100])
    assert "torn.safetensors is not a file of moments" in refused(Moments.load, path)
    replace(Moments.of(features(5)), sum=torch.zeros(2)).save(path)
    assert "torn.safetensors is not a file of moments: its products" in refused(Moments.load, path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 32.0, -40.0])
def test_values_beyond_the_limit_are_rejected(bad: float) -> None:
    x = features(3)
    x[1, 2] = bad
    assert "wanted below 32" in refused(Moments.of, x)


def test_intervals_of_the_frechet_distance_are_as_wide_as_it_varies() -> None:
    """A bootstrap's are wider where images are few against features."""
    found = [
        frechet_distance(features(100, 64, seed=2 * i), features(100, 64, seed=2 * i + 1, shift=0.3), seed=i, draws=30)
        for i in range(30)
    ]
    values = torch.tensor([one.value for one in found])
    width = sum(one.high - one.low for one in found) / len(found)
    assert 0.7 < width / (2 * 1.96 * float(values.std())) < 1.45
    assert sum(one.low <= float(values.mean()) <= one.high for one in found) >= 25
