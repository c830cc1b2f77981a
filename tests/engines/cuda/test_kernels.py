"""Each kernel against plain PyTorch: on a GPU if there is one, else in Triton's interpreter."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import HeldSampling, Noise, Purpose, Sampling
from lantern.decoding.cache import StaticCache
from lantern.decoding.loop import LogitRows
from lantern.drafters.base import ranking
from lantern.drafters.policies import match_chances

pytest.importorskip("triton", reason="Triton is not installed")
import triton
import triton.language as tl

from lantern.engines.cuda import couple, fused, fused_eagle, kernels, relax, walk
from lantern.engines.cuda.target import KernelTarget

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# the interpreter rounds to bf16 toward zero
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@triton.jit
def stored_kernel(X, CACHE, OUT):
    at = tl.arange(0, 1024)
    tl.store(CACHE + at, kernels.to_cache(tl.load(X + at), CACHE))
    tl.store(OUT + at, kernels.of_cache(tl.load(CACHE + at), OUT))


def test_keys_in_fp8_have_the_bits_that_torch_gives_them() -> None:
    """All numbers of e4m3, the middles between neighbours, numbers next to them, and numbers past the largest."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = [middles * (1 + sign * 2**-20) for sign in (1, -1)]
    x = torch.cat([numbers, middles, *near, torch.tensor([449.0, 1e30, 2**-11])]).to(DEVICE)
    x = torch.nn.functional.pad(torch.cat([x, -x]), (0, 1024 - 2 * len(x)))
    sizes = dict.fromkeys(("layers", "images", "rows", "heads", "head_dim", "prefix", "tokens", "stage"), 1)
    cache = StaticCache(**sizes, dtype=torch.float32, device=DEVICE, is_fp8=True)
    made, out = torch.zeros(1024, dtype=torch.uint8, device=DEVICE), torch.zeros(1024, device=DEVICE)
    stored_kernel[(1,)](x, made, out)
    assert cache.buffer.dtype == torch.uint8
    expected = cache.stored(x).view(torch.float8_e4m3fn).float()
    assert torch.equal(made.view(torch.float8_e4m3fn).float(), expected) and torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("count", "inputs", "outputs"), [(3, 40, 24), (70, 160, 40)])
def test_linear8_multiplies_and_scales(dtype: torch.dtype, count: int, inputs: int, outputs: int) -> None:
    x = random(count, inputs, dtype=dtype)
    weight = (random(outputs, inputs) * 40).clamp(-127, 127).to(torch.int8)
    scale, out = random(outputs, seed=2).abs().to(dtype) / 40, torch.empty(count, outputs, dtype=dtype, device=DEVICE)
    kernels.linear8(x, weight, scale, out)
    expected = (x.float() @ weight.float().T) * scale.float()
    assert torch.allclose(out.float(), expected, atol=10 * CLOSE[dtype], rtol=3 * CLOSE[dtype])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.parametrize("rows", [1, 2])
