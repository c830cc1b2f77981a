"""Trials of kernels on the device they are to run on: faults, wrong numbers and bits are found, and acted on."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.engines.engine import engine
from lantern.generation.generator import build_decoder
from lantern.methods import METHODS
from tests.engines.cuda.claimed import claim_module, claimed_cuda

pytest.importorskip("triton", reason="Triton is not installed")
from triton.runtime import interpreter

from lantern.engines.cuda import fused, kernels
from lantern.engines.cuda import target as module
from lantern.engines.cuda import trial as trials
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.cuda.kernels import silu_mul
from lantern.engines.cuda.llama import LlamaTarget
from lantern.engines.cuda.target import FusedTarget, KernelTarget, Linear
from lantern.engines.cuda.trial import TOLERANCE, Trial, tried
from tests.engines.cuda.kinds import DEVICE, llama_in, target_in

PAIR = {"block_size": 4}  # of which a trial scores chains of two nodes


@pytest.fixture
def prepared() -> Any:
    return KernelTarget(target_in(torch.float32, **PAIR))


@pytest.mark.parametrize(
    ("kind", "dtype", "is_fp8"),
    [
        (KernelTarget, torch.float32, False),
        (KernelTarget, torch.bfloat16, False),
        (KernelTarget, torch.float16, True),
        (FusedTarget, torch.bfloat16, False),
        (FusedTarget, torch.bfloat16, True),
        (LlamaTarget, torch.float32, False),
        pytest.param(LlamaTarget, torch.bfloat16, True, marks=pytest.mark.slow),
    ],
)
def test_passes_agree_with_torch_and_keep_the_bits_of_a_node(
    kind: type[KernelTarget], dtype: torch.dtype, is_fp8: bool
) -> None:
    is_llama = kind is LlamaTarget  # whose prompts have keys
    prepared = kind(llama_in(dtype, side=2) if is_llama else target_in(dtype, **PAIR))
    found = tried(prepared, is_fp8=is_fp8)
    assert found.fault is None and 0 < found.difference < TOLERANCE[dtype] / (2 if is_llama else 1)
    assert found.keeps_bits and prepared.program.keeps_rows(32) and "do not depend" in found.found


def test_products_in_fp32_are_those_of_cublas_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "is_interpreted", lambda: False)
    for dtype, kinds in ((torch.float32, [KernelTarget]), (torch.bfloat16, [FusedTarget, KernelTarget])):
        weight = SimpleNamespace(device=torch.device("cuda"), itemsize=dtype.itemsize)
        config, table = SimpleNamespace(family="llamagen"), SimpleNamespace(weight=weight)
        assert GraphEngine()._kinds(SimpleNamespace(config=config, tok_embeddings=table)) == kinds


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (Mock(side_effect=RuntimeError("Failed to find C compiler")), "Failed to find C compiler"),
        (lambda gated, out, **how: (silu_mul(gated, out, **how), out.mul_(1.1)), "differ from torch's"),
    ],
    ids=["not built", "wrong numbers"],
)
def test_a_broken_kernel_is_a_fault(prepared: Any, broken: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "silu_mul", broken)
    assert reason in (tried(prepared).fault or "")


def exact_dot(builder: Any, a: Any, b: Any, total: Any, *_: object) -> Any:
    """NumPy's product, whose order of summation depends on the number of rows, in fp64 instead."""
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + total.data
    return interpreter.TensorHandle(product.astype(total.data.dtype), total.dtype.scalar)


# bf16 hides most of the bits, so its case has more numbers
SLOW = pytest.param(torch.bfloat16, {"block_size": 25, "n_layer": 2}, marks=pytest.mark.slow)


@pytest.mark.skipif(DEVICE != "cpu", reason="replaces a product of Triton's interpreter")
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, {}), SLOW])
def test_squares_in_another_order_are_found(
    dtype: torch.dtype, size: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fused.single

    def uneven(x: Any, weight: Any, out: Any, squares: Any, *, live: int, **how: Any) -> None:
        run(x, weight, out, squares, live=live, **how)
        if squares is not None and live > 2:
            parts = out.float().square().view(*squares.shape, fused.OUTPUTS).unbind(-1)
            squares.copy_(reduce(torch.add, parts[::-1]))

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", exact_dot)
    prepared = FusedTarget(target_in(dtype, dim=32, **size))
    assert tried(prepared).keeps_bits
    monkeypatch.setattr(fused, "single", uneven)
    found = tried(prepared)
    assert found.fault is None and not found.keeps_bits and "bits depend" in found.found


def test_products_whose_bits_depend_on_the_row_are_found(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, inside = Linear.__call__, list[torch.device]()

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    def uneven(self: Any, x: Any, out: Any) -> None:
        assert inside == [x.device]  # int8 products are kernels, which run on the current GPU
        run(self, x, out)
        if len(x) == 64:
            out[-1, 0].mul_(1 + 2.0**-22)

    monkeypatch.setattr(Linear, "__call__", uneven)
    monkeypatch.setattr(module, "on_device", on_device)
    assert [prepared.program.keeps_rows(rows) for rows in (32, 64, 64)] == [True, False, False]


def test_a_fault_leads_to_torch_passes_and_lost_bits_to_no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    target, how = target_in(torch.float32), {"sampling": Sampling(), "engine": GraphEngine()}

    def promise_after(found: Trial) -> str:
        monkeypatch.setattr(trials, "trial_of", lambda prepared, **_: found)
        decoder = build_decoder(METHODS["gumbel-jacobi"].with_options(window=3), target, **how)  # type: ignore[arg-type]
        assert isinstance(decoder.target, KernelTarget) == (found.fault is None)
        return decoder.promise(1)

    assert promise_after(Trial(keeps_bits=True)) == "tokens"
    assert promise_after(Trial(keeps_bits=False)) != "tokens"
    assert promise_after(Trial("no compiler")) != "tokens"


def test_auto_takes_the_graph_after_a_trial(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "is_quantized", lambda weight: False)  # claimed weights are of a subclass of Tensor
    auto: Any = engine("auto")
    with claimed_cuda():
        target = claim_module(target_in(torch.float32, **PAIR))
        refused = auto.resolve(target)  # without a driver nothing can be captured
        monkeypatch.setattr(trials, "replay", lambda run: run())
        trials._TRIALS.clear()
        chosen = auto.resolve(target)
        assert chosen.remark(target) is None
        monkeypatch.setattr(fused, "enter", None)
        trials._TRIALS.clear()
        by_cublas = auto.resolve(target).prepare(target)
        monkeypatch.setattr(kernels, "norm", None)
        trials._TRIALS.clear()
        by_torch = auto.resolve(target)
    assert refused.name == "eager" and "a pass of Transformer failed" in refused.reason
    assert "passes of KernelTarget are not used" in caplog.text
    assert chosen.name == "graph" and "logits differ from torch's by" in chosen.reason
    assert type(by_cublas) is KernelTarget and "passes of FusedTarget are not used" in caplog.text
    assert by_torch.name == "graph" and "differ from torch's by 0 %" in by_torch.reason
    assert "passes run through torch: a pass of KernelTarget failed: TypeError" in by_torch.remark(target)
