"""Products with what stands around them: on a GPU if there is one, else in Triton's interpreter."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from lantern.engines.cuda import fused
from tests.engines.cuda.test_kernels import DEVICE, random


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_among_any_number_of_rows(dtype: torch.dtype) -> None:
    x, weight = random(60, 256, dtype=dtype), random(32, 256, dtype=dtype, seed=1)
    made = []
    for count in (1, 5, 20, 60):
        out = torch.zeros(count, 32, device=DEVICE)
        fused.single(x[60 - count :].contiguous(), weight, out, None, rows=count, live=count)
        made.append(out[-1])
    # The interpreter multiplies with NumPy, which may sum in another order for another number of rows.
    atol = 0.0 if torch.device(DEVICE).type == "cuda" else 1e-5
    for other in made[1:]:
        torch.testing.assert_close(other, made[0], rtol=0.0, atol=atol)


def compiled(*arguments: str) -> Any:
    """Return what `ahead` prints, without the interpreter."""
    where = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engines.cuda.ahead", *arguments]
    done = subprocess.run(command, env=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_sums_and_products_are_divided_among_threads_in_one_way_for_any_number_of_nodes() -> None:
    for size, by_nodes in compiled("orders").items():
        for name, expected in by_nodes["1"].items():
            is_equal = all(made[name] == expected for made in by_nodes.values())
            assert len(expected) >= 2 and is_equal == ("few parts" not in name), (size, name)


@pytest.mark.slow
def test_kernels_compile_for_gpus_without_spills_and_fit_their_shared_memory() -> None:
    found = compiled()
    assert len(found) == 3 * 24 + 4
    for name, used in found.items():
        assert used["stores"] == used["loads"] == 0, name
        assert used["registers"] <= 168 and used["shared"] <= 100_000, name  # three programs of 128 threads at a time
