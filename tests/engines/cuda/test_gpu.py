"""The engine `graph` on a GPU: tokens in bf16, graphs that are kept, and no wait of the host within a step."""

from itertools import product
from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Step
from lantern.decoding.rounds import TorchRounds
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import EAGER, Engine, Weights
from lantern.generation.generator import Decoder, build_decoder
from lantern.methods import METHODS
from lantern.models.llamagen.transformer import Transformer
from lantern.verifiers.relaxations.neighbours import proximity_table
from tests.tiny import tiny_condition, tiny_eagle, tiny_target

pytest.importorskip("triton", reason="Triton is not installed")
from tests.engines.cuda import kinds

pytestmark = pytest.mark.gpu
TOKENS = 144  # more than two blocks of positions
CONDITION, KEYS = tiny_condition((4, 1, 6)), [(2, image) for image in range(3)]


def target_in(dtype: torch.dtype = torch.bfloat16) -> Transformer:
    return tiny_target(block_size=TOKENS, dim=128, n_head=2, n_layer=4, vocab_size=512).to("cuda", dtype)


def decoder_of(name: str, target: Any, guidance: float = 3.0, engine: Engine | None = None) -> Decoder:
    is_own = isinstance(target, Transformer)
    add_ons = {"eagle1": tiny_eagle(target).to("cuda", target.output.weight.dtype)} if is_own else {}
    how: dict[str, Any] = {"sampling": Sampling(guidance=guidance, top_k=200 if is_own else 0), "add_ons": add_ons}
    return build_decoder(METHODS[name], target, engine=engine or GraphEngine(), **how)


@pytest.mark.parametrize(
    ("is_own", "name", "guidance", "images"),
    [
        *product([True], ("gumbel-jacobi", "eagle1", "sjd-pac"), (1.0, 3.0, 7.5), (1, 3)),
        *product([False], ("gumbel-jacobi", "sjd-pac"), [3.0], [2]),
    ],
)
def test_bf16_tokens_are_those_of_plain_decoding(is_own: bool, name: str, guidance: float, images: int) -> None:
    """Of LlamaGen's layers, and of Llama's."""
    target, condition = target_in(), CONDITION
    if not is_own:
        tokens = torch.randint(5, 32, (2, 2, 30))
        condition = Condition(tokens=tokens, mask=torch.ones_like(tokens, dtype=torch.bool)).to("cuda")
        target = kinds.llama_in(torch.bfloat16, n_layer=4, side=11)
    plain, decoder = (decoder_of(each, target, guidance) for each in ("plain", name))
    assert decoder.promise(images) == "tokens"
    for seed in range(8):
        keys, some = [(seed, image) for image in range(images)], condition.select(range(images))
        assert torch.equal(*(one.generate(some, keys=keys).tokens for one in (plain, decoder)))


@pytest.mark.parametrize("weights", ["full", "int8"])
@pytest.mark.parametrize("name", ["plain", "eagle1", "sjd"])
def test_a_graph_gives_the_tokens_of_its_rounds(name: str, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(name, target_in(), engine=GraphEngine(weights=weights))
    for seed in range(3):
        keys = [(seed, image) for image in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr(GraphEngine, "drive", lambda _, states: TorchRounds(states))
            expected = decoder.generate(CONDITION, keys=keys)
        made = decoder.generate(CONDITION, keys=keys, is_timed=True)
        assert torch.equal(made.tokens, expected.tokens)
        assert ("capture" in made.seconds) == (seed == 0) and "replay" in made.seconds


@pytest.mark.parametrize("name", ["plain", "gumbel-jacobi", "eagle1"])
def test_images_that_share_a_wave_have_their_own_tokens_in_fp32(name: str) -> None:
    target = target_in(torch.float32)
    scales = [2.5 + i for i in range(len(KEYS))]
    made = kinds.joined([decoder_of(name, target, scale) for scale in scales], CONDITION, KEYS)
    for i, tokens in enumerate(made):
        alone = decoder_of(name, target, scales[i], engine=EAGER).generate(CONDITION.select([i]), keys=KEYS[i : i + 1])
        assert torch.equal(tokens, alone.tokens)


def test_plain_steps_do_not_wait_for_the_device() -> None:
    decoder = decoder_of("plain", target_in())
    expected = decoder.generate(CONDITION, keys=KEYS).tokens

    def watch(step: Step) -> None:
        torch.cuda.set_sync_debug_mode("error" if 0 < step.index < TOKENS - 1 else "default")

    try:
        assert torch.equal(decoder.generate(CONDITION, keys=KEYS, callback=watch).tokens, expected)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_proximity_table_is_that_of_the_cpu() -> None:
    codebook = torch.randn(1000, 8).repeat(2, 1)  # equal tokens are ordered by index
    assert torch.equal(proximity_table(codebook.cuda(), 100).cpu(), proximity_table(codebook, 100))
