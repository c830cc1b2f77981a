"""The engine `graph` end to end with each kind of its passes, without graphs; prompts of Llama, and EAGLE-1 modules."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.config import KvCache
from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.core.weights import quantized
from lantern.decoding.cache import StaticCache
from lantern.drafters.eagle.networks import Eagle
from lantern.engines.engine import EAGER, EagerEngine, Weights
from tests import tiny_transformers as tiny
from tests.tiny import tiny_eagle
from tests.tiny_passes import Passes

pytest.importorskip("triton", reason="Triton is not installed")
from lantern.engines.cuda import constant_rows, fused, llama, rows_of
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.cuda.fused_eagle import FusedEagle, fault_of, fused_eagle, tried
from lantern.engines.cuda.llama import LlamaTarget
from lantern.engines.cuda.target import KernelTarget
from tests.engines.cuda import kinds
from tests.engines.cuda.kinds import DEVICE, KINDS, decoder_of, generated, llama_in, target_in, target_of
from tests.engines.cuda.test_kernels import random

pytestmark = pytest.mark.usefixtures("short_blocks")
FP32, BF16 = torch.float32, torch.bfloat16
SLOW = pytest.mark.slow
TREE = (-1, 0, 0, 1, 1, 2, 3, 6)  # parents of nodes


def pass_of(target: Any, lengths: list[int], known: int, is_fp8: bool = False, padding: int = 0) -> dict[str, Tensor]:
    """Return what a pass over a tree gives after some tokens, and the cache that it leaves."""
    how: dict[str, Any] = {"stage": len(TREE), "last": 0.5, "padding": padding, "device": DEVICE, "is_fp8": is_fp8}
    passes = Passes(target, known, lengths=tuple(lengths), **how)
    scores, held = passes.score([5, 7, 9, 3, 1, 2, 8, 4], TREE), passes.cache.buffer
    numbers = held.view(torch.float8_e4m3fn).float() if is_fp8 else held
    return {name: getattr(scores, name) for name in ("logits", "features", "tapped")} | {"cache": numbers}


@pytest.mark.parametrize(
    ("kind", "lengths", "weights", "is_fp8", "known", "padding", "changes"),
    [
        ("cublas", [1], "int8", False, 13, 1, {"block_size": 25}),
        ("cublas", [1, 1], "full", True, 3, 0, {"n_head": 3, "dim": 36}),  # no powers of two
        ("fused", [1, 1], "full", False, 3, 1, {"n_head": 3, "dim": 48}),
        ("fused", [1, 1], "int8", True, 3, 0, {"n_head": 3, "dim": 48}),
        ("llama", [9, 4], "full", True, 0, 0, {"kept": 1}),
        ("llama", [6, 3], "full", False, 13, 2, {"kept": 2, "has_tokens": True, "side": 5}),
    ],
)
def test_a_pass_gives_what_torch_gives(
    kind: str, lengths: list[int], weights: Weights, is_fp8: bool, known: int, padding: int, changes: dict[str, int]
) -> None:
    target: Any = target_of(kind, FP32, n_layer=2, **changes)
    for weight in target.parameters():
        if weight.ndim == 1:  # of norms, all 1 in a new model
            weight.data.mul_(torch.linspace(0.5, 1.5, len(weight), device=DEVICE))
    target = quantized(target, weights)
    both = target, KINDS[kind].prepared(target)
    expected, made = (pass_of(each, lengths, known, is_fp8, padding) for each in both)
    for name in expected:
        torch.testing.assert_close(made[name], expected[name], atol=1e-4, rtol=1e-4, msg=name)


def test_the_bits_of_a_pass_do_not_depend_on_the_padding_of_prompts() -> None:
    prepared = LlamaTarget(llama_in(BF16, n_layer=2, side=5))
    alone, padded = (pass_of(prepared, [6, 3], 13, padding=padding)["logits"] for padding in (0, 5))
    assert torch.equal(alone, padded) and alone.any()


plainly = cache(kinds.scored)


@pytest.mark.parametrize(
    ("kind", "name", "of"),
    [
        ("cublas", "sjd-pac", (FP32, 1.0, "full")),
        *(("fused", "gumbel-jacobi", (BF16, 1.0, kv_cache)) for kv_cache in ("full", "fp8")),
        ("llama", "gumbel-jacobi", (BF16, 1.0, "full")),
        *(pytest.param("cublas", name, (BF16, 1.0, "full"), marks=SLOW) for name in kinds.SMALL),
        *(pytest.param("fused", "gumbel-jacobi", (dtype, 3.0, "full"), marks=SLOW) for dtype in (BF16, FP32)),
        *(pytest.param("llama", "sjd-pac", (BF16, 1.0, kv_cache), marks=SLOW) for kv_cache in ("full", "fp8")),
    ],
)
def test_logits_have_the_bits_of_plain_decoding(kind: str, name: str, of: tuple[torch.dtype, float, KvCache]) -> None:
    (expected, logits), (made, others) = plainly(kind, "plain", *of), kinds.scored(kind, name, *of)
    assert torch.equal(made, expected) and len(logits) == len(others) == kinds.TOKENS - 1
    assert [token for token, both in enumerate(zip(logits, others, strict=True)) if not torch.equal(*both)] == []


@pytest.mark.parametrize(
    ("kind", "weights", "images"),
    [
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
    engines = EagerEngine(weights=weights), GraphEngine(weights=weights, products=KINDS[kind].products)
    eager, graph = (decoder_of(kind, "plain", target, sampling, engine) for engine in engines)
    assert isinstance(graph.target, KernelTarget)
    assert kind != "llama" or "not on a GPU" in (engines[1].remark(target) or "")
    tokens = [generated(kind, decoder, images, forced=forced).tokens for decoder in (eager, graph)]
    assert torch.equal(*tokens)


def test_rows_are_constant_until_a_batch_is_large() -> None:
    assert [rows_of(2, live) for live in (1, 16, 29, 33, 100)] == [32, 32, 32, 64, 128]
    assert [constant_rows(2 * images) for images in (1, 5, 6, 8, 16, 64)] == [32, 32, 16, 16, 8, 2]
    assert GraphEngine().free_nodes(lines=16) == 16 and GraphEngine().free_nodes(lines=2) == 32
    assert rows_of(128, 1) == 2 and rows_of(128, 9) == 16


@pytest.mark.parametrize("name", ["zipar", "pjd"])
def test_passes_that_do_not_see_all_earlier_tokens_run_through_torch(name: str) -> None:
    target, sampling = llama_in(FP32), Sampling(guidance=1.0)
    eager, graph = (generated("llama", decoder_of("llama", name, target, sampling, one)) for one in (EAGER, None))
    assert torch.equal(graph.tokens, eager.tokens)


def test_the_bits_of_a_prompt_do_not_depend_on_the_others() -> None:
    target = llama_in(BF16, n_layer=2)
    prepared, generator = LlamaTarget(target), torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 90, 64, 65, 5, 1, 2, 3, 4, 5, 6])
    tokens = torch.randint(1, 32, (len(lengths), 90), generator=generator)
    mask = torch.arange(90) >= 90 - lengths[:, None]
    shapes, read = list[tuple[int, ...]](), target.read

    def recorded(condition: Condition, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(condition.tokens.shape))
        return read(condition, *args, **kwargs)

    target.read = recorded  # type: ignore[method-assign]
    given = Condition(tokens=tokens[:, None], mask=mask[:, None])
    found = prepared.read(given, 1, taps=(1,))
    assert sorted(shapes) == [(4, 1, 128), (8, 1, 64), (8, 1, 64)]
    expected = read(given, 1)
    assert torch.allclose(found.features.float(), expected.features.float(), atol=0.1, rtol=0.1)
    seen = mask[:, None, None, None, None, :, None]
    assert torch.allclose((found.entries * seen).float(), (expected.entries * seen).float(), atol=0.1, rtol=0.1)
    assert torch.equal(found.scores == 0, mask[:, None]) and found.first[:, 0].tolist() == lengths.tolist()
    for row, length in enumerate(lengths.tolist()):
        own = Condition(tokens=tokens[row : row + 1, None, -length:], mask=mask[row : row + 1, None, -length:])
        alone = prepared.read(own, 1, taps=(1,))
        assert torch.equal(alone.entries[0], found.entries[row, ..., -length:, :])
        for mine, its in ((alone.features, found.features), (alone.logits, found.logits), (alone.tapped, found.tapped)):
            assert torch.equal(mine[0], its[row])


def test_inputs_are_read_from_a_table_of_all_tokens_unless_they_are_words() -> None:
    target = llama_in(FP32)
    prepared, tokens = LlamaTarget(target), torch.tensor([[3, 39], [0, 7]])
    with torch.no_grad():
        assert torch.allclose(prepared.tok_embeddings(tokens), target.tok_embeddings(tokens), atol=1e-6)
        target.tok_embeddings.aligner.fc1.bias.add_(1.0)
        prepared.refresh()
        assert torch.allclose(prepared.tok_embeddings(tokens), target.tok_embeddings(tokens), atol=1e-6)
    target = llama_in(FP32, has_tokens=True)
    assert LlamaTarget(target).tok_embeddings is target.tok_embeddings


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    tokens = torch.randint(1, 32, (1, 2, 155))
    condition = Condition(tokens=tokens, mask=tokens > 0)
    with pytest.raises(ValueError, match="a sequence of 164, the model has 160 positions"):
        decoder_of("llama", "plain", llama_in(FP32), Sampling()).generate(condition, keys=[(9, 0)])


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("janus", None),
        ("emu3", "newline tokens behind rows of tokens"),
        ("emu3.5", "newline tokens behind rows of tokens"),
        ("chameleon", "norms of queries and keys"),
        ("liquid", "activation gelu_pytorch_tanh"),
        ("simplear", "biases in layers"),
    ],
)
def test_reasons_name_what_the_kernels_lack(family: str, reason: str | None) -> None:
    target = tiny.assemble(family, words=tiny.processor(family)).target
    expected = reason and f"the GPU kernels have no {reason}, which this model has"
    assert llama.refusal(target) == expected


def test_layers_that_only_resemble_those_of_llama_are_refused() -> None:
    from transformers import MistralConfig, MistralModel
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    assert "float64" in (llama.refusal(llama_in(torch.float64)) or "")
    target = llama_in(FP32)
    target.body.rotary_emb.rope_type = "dynamic"
    assert "rotary positions of the kind dynamic" in (llama.refusal(target) or "")
    sizes: Any = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    for window, reason in ((4, "windows of attention"), (None, "norms of the kind MistralRMSNorm")):
        config = MistralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, sliding_window=window)
        target.body = MistralModel(config)
        assert reason in (llama.refusal(target) or "")
    target = llama_in(FP32)
    target.body.layers[0] = MistralModel(config).layers[0]
    assert "layers of the kind MistralDecoderLayer" in (llama.refusal(target) or "")
    target.body.norm = GemmaRMSNorm(32)
    assert "norms of the kind GemmaRMSNorm" in (llama.refusal(target) or "")


def eagle_of(form: str, layers: int = 1) -> Eagle:
    made = tiny_eagle(target_in(FP32, dim=32, n_head=2), form=form, layers=layers).to(DEVICE)
    made.fc.bias.data.normal_(generator=torch.Generator(DEVICE).manual_seed(3))
    if form == "guided":
        made.guidance.data.normal_(generator=torch.Generator(DEVICE).manual_seed(4))
    return made


@torch.no_grad()
def drafted(made: Eagle, run: Callable[..., Tensor]) -> Tensor:
    """Features of committed pairs of two images, then of two depths of trees: two nodes, then three below them.

    The prompts have padding.
    """
    config, stage = made.config, 5
    rows, prefix = 1 if config.form == "guided" else 2, config.cls_token_num
    sizes = {"layers": len(made.layers), "images": 2, "rows": rows, "heads": 2, "head_dim": 16, "prefix": prefix}
    cache = StaticCache(**sizes, tokens=kinds.TOKENS, stage=stage, dtype=FP32, device=DEVICE)
    cache.buffer.copy_(random(*cache.buffer.shape, seed=1))
    sees = (torch.arange(prefix) >= torch.tensor([1, 2])[:, None]).to(DEVICE)
    cache.first.copy_(sees.sum(1).repeat_interleave(rows)[:, None])
    mask, known = cache.tree_mask(sees, stage), torch.tensor([1, 4], device=DEVICE)

    def mask_of(_: Tensor, seen: Tensor) -> Tensor:
        return mask.update(known, seen)

    fork = torch.eye(2, 5, dtype=torch.bool)
    last = torch.tensor([[1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [0, 1, 0, 0, 1]]).bool()
    last = torch.stack([last, last[:, [1, 0, 2, 3, 4]]])  # of each image another tree
    found = []
    for depth, ancestors in enumerate((torch.ones(4, 4, dtype=torch.bool).tril(), fork, last)):
        nodes, ancestors = ancestors.shape[-2], ancestors.to(DEVICE)
        ahead = torch.arange(4, device=DEVICE) if depth == 0 else torch.full((nodes,), depth - 1, device=DEVICE)
        tokens = torch.arange(2 * nodes, device=DEVICE).view(2, nodes) * 3 % 24
        out = run(
            *(made, random(2, rows, nodes, 32, seed=depth), tokens, known[:, None] + ahead),
            mask_of,
            known=known,
            ancestors=ancestors,
            scales=torch.tensor([[3.0], [2.0]], device=DEVICE).expand(-1, nodes) if rows == 1 else None,
            cache=cache,
            slots=torch.arange(nodes, device=DEVICE) + (2 if depth == 2 else 0) + cache.first_stage_slot,
        )
        if depth == 0:
            cache.commit(torch.arange(4, device=DEVICE).expand(2, -1), known)
            known += torch.tensor([1, 3], device=DEVICE)
        found.append(out)
    return torch.cat([*found, cache.buffer[:, :, :, :-1].flatten().view(1, 1, -1, 32).expand(2, rows, -1, -1)], 2)


@pytest.mark.parametrize(("form", "layers"), [("guided", 2), ("rows", 1)])
def test_features_and_keys_of_pairs_and_trees_are_those_of_torch(form: str, layers: int) -> None:
    made = FusedEagle(eagle_of(form, layers))
    torch.testing.assert_close(drafted(made, FusedEagle.draft), drafted(made, Eagle.draft), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("form", "images"), [("guided", 1), pytest.param("rows", 2, marks=SLOW)])
def test_drafts_by_kernels_are_those_of_torch(form: str, images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_in(FP32, block_size=4)
    module = tiny_eagle(target, form=form).to(DEVICE)
    by_torch, decoder = (
        decoder_of("fused", "eagle1", target, Sampling(guidance=3.0), one, module, tree="grown_4_3")
        for one in (EAGER, None)
    )
    expected = generated("fused", by_torch, images)
    monkeypatch.setattr(Eagle, "draft", None)  # by kernels alone
    made = generated("fused", decoder, images)
    assert torch.equal(made.tokens, expected.tokens)
    assert torch.equal(made.steps, expected.steps)  # the drafts were the same, and so were the accepted ones


def test_weights_that_change_are_read_anew() -> None:
    of = eagle_of("guided")
    made = FusedEagle(of)
    before = tried(made, FusedEagle.draft)
    of.layers[0].feed_forward.w2.weight.data.mul_(2.0)
    of.to(torch.float64).to(FP32)  # in other memory
    after = tried(made, FusedEagle.draft)
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(after, tried(of, Eagle.draft), atol=1e-4, rtol=1e-4)


def test_a_trial_compares_two_passes_with_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = FusedEagle(eagle_of("guided"))
    assert fault_of(made) is None and tried(made, Eagle.draft).shape[2] == 6
    run = fused.gate_up
    monkeypatch.setattr(fused, "gate_up", lambda *given, **how: (run(*given, **how), given[4].mul_(1.1)))
    assert "features differ by" in (fault_of(made) or "")
    monkeypatch.setattr(fused, "gate_up", None)
    assert "a pass failed: TypeError" in (fault_of(made) or "")


def test_large_passes_and_other_modules_are_left_to_torch() -> None:
    of = eagle_of("rows")
    made = FusedEagle(of)
    made.draft, features = None, torch.zeros(200, 1, 32, device=DEVICE)  # type: ignore[assignment]
    target = target_in(FP32, dim=32, n_head=2)
    with torch.no_grad():
        assert torch.equal(made.logits(features, target), of.logits(features, target))
    other = torch.nn.Linear(2, 2)
    assert fused_eagle(other) is other


@pytest.mark.slow
@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("kind", KINDS)
def test_images_that_share_a_wave_have_their_own_tokens(kind: str) -> None:
    target, condition = target_of(kind, torch.float32), KINDS[kind].condition
    samplings = [Sampling(guidance=3.0, top_k=9), Sampling(guidance=2.0, temperature=0.8, top_k=12)]
    decoders = [decoder_of(kind, "gumbel-jacobi", target, one) for one in samplings * 2]
    found = kinds.joined(decoders[:2], condition, kinds.KEYS)
    for i, tokens in enumerate(found):
        assert torch.equal(tokens, decoders[2 + i].generate(condition.select([i]), keys=kinds.KEYS[i : i + 1]).tokens)
