"""The engine `graph` on a GPU: tokens in bf16, graphs that are kept, and no wait of the host within a step."""

from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Step
from lantern.decoding.rounds import TorchRounds
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import Weights
from lantern.generation.generator import Decoder, build_decoder
from lantern.methods import METHODS
from lantern.models.llamagen.transformer import Transformer
from lantern.verifiers.relaxations.neighbours import proximity_table
from tests.tiny import tiny_condition, tiny_eagle, tiny_target

pytestmark = pytest.mark.gpu
TOKENS = 144  # more than two blocks of positions
CONDITION = tiny_condition((4, 1, 6))


def target_in(dtype: torch.dtype) -> Transformer:
    return tiny_target(block_size=TOKENS, dim=128, n_head=2, n_layer=4, vocab_size=512).to("cuda", dtype)


def decoder_of(name: str, target: Transformer, guidance: float = 3.0, weights: Weights = "full") -> Decoder:
    add_ons = {"eagle1": tiny_eagle(target).to("cuda", target.output.weight.dtype)}
    engine, sampling = GraphEngine(weights=weights), Sampling(guidance=guidance, top_k=200)
    return build_decoder(METHODS[name], target, sampling=sampling, add_ons=add_ons, engine=engine)


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("guidance", [1.0, 3.0, 7.5])
@pytest.mark.parametrize("name", ["gumbel-jacobi", "eagle1", "sjd-pac"])
def test_bf16_tokens_are_those_of_plain_decoding(name: str, guidance: float, images: int) -> None:
    target = target_in(torch.bfloat16)
    check(decoder_of("plain", target, guidance), decoder_of(name, target, guidance), CONDITION, images)


@pytest.mark.parametrize("name", ["gumbel-jacobi", "sjd-pac"])
def test_bf16_tokens_of_llamas_layers_are_those_of_plain_decoding(name: str) -> None:
    from tests.engines.cuda.kinds import llama_in

    target, tokens = llama_in(torch.bfloat16, n_layer=4, side=11), torch.randint(5, 32, (2, 2, 30))
    condition = Condition(tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool)).to("cuda")
    how: dict[str, Any] = {"sampling": Sampling(guidance=3.0), "engine": GraphEngine()}
    plain, decoder = (build_decoder(METHODS[each], target, **how) for each in ("plain", name))
    check(plain, decoder, condition, images=2)


def check(plain: Decoder, decoder: Decoder, condition: Condition, images: int) -> None:
    assert decoder.promise(images) == "tokens"
    for seed in range(8):
        how: dict[str, Any] = {"keys": [(seed, image) for image in range(images)]}
        made = [one.generate(condition.select(list(range(images))), **how).tokens for one in (plain, decoder)]
        assert torch.equal(*made)


@pytest.mark.parametrize("weights", ["full", "int8"])
@pytest.mark.parametrize("name", ["plain", "eagle1"])
def test_a_graph_gives_the_tokens_of_its_rounds(name: str, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(name, target_in(torch.bfloat16), weights=weights)
    for seed in range(3):
        keys = [(seed, image) for image in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr(GraphEngine, "drive", lambda _, states: TorchRounds(states))
            expected = decoder.generate(CONDITION, keys=keys)
        made = decoder.generate(CONDITION, keys=keys, is_timed=True)
        assert torch.equal(made.tokens, expected.tokens)
        assert ("capture" in made.seconds) == (seed == 0) and "replay" in made.seconds


def test_plain_steps_do_not_wait_for_the_device() -> None:
    decoder, keys = decoder_of("plain", target_in(torch.bfloat16)), [(1, image) for image in range(3)]
    expected = decoder.generate(CONDITION, keys=keys).tokens

    def watch(step: Step) -> None:
        torch.cuda.set_sync_debug_mode("error" if 0 < step.index < TOKENS - 1 else "default")

    try:
        assert torch.equal(decoder.generate(CONDITION, keys=keys, callback=watch).tokens, expected)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_proximity_table_is_that_of_the_cpu() -> None:
    codebook = torch.randn(1000, 8).repeat(2, 1)  # equal tokens are ordered by index
    assert torch.equal(proximity_table(codebook.cuda(), 100).cpu(), proximity_table(codebook, 100))


def test_tokens_are_those_of_torch_in_fp32() -> None:
    target, condition = target_in(torch.float32), CONDITION
    eager = build_decoder("plain", target, sampling=Sampling(guidance=3.0, top_k=200))
    keys = [(2, image) for image in range(3)]
    assert torch.equal(
        decoder_of("plain", target).generate(condition, keys=keys).tokens, eager.generate(condition, keys=keys).tokens
    )
