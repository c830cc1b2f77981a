"""Distances between sets of features by torch-fidelity's functions of features, and their intervals.

Ours are the distances of fewer images than features and of unequal sets, density and coverage, and every interval.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.eval.intervals import DRAWS, Estimate, ends, mean_estimate, share_estimate
from lantern.eval.metrics.moments import BLOCK, Gaussian, Moments

Features = Float[Tensor, "n c"] | Gaussian
Resamples = tuple[Float[Tensor, "n c"], Float[Tensor, "n d"]]  # features, and how often each resample has each
MOST_KERNEL = 10_000  # largest set of the kernel distance; of larger ones a random part is used
SPLIT = 5000  # most images of a split of the Inception score, as ADM's evaluator has it


def frechet(a: Gaussian, b: Gaussian) -> float:
    """Return torch-fidelity's Frechet distance of Gaussians (arXiv:1706.08500); ValueError for different lengths."""
    from torch_fidelity.metric_fid import KEY_METRIC_FID, fid_statistics_to_metric

    if len(a[0]) != len(b[0]):
        raise ValueError(f"features of {len(a[0])} and of {len(b[0])} values, wanted features of one network")
    known = [{"mu": mean.double().numpy(), "sigma": covariance.double().numpy()} for mean, covariance in (a, b)]
    return max(fid_statistics_to_metric(*known, verbose=False)[KEY_METRIC_FID], 0.0)  # that of equal sets rounds below


def frechet_distance(x: Float[Tensor, "n c"], y: Features, *, seed: int, draws: int = 100) -> Estimate:
    """Return the Frechet distance of features to others or to a Gaussian, with an interval by half-samples (`_halved`).

    The interval describes the variation over images at these numbers of images, not the distance at larger numbers. A
    Gaussian is fixed.
    """
    sets = [one for one in (x, y) if isinstance(one, Tensor)]
    held = "" if isinstance(y, Tensor) else "reference fixed, "
    return _halved(lambda one, other=y: _frechet_of(one, other), sets, seed=seed, draws=draws, held=held)


def _frechet_of(x: Float[Tensor, "n c"], y: Features) -> float:
    if not isinstance(y, Tensor) or max(len(x), len(y)) >= x.shape[1]:
        return frechet(Moments.of(x).gaussian, Moments.of(y).gaussian if isinstance(y, Tensor) else y)
    # Fewer images than values: tr (A B)^(1/2) is the sum of singular values of the centred Xc Yc^T
    a, b = x.double(), y.double()
    apart = (a.mean(0) - b.mean(0)).square().sum()
    a, b = ((one - one.mean(0)) / (len(one) - 1) ** 0.5 for one in (a, b))
    shared = torch.linalg.svdvals(a @ b.T).sum()
    return max(float(apart + a.square().sum() + b.square().sum() - 2 * shared), 0.0)


def kernel_distance(x: Float[Tensor, "n c"], y: Float[Tensor, "m c"], *, seed: int, draws: int = DRAWS) -> Estimate:
    """Return KID (Binkowski 2018, arXiv:1801.01401), x 1: torch-fidelity's unbiased MMD^2, kernel (x.y / c + 1)^3.

    All pairs count, of MOST_KERNEL random images of larger sets; those of unequal sets, which the package lacks, are
    summed here. The interval is a bootstrap over images, without pairs of an image with itself. Sets have 2 or more.
    """
    from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, kid_features_to_metric

    generator, sets = torch.Generator().manual_seed(seed), [x, y]
    for i, one in enumerate(sets):
        if len(one) > MOST_KERNEL:
            sets[i] = one[torch.randperm(len(one), generator=generator)[:MOST_KERNEL].sort().values]
    ours, theirs = ((one, _weights(len(one), draws, generator)) for one in sets)
    within = _kernel_mean(ours, ours, is_same=True) + _kernel_mean(theirs, theirs, is_same=True)
    found = within - 2 * _kernel_mean(ours, theirs, is_same=False)
    # a resample of one repeated image has no pairs
    has_pairs = torch.stack([w.sum(0).square() > w.square().sum(0) for _, w in (ours, theirs)]).all(0)
    value = float(found[0])
    if (size := len(sets[0])) == len(sets[1]):
        how = {"kid_subsets": 1, "kid_subset_size": size, "rng_seed": 0, "verbose": False}
        value = kid_features_to_metric(*(one.double() for one in sets), **how)[KEY_METRIC_KID_MEAN]
    if not draws or min(len(x), len(y)) < 3:  # all resamples of two images that have pairs are alike
        return Estimate(value)
    return Estimate(value, *ends(found[1:][has_pairs[1:]]), f"95 % bootstrap, {draws} draws")


