"""The engine `graph` end to end with each kind of its passes, without graphs."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.weights import quantized
from lantern.decoding.cache import StaticCache
from lantern.engines.engine import EagerEngine, Weights

pytest.importorskip("triton", reason="Triton is not installed")
from lantern.engines.cuda import constant_rows, rows_of
from lantern.engines.cuda import target as module
from lantern.engines.cuda.engine import GraphEngine
from tests.engines.cuda.kinds import DEVICE, KINDS, TOKENS, decoder_of, generated, scored, target_of

pytestmark = pytest.mark.usefixtures("short_blocks")
FP32, BF16 = torch.float32, torch.bfloat16


@torch.no_grad()
def pass_of(target: Any, lengths: list[int], is_fp8: bool = False) -> dict[str, Tensor]:
    """Return what a pass over a node and its two children gives after three tokens, and the cache that it leaves.

    There is a row of the image for each of the `lengths` of its prompts; LlamaGen's prompts are one slot.
    """
    config, first, prefix = target.config, max(lengths) + TOKENS, max(lengths)
    sizes = {"layers": config.n_layer, "heads": config.n_head, "head_dim": config.head_dim, "rows": len(lengths)}
    sizes |= {"images": 1, "prefix": prefix, "tokens": TOKENS, "stage": 3}
    cache = StaticCache(**sizes, dtype=FP32, device=DEVICE, is_fp8=is_fp8)
    before = torch.randn(cache.buffer.shape, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)
    cache.buffer.copy_(cache.stored(before))
    if prefix == 1:
        cache.buffer[0::2, :, :, 0] = 0
    else:
        cache.first.copy_(torch.tensor(lengths)[:, None])
    shown = torch.arange(prefix, device=DEVICE) >= prefix - torch.tensor(lengths, device=DEVICE)[:, None]
    ancestors = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], device=DEVICE).bool()
    mask = cache.tree_mask(shown[None], 3).update(torch.tensor([3], device=DEVICE), ancestors)
    inputs = target.tok_embeddings(torch.tensor([[5, 7, 9]] * len(lengths), device=DEVICE))
    inputs = inputs * torch.linspace(1.0, 0.5, len(lengths), device=DEVICE)[:, None, None]
    positions = torch.tensor([[3, 4, 4]] * len(lengths), device=DEVICE) + config.cls_token_num
    slots = torch.arange(first, first + 3, device=DEVICE).expand(len(lengths), -1)
    scores = target(inputs, positions, mask, cache=cache, slots=slots, taps=(0, 1))
    numbers = cache.buffer.view(torch.float8_e4m3fn).float() if is_fp8 else cache.buffer
    return {name: getattr(scores, name) for name in ("logits", "features", "fused")} | {"cache": numbers}


@pytest.mark.parametrize(
    ("kind", "lengths", "weights", "is_fp8", "changes"),
    [
        ("cublas", [1], "int8", False, {}),
        ("cublas", [1, 1], "full", True, {"n_head": 3, "dim": 36}),  # no powers of two
        ("fused", [1, 1], "full", False, {"n_head": 3, "dim": 48}),
        ("fused", [1, 1], "int8", True, {"n_head": 3, "dim": 48}),
        ("llama", [6, 3], "full", True, {"kept": 1}),
        ("llama", [6, 3], "full", False, {"kept": 2, "has_tokens": True}),
    ],
)
def test_a_pass_gives_what_torch_gives(
    kind: str, lengths: list[int], weights: Weights, is_fp8: bool, changes: dict[str, int]
) -> None:
    target: Any = target_of(kind, FP32, n_layer=2, **changes)
    for weight in target.parameters():
        if weight.ndim == 1:  # of norms, all 1 in a new model
            weight.data.mul_(torch.linspace(0.5, 1.5, len(weight), device=DEVICE))
    target = quantized(target, weights)
    expected, made = (pass_of(each, lengths, is_fp8) for each in (target, KINDS[kind].prepared(target, 16)))
    for name in expected:
        torch.testing.assert_close(made[name], expected[name], atol=1e-4, rtol=1e-4, msg=name)


plainly = cache(scored)


@pytest.mark.parametrize(
    ("kind", "name", "dtype", "guidance"),
    [
        ("cublas", "sjd-pac", FP32, 1.0),
        ("fused", "gumbel-jacobi", BF16, 1.0),
        ("llama", "gumbel-jacobi", BF16, 1.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("cublas", "gumbel-jacobi", BF16, 1.0),
                ("cublas", "eagle1", BF16, 1.0),
                ("cublas", "sjd-pac", BF16, 1.0),
                ("fused", "gumbel-jacobi", BF16, 3.0),
                ("fused", "gumbel-jacobi", FP32, 3.0),
                ("llama", "sjd-pac", BF16, 1.0),
            )
        ),
    ],
)
def test_logits_have_the_bits_of_plain_decoding(kind: str, name: str, dtype: torch.dtype, guidance: float) -> None:
    (expected, logits), (made, others) = plainly(kind, "plain", dtype, guidance), scored(kind, name, dtype, guidance)
    assert torch.equal(made, expected) and logits.keys() == others.keys() == set(range(1, TOKENS))
    assert [token for token in logits if not torch.equal(logits[token], others[token])] == []


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "weights", "images"),
    [
        ("fused", "full", 1),
        ("fused", "int8", 1),
        ("llama", "full", 1),
        *(pytest.param(kind, "full", 2, marks=SLOW) for kind in ("cublas", "llama")),
    ],
)
def test_tokens_are_those_of_the_eager_engine_in_fp32(kind: str, weights: Weights, images: int) -> None:
    """Of llama the first tokens are given, which torch reads in one pass."""
    changes = {"n_layer": 2, "n_head": 2, "block_size": 4} if kind == "fused" else {}
    target, sampling = target_of(kind, FP32, **changes), Sampling(guidance=3.0, top_k=20)
    forced = torch.tensor([7, 30, 2, 11, *[-1] * 5]).expand(images, -1) if kind == "llama" else None
    how: dict[str, Any] = {"products": KINDS[kind].products, "rows": 32 if kind == "fused" else 16}
    engines = EagerEngine(weights=weights), GraphEngine(weights=weights, **how)
    eager, graph = (decoder_of(kind, "plain", target, sampling, engine) for engine in engines)
    assert isinstance(graph.target, module.KernelTarget)
    assert kind != "llama" or "not on a GPU" in (engines[1].remark(target) or "")
    tokens = [generated(kind, decoder, images, forced=forced).tokens for decoder in (eager, graph)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("kind", ["fused", "llama"])
def test_drafts_do_not_change_tokens_with_a_kv_cache_in_fp8(kind: str) -> None:
    target, sampling, engine = target_of(kind, BF16), Sampling(), GraphEngine(rows=16, kv_cache="fp8")
    decoders = [decoder_of(kind, name, target, sampling, engine) for name in ("plain", "gumbel-jacobi")]
    plain, drafted = (generated(kind, decoder) for decoder in decoders)
    assert torch.equal(plain.tokens, drafted.tokens) and drafted.steps < plain.steps
    assert decoders[1].promise(1) == "tokens"


@SLOW
@pytest.mark.parametrize("kind", ["cublas", "llama"])
def test_images_of_a_batch_advance_by_their_own_numbers_of_tokens(kind: str) -> None:
    target, sampling = target_of(kind, BF16), Sampling(guidance=3.0)
    decoders = (decoder_of(kind, name, target, sampling) for name in ("plain", "gumbel-jacobi"))
    plain, drafted = (generated(kind, decoder, 2) for decoder in decoders)
    assert torch.equal(plain.tokens, drafted.tokens) and not torch.equal(plain.tokens[0], plain.tokens[1])
    assert drafted.steps.tolist() != plain.steps.tolist()


def test_rows_are_constant_until_a_batch_is_large() -> None:
    assert [rows_of(2, live) for live in (1, 16, 29, 33, 100)] == [32, 32, 32, 64, 128]
    assert [constant_rows(2 * images) for images in (1, 5, 6, 8, 16, 64)] == [32, 32, 16, 16, 8, 2]
    assert GraphEngine().free_nodes(lines=16) == 16 and GraphEngine(rows=16).free_nodes(lines=2) == 16
    assert rows_of(128, 1) == 2 and rows_of(128, 9) == 16 and rows_of(2, 9, least=16) == 16
