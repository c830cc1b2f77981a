"""Llama's layers by kernels: prompts, tables of tokens, and what is refused. `test_target` has their passes."""

from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.engines.engine import EAGER
from tests import tiny_transformers as tiny

pytest.importorskip("triton", reason="Triton is not installed")
from lantern.engines.cuda import llama
from lantern.engines.cuda.llama import LlamaTarget
from tests.engines.cuda.kinds import decoder_of, generated, llama_in

pytestmark = pytest.mark.usefixtures("short_blocks")


@pytest.mark.parametrize("name", ["zipar", "pjd"])
def test_passes_that_do_not_see_all_earlier_tokens_run_through_torch(name: str) -> None:
    target, sampling = llama_in(torch.float32), Sampling(guidance=1.0)
    eager, graph = (generated("llama", decoder_of("llama", name, target, sampling, one)) for one in (EAGER, None))
    assert torch.equal(graph.tokens, eager.tokens)


def test_the_bits_of_a_prompt_do_not_depend_on_the_others() -> None:
    target = llama_in(torch.bfloat16, n_layer=2)
    prepared, generator = LlamaTarget(target, 16), torch.Generator().manual_seed(0)
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
        for mine, its in ((alone.features, found.features), (alone.logits, found.logits), (alone.fused, found.fused)):
            assert torch.equal(mine[0], its[row])


def test_inputs_are_read_from_a_table_of_all_tokens_unless_they_are_words() -> None:
    target = llama_in(torch.float32)
    prepared, tokens = LlamaTarget(target, 16), torch.tensor([[3, 39], [0, 7]])
    with torch.no_grad():
        assert torch.allclose(prepared.tok_embeddings(tokens), target.tok_embeddings(tokens), atol=1e-6)
        target.tok_embeddings.aligner.fc1.bias.add_(1.0)
        prepared.refresh()
        assert torch.allclose(prepared.tok_embeddings(tokens), target.tok_embeddings(tokens), atol=1e-6)
    target = llama_in(torch.float32, has_tokens=True)
    assert LlamaTarget(target, 16).tok_embeddings is target.tok_embeddings


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    tokens = torch.randint(1, 32, (1, 2, 155))
    condition = Condition(tokens=tokens, mask=tokens > 0)
    with pytest.raises(ValueError, match="a sequence of 164, the model has 160 positions"):
        decoder_of("llama", "plain", llama_in(torch.float32), Sampling()).generate(condition, keys=[(9, 0)])


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
    size = {"emu3": (24, 32), "simplear": (48, 64)}.get(family)
    target = tiny.assemble(family, words=tiny.processor(family), size=size).target
    expected = reason and f"the GPU kernels have no {reason}, which this model has"
    assert llama.refusal(target) == expected


def test_layers_that_only_resemble_those_of_llama_are_refused() -> None:
    from transformers import MistralConfig, MistralModel
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    target = llama_in(torch.float32)
    assert "float64" in (llama.refusal(llama_in(torch.float64)) or "")
    target.body.rotary_emb.rope_type = "dynamic"
    assert "rotary positions of the kind dynamic" in (llama.refusal(target) or "")
    sizes: Any = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    for window, reason in ((4, "windows of attention"), (None, "norms of the kind MistralRMSNorm")):
        config = MistralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, sliding_window=window)
        target.body = MistralModel(config)
        assert reason in (llama.refusal(target) or "")
    target = llama_in(torch.float32)
    target.body.layers[0] = MistralModel(config).layers[0]
    assert "layers of the kind MistralDecoderLayer" in (llama.refusal(target) or "")
    target.body.norm = GemmaRMSNorm(32)
    assert "norms of the kind GemmaRMSNorm" in (llama.refusal(target) or "")
