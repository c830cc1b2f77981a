"""The engine `graph` end to end: its kernels on a GPU if there is one, else in Triton's interpreter, without graphs."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.decoding.cache import StaticCache
from lantern.engines.engine import EagerEngine, Weights
from lantern.generation.decoder import Decoder
from lantern.models.llamagen.transformer import Transformer
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import tiny_decoder

pytest.importorskip("triton", reason="Triton is not installed")
from lantern.engines.cuda import kernels
from lantern.engines.cuda import target as module
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.cuda.rows import constant_rows, rows_of
from lantern.engines.cuda.target import KernelTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEYS, CONDITION = [(9, 0)], tiny_condition((4,))
TOKENS = 9
# small trees and windows, which the interpreter runs in a second
SMALL: dict[str, dict[str, Any]] = {
    "gumbel-jacobi": {"window": 3},
    "eagle1": {"tree": "chain_2"},
    "sjd-pac": {"window": 3, "width": 2, "levels": 1},
}


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of four positions, so that trees cross their borders; a GPU multiplies tiles of 16 at least."""
    if DEVICE == "cpu":
        prepared = KernelTarget.__init__
        monkeypatch.setattr(KernelTarget, "__init__", lambda self, target, rows: prepared(self, target, rows, 4))


def target_in(dtype: torch.dtype, **changes: int) -> Transformer:
    return tiny_target(**({"block_size": TOKENS, "dim": 16, "n_head": 1, "n_layer": 1} | changes)).to(DEVICE, dtype)


def decoder_of(name: str, target: Transformer, sampling: Sampling) -> Decoder:
    return tiny_decoder(name, target, sampling, engine=GraphEngine(rows=16, products="cublas"), **SMALL.get(name, {}))


class Scored:
    """The logits from which each token was sampled, as a callback collects them."""

    def __init__(self) -> None:
        self.logits: dict[int, Tensor] = {}

    def __call__(self, step: Step) -> None:
        if step.scores is None or step.index == 0:
            return
        nodes = [0] if step.verdict is None else [0, *step.verdict.path[0].tolist()]
        for ahead in range(int(step.counts[0])):
            self.logits[int(step.start[0]) + ahead] = step.scores.logits[0, :, nodes[ahead]].clone()


def decoded(name: str, dtype: torch.dtype, guidance: float) -> tuple[Tensor, dict[int, Tensor]]:
    scored = Scored()
    decoder = decoder_of(name, target_in(dtype), Sampling(guidance=guidance))
    return decoder.generate(CONDITION, keys=KEYS, callback=scored).tokens, scored.logits


plainly = cache(decoded)


def compare(name: str, dtype: torch.dtype, guidance: float = 1.0) -> tuple[bool, int]:
    """Whether a method has plain decoding's tokens, and how many tokens were sampled from other logits."""
    expected, logits = plainly("plain", dtype, guidance)
    made, others = decoded(name, dtype, guidance)
    assert logits.keys() == others.keys() == set(range(1, TOKENS))
    return torch.equal(made, expected), sum(not torch.equal(logits[token], others[token]) for token in logits)


@pytest.mark.parametrize("weights", ["full", "int8"])
def test_tokens_are_those_of_the_eager_engine_in_fp32(weights: Weights) -> None:
    target, sampling = target_in(torch.float32, n_layer=2, n_head=2, block_size=4), Sampling(guidance=3.0, top_k=20)
    engines = EagerEngine(weights=weights), GraphEngine(weights=weights)
    eager, made = (tiny_decoder("plain", target, sampling, engine=engine) for engine in engines)
    assert isinstance(made.target, KernelTarget)
    assert torch.equal(made.generate(CONDITION, keys=KEYS).tokens, eager.generate(CONDITION, keys=KEYS).tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_in_a_window_are_bit_for_bit_those_of_plain_decoding(dtype: torch.dtype) -> None:
    assert compare("gumbel-jacobi", dtype) == (True, 0)


def test_a_pass_gives_logits_features_and_tapped_layers() -> None:
    target = target_in(torch.float32, n_layer=2)
    sizes: dict[str, Any] = {"layers": 2, "images": 1, "rows": 1, "heads": 1, "head_dim": 16, "prefix": 1, "stage": 3}
    sizes["tokens"] = TOKENS
    mask = torch.full((1, 3, 1 + TOKENS + 3), -torch.inf, device=DEVICE)
    mask[..., :4] = mask[..., 10] = 0.0  # the prompt, three committed tokens, and node 0, which the others follow
    mask[0, 1, 11] = mask[0, 2, 12] = 0.0
    inputs = target.tok_embeddings(torch.tensor([[5, 7, 9]], device=DEVICE))
    positions = torch.tensor([[3, 4, 4]], device=DEVICE) + target.config.cls_token_num
    made = []
    for each in (target, KernelTarget(target, 16)):
        cache = StaticCache(**sizes, dtype=torch.float32, device=DEVICE)
        cache.buffer.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
        cache.buffer[0::2, :, :, 0] = 0.0
        slots = torch.arange(10, 13, device=DEVICE)[None]
        with torch.no_grad():
            made.append(each(inputs, positions, mask, cache=cache, slots=slots, taps=(0, 1)))
    for name in ("logits", "features", "fused"):
        assert torch.allclose(getattr(made[0], name), getattr(made[1], name), atol=1e-4, rtol=1e-4), name


@pytest.mark.slow
def test_images_of_a_batch_advance_by_their_own_numbers_of_tokens() -> None:
    target, condition, keys = target_in(torch.bfloat16), tiny_condition((4, 2)), [(9, 0), (9, 1)]
    grids = [
        decoder_of(name, target, Sampling(guidance=3.0)).generate(condition, keys=keys).tokens
        for name in ("plain", "gumbel-jacobi")
    ]
    assert torch.equal(*grids) and not torch.equal(grids[0][0], grids[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle1", "sjd-pac"])
def test_logits_in_a_tree_are_bit_for_bit_those_of_plain_decoding(name: str) -> None:
    assert compare(name, torch.bfloat16) == (True, 0)


@pytest.fixture
def slot_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of drafted rows in another order than that of positions."""
    update = kernels.Plan.update

    def shifted(self: kernels.Plan, *args: object, **named: object) -> None:
        update(self, *args, **named)  # type: ignore[arg-type]
        if self.live > 1:
            self.table.copy_(self.table.flip(-1))

    monkeypatch.setattr(kernels.Plan, "update", shifted)


def test_slot_order_is_noticed(slot_order: None) -> None:
    assert compare("gumbel-jacobi", torch.bfloat16)[1] > 0


def test_rows_that_vary_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "rows_of", lambda lines, live, least: live)
    plainly.cache_clear()  # plain decoding must run with one row too
    try:
        assert compare("gumbel-jacobi", torch.float32)[1] > 0
    finally:
        plainly.cache_clear()


def test_rows_are_constant_until_a_batch_is_large() -> None:
    assert [rows_of(2, live) for live in (1, 16, 29, 33, 100)] == [32, 32, 32, 64, 128]
    assert [constant_rows(2 * images) for images in (1, 5, 6, 8, 16, 64)] == [32, 32, 16, 16, 8, 2]
    assert GraphEngine().free_nodes(lines=16) == 16 and GraphEngine(rows=16).free_nodes(lines=2) == 16
    assert rows_of(128, 1) == 2 and rows_of(128, 9) == 16 and rows_of(2, 9, least=16) == 16