def test_samples_are_written_into_the_grids_and_logits_that_are_not_finite_are_seen(rows: int) -> None:
    tokens = 70
    sampling, logits = Sampling(guidance=float(rows), top_k=5), random(4, rows, 1, tokens)
    logits[1], logits[2, -1, 0, 3] = torch.nan, torch.inf
    places = torch.tensor([[2], [5], [5], [0]], device=DEVICE)
    noise = Noise([(3, i) for i in range(4)], positions=6, vocab_size=tokens, device=DEVICE)
    grids = list[Tensor]()
    for sampler in (KernelTarget.__new__(KernelTarget).sampler(sampling, noise), None):
        grid, total = torch.full((4, 8), -1, device=DEVICE), torch.zeros(4, device=DEVICE)
        made = LogitRows(sampling, logits, places, noise, sampler).sample_into(grid[:, :6], total)
        assert total.isfinite().tolist() == [True, False, False, True]
        assert torch.equal(grid.gather(1, places), made) and bool(((made >= 0) & (made < tokens)).all())
        assert int((grid >= 0).sum()) == 4
        grids.append(grid[[0, 3]])
    assert torch.equal(*grids)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(guidance=3.0, top_k=20),
        Sampling(guidance=1.0, temperature=0.7),
        Sampling(guidance=7.5, temperature=0.0, guidance_interval=4, top_k=1000),
        Sampling(guidance=3.0, top_p=0.9),
        *(Sampling(guidance=3.0, top_k=top_k) for top_k in (1, 2)),
    ],
)
@pytest.mark.parametrize("purpose", [None, Purpose.TARGET, Purpose.DRAFT], ids=["point", "gumbel", "sampled"])
def test_samples_children_and_log_q_are_those_of_torch(purpose: Purpose | None, sampling: Sampling) -> None:
    """Of the first nodes of a pass, with tied scores and zeros of both signs."""
    ranks, tokens, nodes, width = ranking(sampling), 1200, 2, 6
    noise = Noise([(3, 0), (3, 1)], positions=16, vocab_size=tokens, device=DEVICE, is_silent=sampling.is_greedy)
    target = KernelTarget.__new__(KernelTarget)
    ranker = target.ranker(ranks, noise)
    for seed, is_guided in ((0, False), (1, True)):
        logits = ((random(2, sampling.rows, nodes + 1, tokens, seed=seed) * 6).round() / 2)[:, :, :nodes]
        first = torch.tensor([[4], [20]], device=DEVICE)
        places = first.expand(-1, nodes) if seed else first - torch.arange(nodes, device=DEVICE)
        given = sampling.guide(logits, places)[:, None] if is_guided else logits
        log_q = ranks.filtered(given[:, 0]) if is_guided else ranks.log_probs(given, places)
        scores = log_q if purpose is None else log_q + noise.gumbel(places, purpose)
        sampled = kernels.sample(given, places, noise.gumbel_table(purpose), ranks, width=1) if purpose else None
        assert sampled is None or torch.equal(sampled[..., 0], scores.argmax(-1))
        best, found, chances = ranker(given, places, width=width, purpose=purpose, spread=1.25)
        ordered, numbers = (part[..., :width] for part in scores.sort(dim=-1, descending=True, stable=True))
        is_kept = ordered > -torch.inf
        assert torch.equal(best[is_kept], numbers[is_kept])
        assert torch.equal(chances > -torch.inf, is_kept)
        matched = match_chances(scores, 1.25).gather(-1, best)
        assert torch.allclose(chances[is_kept], matched[is_kept], atol=1e-5, rtol=0.0)
        assert all(len(set(siblings)) == width for siblings in best.flatten(0, 1).tolist())
        assert torch.equal(found == -torch.inf, log_q == -torch.inf)
        kept = log_q > -torch.inf
        assert torch.allclose(found[kept], log_q[kept], atol=1e-5, rtol=0.0)


def test_each_image_is_sampled_by_its_own_settings() -> None:
    samplings = [Sampling(3, 1, 9), Sampling(2, 0.8, 12), Sampling(5.5, 1.3, 16)]
    held, tokens, nodes = HeldSampling(**vars(samplings[0])), 50, 4
    held.hold(torch.cat([one.values(1, DEVICE) for one in samplings]))
    noise = Noise([(3, i) for i in range(3)], positions=16, vocab_size=tokens, device=DEVICE).gumbel_table()
    logits, places = 3 * random(3, 2, nodes, tokens), torch.arange(nodes, device=DEVICE).expand(3, -1)
    assert noise is not None
    log_q = logits.new_empty(3, nodes, tokens)
    found = kernels.sample(logits, places, noise, held, width=3, log_q=log_q)
    for i, one in enumerate(samplings):
        own, image = logits.new_empty(1, nodes, tokens), slice(i, i + 1)
        best = kernels.sample(logits[image], places[image], noise[image], one, width=3, log_q=own)
        assert torch.equal(found[image], best) and torch.equal(log_q[image], own)
        assert torch.allclose(own, one.log_probs(logits[image], places[image]), atol=1e-5, rtol=0.0)
        assert torch.allclose(held.log_probs(logits, places)[image], own, atol=1e-5, rtol=0.0)


def test_log_q_at_temperature_0_and_samples_with_top_p_are_left_to_torch() -> None:
    target = KernelTarget.__new__(KernelTarget)
    assert target.ranker(Sampling(temperature=0.0), None) is None
    assert target.sampler(Sampling(top_p=0.9), None) is None


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
    modules = (kernels, fused, fused_eagle, relax, walk, couple)
    names = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert {tuple(name.split()[::2]) for name in found} == {(name, f"sm_{n}") for name in names for n in (80, 90, 100)}
    for name, used in found.items():
        assert used["stores"] == used["loads"] == 0, name
        assert used["registers"] <= 168 and used["shared"] <= 100_000, name  # three programs of 128 threads at a time
