"""Fused passes: the same numbers as eager ones, and the same bits whatever is scored with a token."""

import copy
import gc
import pickle
import shutil
import weakref
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.prepared import quantized
from lantern.core.sampling import Sampling
from lantern.core.types import Target
from lantern.decoding.cache import StaticCache
from lantern.engines.cpu.engine import CpuEngine, CpuTarget
from lantern.engines.engine import EAGER, Weights
from lantern.generation.decoder import build_decoder
from lantern.generation.images import NotFiniteError
from lantern.generation.layer_watch import watched_layers
from lantern.methods import METHODS
from lantern.models.llamagen.transformer import Transformer
from tests.tiny import tiny_eagle, tiny_target
from tests.tiny_decoder import CONDITION, KEYS, plain_tokens, tiny_decoder

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, with which fused passes are built")

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed: extra eval or dev")
EXACT = [name for name, method in METHODS.items() if method.is_identical]
KNOWN = 11  # tokens that are committed before the passes below
TREE = (-1, 0, 0, 1, 3, 2, 4)  # parents; node 6's path is 0, 1, 3, 4, 6
PATH = (0, 1, 3, 4, 6)
TOKENS = [3, 1, 4, 15, 9, 2, 6]


def target_in(dtype: torch.dtype, seed: int = 0, **changes: Any) -> Transformer:
    shape: dict[str, Any] = {"block_size": 64, "dim": 64, "n_head": 2, "vocab_size": 32}
    return tiny_target(seed, **(shape | changes)).to(dtype)


def twin_of(target: Transformer) -> Target:
    return CpuEngine().prepare(copy.deepcopy(target))


class Passes:
    """A cache in which KNOWN tokens are committed, and passes over nodes that follow them."""

    def __init__(self, target: Target, images: int = 1, stage: int = 24, seed: int = 3) -> None:
        config = target.config
        self.target, self.images = target, images
        size = {"layers": config.n_layer, "heads": config.n_head, "head_dim": config.head_dim}
        rows = {"images": images, "rows": 2, "prefix": 1, "tokens": config.block_size, "stage": stage}
        self.cache = StaticCache(**size, **rows, dtype=torch.float32, device="cpu")
        generator = torch.Generator().manual_seed(seed)
        held = torch.randn(2 * config.n_layer, 2, config.n_head, 1 + KNOWN, config.head_dim, generator=generator)
        self.cache.buffer[:, :, :, : 1 + KNOWN] = held.repeat(1, images, 1, 1, 1)  # every image has the same

    def score(
        self, tokens: list[int], parents: tuple[int, ...], *, first: int | None = None, known: int = KNOWN
    ) -> Any:
        """Scores nodes behind `known` tokens; keys and values go to slots from `first` on, by default the stage."""
        config, cache, count = self.target.config, self.cache, len(tokens)
        first = cache.first_stage_slot if first is None else first
        depths = [0] * count
        mask = torch.full((2 * self.images, count, cache.slots), -torch.inf)
        mask[:, :, 0] = 1.5
        mask[:, :, 1 : 1 + known] = 0.0
        for node, parent in enumerate(parents):
            if parent >= 0:
                depths[node] = depths[parent] + 1
                mask[:, node] = mask[:, parent]
            mask[:, node, first + node] = 0.0
        rows = 2 * self.images
        inputs = self.target.tok_embeddings(torch.tensor([tokens])).expand(rows, -1, -1)
        positions = (torch.tensor(depths) + known + config.cls_token_num).expand(rows, -1)
        slots = (torch.arange(count) + first).expand(rows, -1)
        with torch.no_grad():
            return self.target(inputs, positions, mask, cache=cache, slots=slots, taps=(0, 1))


def by_single_passes(target: Target, tokens: list[int]) -> list[Tensor]:
    """The logits of tokens that are fed one by one, each committed before the next."""
    passes = Passes(target)
    return [
        passes.score([token], (-1,), first=1 + KNOWN + i, known=KNOWN + i).logits[:, 0]
        for i, token in enumerate(tokens)
    ]


def check_bits(target: Target) -> None:
    """The logits of a path are the same bits fed one by one, in a tree, and in a batch."""
    alone = by_single_passes(target, [TOKENS[node] for node in PATH])
    for images in (1, 3):
        tree = Passes(target, images).score(TOKENS, TREE).logits
        for step, node in enumerate(PATH):
            for row in range(2 * images):
                assert torch.equal(tree[row, node], alone[step][row % 2])


