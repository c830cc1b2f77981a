"""Layers of arbitrary numbers, as the dynamic drafter passes them to policies."""

import torch

from lantern.drafters.policies.policy import Layer, Limits, Pool

IMAGES, NODES, WIDTH = 2, 3, 4


def layer(depth: int = 1, seed: int = 0, **changes: object) -> Layer:
    """A layer of two images, three nodes each and four candidates below each."""
    generator = torch.Generator().manual_seed(seed)

    def logs(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).log_softmax(-1)

    fields: dict[str, object] = {
        "depth": depth,
        "side": 4,
        "places": torch.tensor([5, 9]),
        "reach": logs(IMAGES, NODES),
        "joint": logs(IMAGES, NODES),
        "entropy": torch.rand(IMAGES, NODES, generator=generator) * 3,
        "collision": torch.rand(IMAGES, NODES, generator=generator),
        "near": torch.rand(IMAGES, 3, generator=generator),
        "width": WIDTH,
        "log_q": logs(IMAGES, NODES, WIDTH),
        "match": logs(IMAGES, NODES, WIDTH),
    }
    return Layer(**(fields | changes))  # type: ignore[arg-type]


def pool(values: list[list[float]], depths: list[int], *, deepest: int, most: int) -> Pool:
    """Return candidates of these probabilities (not logs)."""
    return Pool(torch.tensor(values).log(), torch.tensor(depths), deepest, most)


SIZE = Limits(IMAGES, 6, 3, WIDTH, torch.device("cpu"))
