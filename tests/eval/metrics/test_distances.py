import math

import numpy as np
import pytest
import torch

from lantern.eval.intervals import mean_estimate
from lantern.eval.metrics.distances import (
    frechet,
    frechet_distance,
    frechet_gaussian,
    frechet_to,
    inception_score,
    kernel_distance,
    moments_of,
    prdc,
)


def features(count: int, width: int = 8, *, seed: int = 0, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator) + shift


def random_gaussian(width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(width, 2 * width, generator=generator, dtype=torch.float64)
    return torch.randn(width, generator=generator, dtype=torch.float64), root @ root.T / width


def test_frechet_of_a_set_with_itself_is_zero() -> None:
    for count in (10, 300):  # below and above the width
        x = features(count, 64)
        assert abs(frechet_distance(x, x, seed=0, draws=0).value) < 1e-3
        assert abs(frechet(moments_of(x), moments_of(x))) < 1e-3


@pytest.mark.filterwarnings("ignore:The `disp` argument:DeprecationWarning")
def test_frechet_agrees_with_clean_fid() -> None:
    from cleanfid.fid import frechet_distance as theirs

    for width in (4, 32, 96):
        (mean_a, a), (mean_b, b) = random_gaussian(width, 1), random_gaussian(width, 2)
        expected = theirs(mean_a.numpy(), a.numpy(), mean_b.numpy(), b.numpy())
        assert frechet_gaussian((mean_a, a), (mean_b, b)) == pytest.approx(expected, abs=1e-6)


def test_frechet_of_features_agrees_with_torchmetrics() -> None:
    from torchmetrics.image.fid import FrechetInceptionDistance

    class Pixels(torch.nn.Module):
        num_features = 12

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.double().flatten(1) / 16

    generator = torch.Generator().manual_seed(0)
    real, fake = (torch.randint(0, 256, (64, 3, 2, 2), generator=generator, dtype=torch.uint8) for _ in range(2))
    metric = FrechetInceptionDistance(feature=Pixels(), input_img_size=(3, 2, 2)).set_dtype(torch.float64)
    metric.update(real, real=True)
    metric.update(fake, real=False)
    ours = frechet(*(moments_of(Pixels()(one)) for one in (real, fake)))
    assert ours == pytest.approx(float(metric.compute()), abs=1e-4)


def test_frechet_to_a_fixed_gaussian_matches_its_features() -> None:
    x, y = features(200), features(200, seed=1, shift=0.4)
    fixed = frechet_to(x, (y.double().mean(0), y.double().T.cov()), seed=0)
    assert fixed.value == pytest.approx(frechet_distance(x, y, seed=0, draws=0).value, abs=1e-6)
    assert fixed.low is not None and fixed.high is not None
    assert fixed.low < fixed.value < fixed.high


def test_few_and_many_pictures_give_the_same_distance() -> None:
    x, y = features(30, 64), features(40, 64, seed=1, shift=0.3)
    (mean_a, a), (mean_b, b) = ((one.double().mean(0), one.double().T.cov()) for one in (x, y))
    values, vectors = torch.linalg.eigh(a)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    shared = torch.linalg.eigvalsh(root @ b @ root).clamp(min=0).sqrt().sum()
    expected = float((mean_a - mean_b).square().sum() + a.trace() + b.trace() - 2 * shared)
    assert frechet_distance(x, y, seed=0, draws=0).value == pytest.approx(expected, abs=1e-6)
    # torch-fidelity's eigenvalues of a singular product are less exact
    assert frechet_gaussian((mean_a, a), (mean_b, b)) == pytest.approx(expected, rel=1e-7)


def test_frechet_rejects_features_of_two_resizes() -> None:
    a, b = moments_of(features(5)), moments_of(features(5))
    a.made_with, b.made_with = "inception x clean", "inception x legacy"
    with pytest.raises(ValueError, match="expected the same"):
        frechet(a, b)


def test_frechet_interval_contains_the_value_and_shrinks_with_pictures() -> None:
    few, many = (frechet_distance(features(n), features(n, seed=1, shift=0.5), seed=0, draws=50) for n in (30, 1000))
    for found in (few, many):
        assert found.low is not None and found.high is not None
        assert found.low < found.value < found.high
    assert many.high - many.low < few.high - few.low  # type: ignore[operator]


def test_kernel_distance_matches_clean_fid_on_full_sets() -> None:
    from cleanfid.fid import kernel_distance as theirs

    x, y = features(60), features(60, seed=1, shift=0.2)
    expected = theirs(x.double().numpy(), y.double().numpy(), num_subsets=1, max_subset_size=60)
    assert kernel_distance(x, y, seed=0).value == pytest.approx(expected, abs=1e-9)


def test_kernel_distance_by_hand() -> None:
    x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [3.0]])
    # within x: (1*2+1)^3 = 27; within y: 1; between: mean of 1, 64, 1, 343
    assert kernel_distance(x, y, seed=0, draws=0).value == pytest.approx(27 + 1 - 2 * (1 + 64 + 1 + 343) / 4)


def test_kernel_distance_does_not_depend_on_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from lantern.eval.metrics import distances

    x, y = features(50), features(41, seed=1)
    whole = kernel_distance(x, y, seed=3, draws=20)
    monkeypatch.setattr(distances, "BLOCK", 7)
    parts = kernel_distance(x, y, seed=3, draws=20)
    assert parts.value == pytest.approx(whole.value, abs=1e-12)
    assert parts.low == pytest.approx(whole.low, abs=1e-12)


def test_kernel_interval_of_similar_sets_contains_zero() -> None:
    found = kernel_distance(features(200), features(200, seed=1), seed=0)
    assert found.low is not None and found.high is not None
    assert found.low < 0 < found.high


def test_prdc_by_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    from lantern.eval.metrics import distances

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


def test_inception_score_agrees_with_its_formula() -> None:
    logits = features(200, 10)
    distribution = logits.double().softmax(-1).numpy()
    expected = math.exp(np.mean(np.sum(distribution * (np.log(distribution) - np.log(distribution.mean(0))), 1)))
    assert inception_score(logits, seed=0).value == pytest.approx(expected, abs=1e-9)


def test_mean_interval_matches_the_normal_one() -> None:
    values = features(4000, 1)[:, 0]
    found = mean_estimate(values, seed=0)
    assert found.low is not None and found.high is not None
    assert found.high - found.low == pytest.approx(2 * 1.96 / 4000**0.5, rel=0.15)


@pytest.mark.parametrize("count", [0, 1])
def test_too_small_sets_are_rejected(count: int) -> None:
    x, y = features(count), features(5)
    for distance in (frechet_distance, kernel_distance):
        with pytest.raises(ValueError, match="at least 2"):
            distance(x, y, seed=0)
    with pytest.raises(ValueError, match="more than 5"):
        prdc(y, y)


def test_the_interval_of_three_pictures_has_ends() -> None:
    generator = torch.Generator().manual_seed(0)
    found = kernel_distance(torch.randn(3, 8, generator=generator), torch.randn(3, 8, generator=generator), seed=0)
    assert found.low is not None and found.high is not None and found.low < found.value < found.high


def test_no_draws_give_no_interval() -> None:
    assert mean_estimate(features(5, 1)[:, 0], seed=0, draws=0).low is None