@pytest.mark.parametrize("changes", [{}, {"dim": 128}, {"dim": 160}, {"dim": 96, "n_head": 3, "multiple_of": 32}])
def test_fused_pass_equals_eager_pass(changes: dict[str, Any]) -> None:
    target = target_in(torch.float32, **changes)
    eager, fused = Passes(target), Passes(twin_of(target))
    expected, found = eager.score(TOKENS, TREE), fused.score(TOKENS, TREE)
    assert expected.fused is not None and found.fused is not None
    for a, b in ((expected.logits, found.logits), (expected.features, found.features), (expected.fused, found.fused)):
        assert torch.allclose(a, b, atol=2e-5 * float(a.abs().max()))
    assert torch.allclose(eager.cache.buffer, fused.cache.buffer, atol=1e-4)


@pytest.mark.parametrize("dim", [64, 128, 160, 192, 256])  # heads of 32, 64, 80, 96 and 128
def test_fused_bf16_is_as_accurate_as_eager_bf16(dim: int) -> None:
    target = target_in(torch.float32, dim=dim)
    wide = copy.deepcopy(target.bfloat16()).float()
    expected = Passes(wide).score(TOKENS, TREE).logits
    eager, fused = (Passes(t).score(TOKENS, TREE).logits for t in (target, twin_of(target)))
    assert (fused - expected).abs().mean() <= 1.2 * (eager - expected).abs().mean()


