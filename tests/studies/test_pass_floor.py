"""Bytes of a pass."""

import pytest

from studies.pass_floor import gigabytes, table


def test_bytes_are_those_of_the_size() -> None:
    weights, cache = gigabytes("B", 256)
    # 12 layers of 4 d^2 + 3 d f weights and two norms, the last norm and the head, 2 bytes each
    assert weights == pytest.approx(2 * (12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768 + 768 * 16384) / 1e9)
    assert cache == pytest.approx(2 * 12 * 2 * (128 + 1) * 768 * 2 / 1e9)
    assert table(["B"], [256], [0.5])[1].split()[-1] == f"{2 * (weights + cache):.2f}"
