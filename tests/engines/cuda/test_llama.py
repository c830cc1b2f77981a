"""The engine `graph` with Llama's layers: kernels on a GPU if there is one, else in Triton's interpreter."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Raster
from lantern.decoding.cache import StaticCache
from lantern.engines.engine import EAGER
from lantern.generation.decoder import Decoder, build_decoder
from lantern.methods import METHODS
from lantern.models.transformers.janus import JanusTokens
from lantern.models.transformers.target import TokenEmbedding, TokenHead, TransformersTarget
from tests import tiny_transformers as tiny

pytest.importorskip("triton", reason="Triton is not installed")
from lantern.engines.cuda import llama
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.cuda.llama import LlamaTarget
from tests.engines.cuda import test_target
from tests.engines.cuda.test_target import DEVICE, Scored

short_blocks = test_target.short_blocks
slot_order = test_target.slot_order
TOKENS, KEYS = 9, [(9, 0)]
# prompts of 6 and 3 tokens
PROMPT = torch.tensor([[[1, 12, 9, 10, 7, 4], [0, 0, 0, 1, 2, 4]]])
CONDITION = Condition(tokens=PROMPT, mask=PROMPT > 0)
SMALL: dict[str, dict[str, Any]] = {
    "gumbel-jacobi": {"window": 3},
    "sjd-pac": {"window": 3, "width": 2, "levels": 1},
}


def target_in(
    dtype: torch.dtype, *, layers: int = 1, kept: int = 1, side: int = 3, has_tokens: bool = False
) -> TransformersTarget:
    """Janus around a Llama with two heads, `kept` of keys and values; with `has_tokens` tokens are among its tokens."""
    from transformers import LlamaConfig, LlamaModel

    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": kept}
    body = tiny.randomise(LlamaModel(LlamaConfig(**sizes, **heads, max_position_embeddings=160)))
    inner, words = tiny.tiny_janus().model, body.embed_tokens
    embedding, head = JanusTokens(inner.generation_embeddings, inner.generation_aligner), inner.generation_head
    if has_tokens:
        tokens = torch.arange(31, 11, -1)
        embedding, head = TokenEmbedding(words, tokens), TokenHead(tiny.randomise(torch.nn.Linear(32, 32)), tokens)
    how: dict[str, Any] = {"tokens": 20 if has_tokens else 40, "family": "janus", "raster": Raster(side, side)}
    return TransformersTarget(body, words, embedding, head, **how).to(DEVICE, dtype)


def decoder_of(name: str, target: Any, sampling: Sampling, engine: Any = None) -> Decoder:
    method = METHODS[name].with_options(**SMALL.get(name, {}))
    return build_decoder(method, target, sampling=sampling, engine=engine or GraphEngine(rows=16))


@pytest.mark.parametrize("kept", [1, 2])
def test_a_pass_gives_logits_features_and_tapped_layers(kept: int) -> None:
    target = target_in(torch.float32, layers=2, kept=kept, has_tokens=kept == 2)
    made = []
    for each in (target, LlamaTarget(target, 16)):
        size: dict[str, Any] = {
            "layers": 2,
            "images": 1,
            "rows": 2,
            "heads": kept,
            "head_dim": 16,
            "tokens": 9,
            "stage": 3,
        }
        cache = StaticCache(**size, prefix=6, dtype=torch.float32, device=DEVICE)
        cache.buffer.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
        cache.first.copy_(torch.tensor([[6], [3]]))
        mask = torch.full((2, 3, 6 + TOKENS + 3), -torch.inf, device=DEVICE)
        mask[0, :, :6] = mask[1, :, 3:6] = 0.0
        mask[..., 6:11] = mask[..., 15] = 0.0  # five committed tokens, and node 0, which the others follow
        mask[:, 1, 16] = mask[:, 2, 17] = 0.0
        positions = torch.tensor([[5, 6, 6]] * 2, device=DEVICE)
        slots = torch.arange(15, 18, device=DEVICE).expand(2, -1)
        with torch.no_grad():
            inputs = each.tok_embeddings(torch.tensor([[5, 7, 9]] * 2, device=DEVICE))
            made.append(each(inputs, positions, mask, cache=cache, slots=slots, taps=(0, 1)))
    for name in ("logits", "features", "fused"):
        assert torch.allclose(getattr(made[0], name), getattr(made[1], name), atol=1e-4, rtol=1e-4), name


def test_tokens_are_those_of_the_eager_engine_in_fp32() -> None:
    target, sampling = target_in(torch.float32), Sampling(guidance=3.0, top_k=20)
    eager, graph = (decoder_of("plain", target, sampling, engine) for engine in (EAGER, None))
    assert isinstance(graph.target, LlamaTarget) and graph.promise(1) == "tokens"
    assert "not on a GPU" in (GraphEngine().remark(target) or "")
    forced = torch.full((1, TOKENS), -1)
    forced[:, :4] = torch.tensor([7, 30, 2, 11])  # read by torch, in one pass
    for given in (None, forced):
        expected = eager.generate(CONDITION, keys=KEYS, forced=given).tokens
        assert torch.equal(graph.generate(CONDITION, keys=KEYS, forced=given).tokens, expected)


@pytest.mark.parametrize("name", ["zipar", "pjd"])
def test_passes_that_do_not_see_all_earlier_tokens_run_through_torch(name: str) -> None:
    target, sampling = target_in(torch.float32), Sampling(guidance=1.0)
    eager, graph = (decoder_of(name, target, sampling, engine) for engine in (EAGER, None))
    expected = eager.generate(CONDITION, keys=KEYS).tokens
    assert torch.equal(graph.generate(CONDITION, keys=KEYS).tokens, expected)


@cache
def decoded(name: str) -> tuple[Tensor, dict[int, Tensor]]:
    """Tokens in bf16, and the logits that they were sampled from."""
    scored, decoder = Scored(), decoder_of(name, target_in(torch.bfloat16), Sampling(guidance=1.0))
    assert decoder.promise(1) == "tokens"
    return decoder.generate(CONDITION, keys=KEYS, callback=scored).tokens, scored.logits


def other_logits(name: str) -> int:
    """Return how many tokens were sampled from other logits than by plain decoding."""
    (expected, logits), (made, others) = decoded("plain"), decoded(name)
    assert logits.keys() == others.keys() == set(range(1, TOKENS))
    found = sum(not torch.equal(logits[token], others[token]) for token in logits)
    assert found or torch.equal(made, expected)
    return found


@pytest.mark.parametrize("name", ["gumbel-jacobi", "sjd-pac"])
def test_logits_in_a_tree_are_bit_for_bit_those_of_plain_decoding(name: str) -> None:
    assert other_logits(name) == 0


@pytest.mark.slow
def test_images_of_a_batch_have_prompts_of_their_own() -> None:
    tokens = torch.cat([PROMPT, torch.tensor([[[0, 0, 1, 13, 9, 4], [0, 0, 0, 1, 2, 4]]])])
    condition, keys = Condition(tokens=tokens, mask=tokens > 0), [(9, 0), (9, 1)]
    target, sampling = target_in(torch.bfloat16), Sampling(guidance=3.0)
    plain, drafted = (decoder_of(name, target, sampling) for name in ("plain", "gumbel-jacobi"))
    expected, made = (decoder.generate(condition, keys=keys) for decoder in (plain, drafted))
    assert torch.equal(made.tokens, expected.tokens) and not torch.equal(made.tokens[0], made.tokens[1])
    assert made.steps.tolist() != expected.steps.tolist()
    full = build_decoder("plain", target_in(torch.float32), sampling=sampling).generate(condition, keys=keys).tokens
    in_fp32 = decoder_of("plain", target_in(torch.float32), sampling).generate(condition, keys=keys).tokens
    assert torch.equal(in_fp32, full)


def test_slot_order_is_noticed(slot_order: None) -> None:
    decoded.cache_clear()
    try:
        assert other_logits("gumbel-jacobi") > 0
    finally:
        decoded.cache_clear()


def test_the_bits_of_a_prompt_do_not_depend_on_the_others() -> None:
    target = target_in(torch.bfloat16, layers=2)
    prepared, generator = LlamaTarget(target, 16), torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 90, 64, 65, 5, 1, 2, 3, 4, 5, 6])
    tokens = torch.randint(1, 32, (len(lengths), 90), generator=generator)
    mask = torch.arange(90) >= 90 - lengths[:, None]
    shapes, read = list[tuple[int, ...]](), target.read

    def recorded(condition: Condition, *args: Any, **kwargs: Any) -> Any:
        assert condition.tokens is not None
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
        assert alone.fused is not None and found.fused is not None
        assert torch.equal(alone.entries[0], found.entries[row, ..., -length:, :])
        for mine, its in ((alone.features, found.features), (alone.logits, found.logits), (alone.fused, found.fused)):
            assert torch.equal(mine[0], its[row])


def test_inputs_are_read_from_a_table_of_all_tokens() -> None:
    target = target_in(torch.float32)
    prepared, tokens = LlamaTarget(target, 16), torch.tensor([[3, 39], [0, 7]])
    with torch.no_grad():
        assert torch.allclose(prepared.tok_embeddings(tokens), target.tok_embeddings(tokens), atol=1e-6)
        target.tok_embeddings.aligner.fc1.bias.add_(1.0)
        prepared.refresh()
        assert torch.allclose(prepared.tok_embeddings(tokens), target.tok_embeddings(tokens), atol=1e-6)


def test_tokens_that_are_tokens_need_no_table() -> None:
    target = target_in(torch.float32, has_tokens=True)
    assert LlamaTarget(target, 16).tok_embeddings is target.tok_embeddings


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    tokens = torch.randint(1, 32, (1, 2, 155))
    condition = Condition(tokens=tokens, mask=tokens > 0)
    with pytest.raises(ValueError, match="a sequence of 164, the model has 160 positions"):
        decoder_of("plain", target_in(torch.float32), Sampling(guidance=3.0)).generate(condition, keys=KEYS)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("janus", None),
        ("emu3", "newline tokens behind rows of tokens"),
        ("chameleon", "norms of queries and keys"),
        ("liquid", "activation gelu_pytorch_tanh"),
        ("simplear", "biases in layers"),
    ],
)
def test_reasons_name_what_the_kernels_lack(family: str, reason: str | None) -> None:
    words = {"liquid": tiny.liquid_tokenizer, "simplear": tiny.simplear_tokenizer}.get(family)
    size = {"emu3": (24, 32), "simplear": (48, 64)}.get(family)
    target = tiny.assemble(family, getattr(tiny, f"tiny_{family}")(), words and words(), size).target
    expected = reason and f"the GPU kernels have no {reason}, which this model has"
    assert llama.refusal(target) == expected


def test_layers_that_only_resemble_those_of_llama_are_refused() -> None:
    from transformers import MistralConfig, MistralModel
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    target = target_in(torch.float32)
    assert "float64" in (llama.refusal(target_in(torch.float64)) or "")
    target.body.rotary_emb.rope_type = "dynamic"
    assert "rotary positions of the kind dynamic" in (llama.refusal(target) or "")
    sizes: Any = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    for window, reason in ((4, "windows of attention"), (None, "norms of the kind MistralRMSNorm")):
        config = MistralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, sliding_window=window)
        target.body = MistralModel(config)
        assert reason in (llama.refusal(target) or "")
    target = target_in(torch.float32)
    target.body.layers[0] = MistralModel(config).layers[0]
    assert "layers of the kind MistralDecoderLayer" in (llama.refusal(target) or "")
    target.body.norm = GemmaRMSNorm(32)
    assert "norms of the kind GemmaRMSNorm" in (llama.refusal(target) or "")