@pytest.mark.parametrize("dim", [64, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_the_same_bits_alone_in_a_tree_and_in_a_batch(dtype: torch.dtype, dim: int) -> None:
    check_bits(twin_of(target_in(dtype, dim=dim)))


def test_eager_logits_differ_so_the_comparison_can_fail() -> None:
    target = target_in(torch.float32, dim=256)
    alone, tree = by_single_passes(target, [TOKENS[node] for node in PATH]), Passes(target).score(TOKENS, TREE).logits
    assert any(not torch.equal(tree[:, node], alone[step]) for step, node in enumerate(PATH))


@pytest.mark.parametrize("nodes", [1, 2, 5, 12, 13, 17, 23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_nodes_and_threads(nodes: int, dtype: torch.dtype) -> None:
    target = twin_of(target_in(dtype))
    tokens = [(7 * i + 3) % 32 for i in range(nodes)]
    chain = tuple(range(-1, nodes - 1))
    alone, threads = by_single_passes(target, tokens), torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for _ in range(6):  # the first use one thread, to measure its time
                found = Passes(target).score(tokens, chain).logits
                assert all(torch.equal(found[:, i], alone[i]) for i in range(nodes))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", ["full", pytest.param("int8", marks=needs_torchao)])
def test_exact_methods_give_the_tokens_of_plain_decoding(weights: Weights, dtype: torch.dtype, name: str) -> None:
    how: dict[str, Any] = {"sampling": Sampling(guidance=7.5), "engine": CpuEngine(weights=weights)}
    target = target_in(dtype)
    plain = tiny_decoder("plain", target, **how)
    assert isinstance(plain.target, CpuTarget)
    assert plain.target.module is (target if weights == "full" else quantized(target, "int8"))
    expected = plain.generate(CONDITION, keys=KEYS).tokens
    parts = tiny_decoder(name, target, **how)
    assert torch.equal(parts.generate(CONDITION, keys=KEYS).tokens, expected)
    assert torch.equal(parts.generate(CONDITION, keys=KEYS[:1] * 3).tokens[:1], expected[:1])


def test_fused_passes_are_reproducible_over_any_number_of_tokens() -> None:
    target = target_in(torch.bfloat16)
    engine = CpuEngine()
    plain = tiny_decoder("plain", target, engine=engine)
    wide = tiny_decoder("gumbel-jacobi", target, engine=engine, window=40)
    assert wide.drafter is not None and wide.drafter.max_nodes == 40
    assert torch.equal(plain.generate(CONDITION, keys=KEYS).tokens, wide.generate(CONDITION, keys=KEYS).tokens)


def test_the_engine_does_not_change_the_target_or_the_tokens() -> None:
    target, sampling = target_in(torch.float32), Sampling(guidance=3.0)
    expected = plain_tokens(target, sampling)
    before = dict(vars(target))
    made = build_decoder("plain", target, sampling=sampling, engine=CpuEngine())
    assert made.target is not target
    assert torch.equal(made.generate(CONDITION, keys=KEYS).tokens, expected)
    assert vars(target) == before and build_decoder("plain", target, sampling=sampling).target is target


def test_preparing_a_prepared_target_is_preparing_the_original() -> None:
    target = target_in(torch.float32)
    once = CpuEngine().prepare(target)
    again = CpuEngine().prepare(once)
    assert isinstance(once, CpuTarget) and isinstance(again, CpuTarget)
    assert again.module is target and again.program is once.program
    assert EAGER.prepare(once) is target


@pytest.mark.parametrize("name", ["plain", "gumbel-jacobi", "eagle1"])
def test_changed_weights_are_packed_again(name: str) -> None:
    target, other = target_in(torch.float32), target_in(torch.float32, seed=1)
    how: dict[str, Any] = {"sampling": Sampling(guidance=3.0), "engine": CpuEngine()}
    module = tiny_eagle(target)
    parts = build_decoder(name, target, drafter_module=module, **how)
    parts.generate(CONDITION, keys=KEYS)
    expected = build_decoder("plain", other, **how).generate(CONDITION, keys=KEYS).tokens
    target.load_state_dict(other.state_dict())
    assert torch.equal(parts.generate(CONDITION, keys=KEYS).tokens, expected)
    # as a pipeline is moved to another dtype between two calls
    expected = build_decoder("plain", copy.deepcopy(other).bfloat16(), **how).generate(CONDITION, keys=KEYS).tokens
    target.bfloat16()
    module.bfloat16()
    made = build_decoder(name, target, drafter_module=module, **how).generate(CONDITION, keys=KEYS).tokens
    assert torch.equal(made, expected)


def test_copies_of_a_target_share_nothing_with_its_prepared_form() -> None:
    target = target_in(torch.float32)
    build_decoder("plain", target, sampling=Sampling(), engine=CpuEngine()).generate(CONDITION, keys=KEYS)
    for twin in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert torch.equal(twin.output.weight, target.output.weight)
        made = CpuEngine().prepare(twin)
        assert isinstance(made, CpuTarget) and made.module is twin


def test_target_is_freed_with_its_packed_weights() -> None:
    target = target_in(torch.float32)
    alive = weakref.ref(target), weakref.ref(CpuEngine().prepare(target).program)  # type: ignore[attr-defined]
    del target
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_filters_beyond_32_bits_change_nothing() -> None:
    target, engine = target_in(torch.float32), CpuEngine()
    most = 2**32 + 1  # more than C++ holds in these numbers
    for wide, usual in ((Sampling(top_k=most), Sampling()), (Sampling(guidance_interval=most), Sampling())):
        made, expected = (
            build_decoder("plain", target, sampling=distribution, engine=engine).generate(CONDITION, keys=KEYS).tokens
            for distribution in (wide, usual)
        )
        assert torch.equal(made, expected)


def test_unused_add_ons_are_not_read() -> None:
    class Unread(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise AssertionError(f"part {name} is read")

    parts = Unread(dict.fromkeys(("eagle3", "sam", "c2t")))
    target = target_in(torch.float32)
    build_decoder("gumbel-jacobi", target, sampling=Sampling(), add_ons=parts, engine=CpuEngine())


def test_nan_logits_are_detected() -> None:
    target = target_in(torch.float32)
    target.layers[1].feed_forward.w2.weight.data[3, 5] = torch.nan
    made = build_decoder("plain", target, sampling=Sampling(), engine=CpuEngine()).generate(CONDITION, keys=KEYS)
    assert made.is_finite is not None and not made.is_finite.any()


def test_debug_mode_names_the_layer_of_a_nan() -> None:
    target = target_in(torch.float32)
    target.layers[1].feed_forward.w2.weight.data[3, 5] = torch.nan
    with pytest.raises(NotFiniteError, match="layers.1.feed_forward.w2 gave NaN"), watched_layers(target):
        build_decoder("plain", target, sampling=Sampling()).generate(CONDITION, keys=KEYS)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda: target_in(torch.float16), "the cpu engine computes in fp32 or bf16"),
        (lambda: target_in(torch.float32, vocab_size=24), "vocab_size is 24, the cpu engine needs a multiple of 32"),
        (lambda: target_in(torch.float32, dim=72, n_head=3), "dim is 72"),
        (lambda: target_in(torch.float32, dim=96, n_head=4), "width of a head is 24"),
    ],
)
def test_unsupported_targets_are_refused(target: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_decoder("plain", target(), sampling=Sampling(), engine=CpuEngine())  # type: ignore[operator]


@needs_torchao
def test_fused_passes_and_four_bit_weights_are_refused_together() -> None:
    with pytest.raises(ValueError, match="reads weights in full or in int8, int4 was given"):
        target = target_in(torch.float32, multiple_of=32)
        build_decoder("plain", target, sampling=Sampling(), engine=CpuEngine(weights="int4"))
