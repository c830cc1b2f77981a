"""Products with what stands around them: on a GPU if there is one, else in Triton's interpreter."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.decoding.cache import StaticCache
from tests.tiny import tiny_condition
from tests.tiny_decoder import tiny_decoder

pytest.importorskip("triton", reason="Triton is not installed")
from lantern.engines.cuda import fused
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.cuda.fused_target import FusedTarget
from tests.engines.cuda.test_kernels import CLOSE, DEVICE, random
from tests.engines.cuda.test_target import KEYS, SMALL, TOKENS, Scored, short_blocks, target_in

short_blocks = short_blocks
CONDITION = tiny_condition((4,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "inputs", "outputs"), [(3, 40, 24), (20, 256, 40), (70, 160, 16)])
def test_single_multiplies_and_adds(dtype: torch.dtype, count: int, inputs: int, outputs: int) -> None:
    x, weight = random(2 * count, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1) / inputs**0.5
    rest = random(2 * count, outputs, dtype=dtype, seed=2)
    expected, before = rest.float() + (x.float() @ weight.float().T).to(dtype).float(), rest.clone()
    squares = torch.zeros(2 * count, -(-outputs // fused.OUTPUTS), device=DEVICE)
    fused.single(x, weight, rest, squares, rows=2, live=1)
    close: dict[str, Any] = {"atol": 3 * CLOSE[dtype], "rtol": 3 * CLOSE[dtype]}
    assert torch.allclose(rest[::2].float(), expected[::2], **close) and torch.equal(rest[1::2], before[1::2])
    assert torch.allclose(squares[::2].sum(1), rest[::2].float().square().sum(1), rtol=1e-4)
    packed = torch.zeros(count, outputs, device=DEVICE)
    fused.single(x, weight, packed, None, rows=2, live=1)
    assert torch.allclose(packed, (x.float() @ weight.float().T)[::2], **close)


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


def pass_of(target: Any, nodes: int = 3) -> Any:
    sizes: dict[str, Any] = {"layers": 2, "images": 1, "rows": 2, "heads": 2, "head_dim": 16, "prefix": 1, "stage": 3}
    mask = torch.full((2, nodes, 1 + TOKENS + 3), -torch.inf, device=DEVICE)
    mask[..., :4] = mask[..., 1 + TOKENS] = 0.0
    for node in range(1, nodes):
        mask[:, node, 1 + TOKENS + node] = 0.0
    cache = StaticCache(**sizes, tokens=TOKENS, dtype=torch.float32, device=DEVICE)
    cache.buffer.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
    cache.buffer[0::2, :, :, 0] = 0.0
    tokens = torch.tensor([[5, 7, 9], [5, 7, 9]], device=DEVICE)[:, :nodes]
    positions = torch.tensor([[3, 4, 4], [3, 4, 4]], device=DEVICE)[:, :nodes] + target.config.cls_token_num
    slots = torch.arange(1 + TOKENS, 1 + TOKENS + nodes, device=DEVICE).expand(2, -1)
    with torch.no_grad():
        inputs = target.tok_embeddings(tokens) * torch.tensor([1.0, 0.5], device=DEVICE)[:, None, None]
        return target(inputs, positions, mask, cache=cache, slots=slots, taps=(0, 1)), cache.buffer


def test_a_fused_pass_gives_logits_features_tapped_layers_and_the_cache() -> None:
    target = target_in(torch.float32, n_layer=2, n_head=2, dim=32)
    (expected, keys), (made, own) = pass_of(target), pass_of(FusedTarget(target, 16))
    for name in ("logits", "features", "fused"):
        assert torch.allclose(getattr(made, name), getattr(expected, name), atol=1e-4, rtol=1e-4), name
    assert torch.allclose(own, keys, atol=1e-4, rtol=1e-4)


def decoded(name: str, dtype: torch.dtype) -> tuple[Tensor, dict[int, Tensor]]:
    scored, target = Scored(), target_in(dtype)
    how: dict[str, Any] = {"engine": GraphEngine(rows=16, products="fused")} | SMALL.get(name, {})
    decoder = tiny_decoder(name, target, Sampling(guidance=3.0), **how)
    assert isinstance(decoder.target, FusedTarget)
    return decoder.generate(CONDITION, keys=KEYS, callback=scored).tokens, scored.logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_in_a_window_are_bit_for_bit_those_of_plain_decoding(dtype: torch.dtype) -> None:
    (expected, logits), (made, others) = decoded("plain", dtype), decoded("gumbel-jacobi", dtype)
    assert torch.equal(made, expected) and all(torch.equal(logits[token], others[token]) for token in logits)


@pytest.mark.slow
def test_kernels_compile_for_gpus_without_spills_and_fit_their_shared_memory() -> None:
    where = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engines.cuda.ahead"]
    done = subprocess.run(command, env=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 24 + 24
    for name, used in found.items():
        assert used["stores"] == used["loads"] == 0, name
        assert used["registers"] <= 168 and used["shared"] <= 100_000, name  # three programs of 128 threads at a time