def _kernel_mean(one: Resamples, other: Resamples, *, is_same: bool) -> Float[Tensor, " d"]:
    """Return the mean of the kernel over pairs, weighted by how often a resample has each image."""
    (x, left), (y, right) = one, other
    total = torch.zeros(left.shape[1], dtype=torch.float64)
    for i in range(0, len(x), BLOCK):
        a = x[i : i + BLOCK].double()
        for j in range(0, len(y), BLOCK):
            kernel = (a @ y[j : j + BLOCK].double().T / x.shape[1] + 1) ** 3
            if is_same and i == j:
                kernel.fill_diagonal_(0)
            total += (left[i : i + BLOCK] * (kernel @ right[j : j + BLOCK])).sum(0)
    pairs = left.sum(0) * right.sum(0)
    return total / (pairs - left.square().sum(0) if is_same else pairs)


def prdc(
    real: Float[Tensor, "n c"], fake: Float[Tensor, "m c"], *, nearest: int = 5, seed: int = 0, draws: int = DRAWS
) -> dict[str, Estimate]:
    """Return precision and recall (arXiv:1904.06991) by torch-fidelity, density and coverage (arXiv:2002.09797).

    All use k nearest neighbours. The intervals are over images with fixed neighbourhoods: of density by a bootstrap, of
    the others, which are shares, Wilson's. Sets have more than k images.
    """
    from torch_fidelity.metric_prc import calc_cdist_part, prc_features_to_metric

    real, fake = real.double(), fake.double()
    radii = []  # of each feature to its k-th nearest other one; the nearest one is the feature itself
    for one in (real, fake):
        ranked = [calc_cdist_part(part, one, BLOCK).kthvalue(nearest + 1).values for part in one.split(BLOCK)]
        radii.append(torch.cat(ranked))
    inside, is_recalled, is_covered = torch.zeros(len(fake), dtype=torch.float64), list[Tensor](), list[Tensor]()
    for part, radius in zip(real.split(BLOCK), radii[0].split(BLOCK), strict=True):
        apart = calc_cdist_part(part, fake, BLOCK)
        is_near = apart <= radius[:, None]
        inside += is_near.sum(0)
        is_recalled.append((apart <= radii[1]).any(1))
        is_covered.append(is_near.any(1))
    shares = {"precision": inside > 0, "recall": torch.cat(is_recalled), "coverage": torch.cat(is_covered)}
    found = {name: share_estimate(values, draws=draws) for name, values in shares.items()}
    found["density"] = mean_estimate(inside / nearest, seed=seed, draws=draws)
    how = {"prc_neighborhood": nearest, "prc_batch_size": BLOCK, "save_cpu_ram": True, "verbose": False}
    package = prc_features_to_metric(fake, real, **how)
    return {name: dataclasses.replace(one, value=package.get(name, one.value)) for name, one in found.items()}


def inception_score(logits: Float[Tensor, "n k"], *, seed: int, draws: int = 100) -> Estimate:
    """Return torch-fidelity's Inception score (arXiv:1606.03498), the mean of random splits of at most SPLIT images."""
    from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, isc_features_to_metric

    def score(part: Float[Tensor, "n k"]) -> float:
        return isc_features_to_metric(part, splits=-(-len(part) // SPLIT))[KEY_METRIC_ISC_MEAN]

    return _halved(score, [logits], seed=seed, draws=draws)


def _weights(count: int, draws: int, generator: torch.Generator) -> Float[Tensor, "n d"]:
    """Return how often each resample has each image; the first column is the set itself."""
    picks = [torch.arange(count), *torch.randint(0, count, (draws, count), generator=generator)]
    return torch.stack([some.bincount(minlength=count) for some in picks]).double().T


def _halved(
    statistic: Callable[..., float], sets: Sequence[Tensor], *, seed: int, draws: int, held: str = ""
) -> Estimate:
    """Return a statistic that is not negative, with its interval from random halves of each set; `held` is fixed.

    Halves, drawn without replacement, vary about their mean as whole sets do (a delete-half jackknife). They raise the
    statistic itself, so they are shifted to its value. A bootstrap, which repeats images, varies more where images are
    few against features.
    """
    value, sampled, generator = statistic(*sets), list[float](), torch.Generator().manual_seed(seed)
    if not draws or min(map(len, sets)) < 4:  # a half has at least two
        return Estimate(value)
    for _ in range(draws):
        picks = [torch.randperm(len(one), generator=generator)[: len(one) // 2].sort().values for one in sets]
        sampled.append(statistic(*(one[pick] for one, pick in zip(sets, picks, strict=True))))
    found = torch.tensor(sampled, dtype=torch.float64)
    low, high = ends(found - found.mean() + value)
    return Estimate(value, max(low, 0.0), high, f"95 % of half-samples, {draws} draws, {held}centred on the value")
