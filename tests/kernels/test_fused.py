"""Fused passes: the same numbers as eager ones, and the same bits whatever is scored with a code."""

import copy
import pickle
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.catalog import METHODS, Engine, build, layer_by_layer
from lantern.decoding.cache import StaticCache
from lantern.kernels.fused import fuse_target
from lantern.models.llamagen.transformer import Scores, Transformer
from lantern.sampling import Sampling
from lantern.soundness import NotFiniteError, watched_layers
from tests.tiny import tiny_condition, tiny_eagle, tiny_target
from tests.tiny_parts import tiny_parts

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, with which fused passes are built")

CONDITION = tiny_condition((4, 1, 6))
KEYS = [(9, 0), (9, 1), (4, 7)]
EXACT = [name for name, method in METHODS.items() if method.exact and method.verifier == "gumbel" and method.drafter]
KNOWN = 11  # codes that are committed before the passes below
TREE = (-1, 0, 0, 1, 3, 2, 4)  # parents; node 6's path is 0, 1, 3, 4, 6
PATH = (0, 1, 3, 4, 6)


def target_in(dtype: torch.dtype, seed: int = 0, **changes: Any) -> Transformer:
    shape: dict[str, Any] = {"block_size": 64, "dim": 64, "n_head": 2, "vocab_size": 32}
    return tiny_target(seed, **(shape | changes)).to(dtype)


def twin_of(target: Transformer) -> Transformer:
    twin = copy.deepcopy(target)
    fuse_target(twin)
    return twin


class Passes:
    """A cache in which KNOWN codes are committed, and passes over nodes that follow them."""

    def __init__(self, target: Transformer, images: int = 1, stage: int = 24, seed: int = 3) -> None:
        config = target.config
        self.target, self.images = target, images
        size = {"layers": config.n_layer, "heads": config.n_head, "head_dim": config.head_dim}
        rows = {"images": images, "rows": 2, "prefix": 1, "codes": config.block_size, "stage": stage}
        self.cache = StaticCache(**size, **rows, dtype=torch.float32, device="cpu")
        generator = torch.Generator().manual_seed(seed)
        held = torch.randn(2 * config.n_layer, 2, config.n_head, 1 + KNOWN, config.head_dim, generator=generator)
        self.cache.buffer[:, :, :, : 1 + KNOWN] = held.repeat(1, images, 1, 1, 1)  # every image has the same

    def score(
        self, codes: list[int], parents: tuple[int, ...], *, first: int | None = None, known: int = KNOWN
    ) -> Scores:
        """Scores nodes behind `known` codes; keys and values go to slots from `first` on, by default the stage."""
        config, cache, count = self.target.config, self.cache, len(codes)
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
        inputs = self.target.tok_embeddings(torch.tensor([codes])).expand(rows, -1, -1)
        positions = (torch.tensor(depths) + known + config.cls_token_num).expand(rows, -1)
        slots = (torch.arange(count) + first).expand(rows, -1)
        with torch.no_grad():
            return self.target(inputs, positions, mask, cache=cache, slots=slots, taps=(0, 1))


def by_single_passes(target: Transformer, codes: list[int]) -> list[Tensor]:
    """The logits of codes that are fed one by one, each committed before the next."""
    passes = Passes(target)
    return [
        passes.score([code], (-1,), first=1 + KNOWN + i, known=KNOWN + i).logits[:, 0] for i, code in enumerate(codes)
    ]


def check_bits(target: Transformer) -> None:
    """The logits of a path are the same bits fed one by one, in a tree, and in a batch."""
    codes = [3, 1, 4, 15, 9, 2, 6]
    alone = by_single_passes(target, [codes[node] for node in PATH])
    for images in (1, 3):
        tree = Passes(target, images).score(codes, TREE).logits
        for step, node in enumerate(PATH):
            for row in range(2 * images):
                assert torch.equal(tree[row, node], alone[step][row % 2])


@pytest.mark.parametrize("changes", [{}, {"dim": 128}, {"dim": 160}, {"dim": 96, "n_head": 3, "multiple_of": 32}])
def test_a_fused_pass_scores_as_an_eager_one_does(changes: dict[str, Any]) -> None:
    target = target_in(torch.float32, **changes)
    codes = [3, 1, 4, 15, 9, 2, 6]
    eager, fused = Passes(target), Passes(twin_of(target))
    expected, found = eager.score(codes, TREE), fused.score(codes, TREE)
    assert expected.fused is not None and found.fused is not None
    for a, b in ((expected.logits, found.logits), (expected.features, found.features), (expected.fused, found.fused)):
        assert torch.allclose(a, b, atol=2e-5 * float(a.abs().max()))
    assert torch.allclose(eager.cache.buffer, fused.cache.buffer, atol=1e-4)


@pytest.mark.parametrize("dim", [64, 128, 160, 192, 256])  # heads of 32, 64, 80, 96 and 128
def test_fused_bf16_is_as_near_to_fp32_as_eager_bf16(dim: int) -> None:
    target = target_in(torch.float32, dim=dim)
    codes = [3, 1, 4, 15, 9, 2, 6]
    wide = copy.deepcopy(target.bfloat16()).float()
    expected = Passes(wide).score(codes, TREE).logits
    eager, fused = (Passes(t).score(codes, TREE).logits for t in (target, twin_of(target)))
    assert (fused - expected).abs().mean() <= 1.2 * (eager - expected).abs().mean()


@pytest.mark.parametrize("dim", [64, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_the_same_bits_alone_in_a_tree_and_in_a_batch(dtype: torch.dtype, dim: int) -> None:
    check_bits(twin_of(target_in(dtype, dim=dim)))


def test_eager_logits_are_not_so_that_the_comparison_can_fail() -> None:
    target = target_in(torch.float32, dim=256)
    codes = [3, 1, 4, 15, 9, 2, 6]
    alone, tree = by_single_passes(target, [codes[node] for node in PATH]), Passes(target).score(codes, TREE).logits
    assert any(not torch.equal(tree[:, node], alone[step]) for step, node in enumerate(PATH))


@pytest.mark.parametrize("nodes", [1, 2, 5, 12, 13, 17, 23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_number_of_nodes_and_threads_changes_a_bit(nodes: int, dtype: torch.dtype) -> None:
    target = twin_of(target_in(dtype))
    codes = [(7 * i + 3) % 32 for i in range(nodes)]
    chain = tuple(range(-1, nodes - 1))
    alone, threads = by_single_passes(target, codes), torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for _ in range(6):  # of which the first go by one thread, to see what it takes
                found = Passes(target).score(codes, chain).logits
                assert all(torch.equal(found[:, i], alone[i]) for i in range(nodes))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_methods_give_the_codes_of_plain_decoding(name: str, dtype: torch.dtype) -> None:
    engine, sampling = Engine(fused=True), Sampling(guidance=7.5)
    target = target_in(dtype)
    module, trained = tiny_eagle(target).to(dtype), tiny_parts(target)
    how: dict[str, Any] = {"sampling": sampling, "drafter_module": module, "trained": trained, "engine": engine}
    expected = build("plain", target, **how).generate(CONDITION, keys=KEYS).codes
    parts = build(name, target, **how)
    assert torch.equal(parts.generate(CONDITION, keys=KEYS).codes, expected)
    assert torch.equal(parts.generate(CONDITION, keys=KEYS[:1] * 3).codes[:1], expected[:1])


def test_fused_passes_are_reproducible_over_any_number_of_codes() -> None:
    target = target_in(torch.bfloat16)
    how: dict[str, Any] = {"sampling": Sampling(guidance=3.0)}
    engine = Engine(fused=True, reproducible=True)
    plain = build("plain", target, **how, engine=engine)
    wide = build(METHODS["gumbel-jacobi"].with_options(window=40), target, **how, engine=engine)
    assert wide.drafter is not None and wide.drafter.max_nodes == 40
    assert torch.equal(plain.generate(CONDITION, keys=KEYS).codes, wide.generate(CONDITION, keys=KEYS).codes)


def test_a_fused_target_keeps_what_other_engines_promise() -> None:
    target, sampling = target_in(torch.bfloat16), Sampling(guidance=3.0)
    slow = Engine(reproducible=True)
    expected = (
        build("plain", copy.deepcopy(target), sampling=sampling, engine=slow).generate(CONDITION, keys=KEYS).codes
    )
    fuse_target(target)
    assert torch.equal(
        build("plain", target, sampling=sampling, engine=slow).generate(CONDITION, keys=KEYS).codes, expected
    )


@pytest.mark.filterwarnings("default")  # of what the compiler itself imports
def test_a_target_can_be_compiled_and_fused_in_turn() -> None:
    target, sampling = target_in(torch.float32), Sampling(guidance=3.0)
    expected = build("plain", target, sampling=sampling).generate(CONDITION, keys=KEYS).codes
    for engine, is_fused in ((Engine(fused=True), True), (Engine(compile=True), False), (Engine(fused=True), True)):
        made = build("plain", target, sampling=sampling, engine=engine).generate(CONDITION, keys=KEYS)
        assert torch.equal(made.codes, expected) and getattr(target, "is_fused", False) == is_fused


def test_an_eager_engine_makes_a_fused_target_eager_again() -> None:
    target = target_in(torch.float32)
    build("plain", target, sampling=Sampling(), engine=Engine(fused=True))
    assert "forward" in vars(target)
    build("plain", target, sampling=Sampling(), engine=Engine())
    assert not {"forward", "draft_head", "draws", "fused_pass", "is_fused"} & set(vars(target))


@pytest.mark.parametrize("name", ["plain", "gumbel-jacobi", "eagle1"])
def test_weights_that_change_after_fusing_are_those_that_decode(name: str) -> None:
    target, other = target_in(torch.float32), target_in(torch.float32, seed=1)
    how: dict[str, Any] = {"sampling": Sampling(guidance=3.0), "engine": Engine(fused=True)}
    module = tiny_eagle(target)
    parts = build(name, target, drafter_module=module, **how)
    parts.generate(CONDITION, keys=KEYS)
    expected = build("plain", other, **how).generate(CONDITION, keys=KEYS).codes
    target.load_state_dict(other.state_dict())
    assert torch.equal(parts.generate(CONDITION, keys=KEYS).codes, expected)
    # as a pipeline is moved to another dtype between two calls
    expected = build("plain", copy.deepcopy(other).bfloat16(), **how).generate(CONDITION, keys=KEYS).codes
    target.bfloat16()
    module.bfloat16()
    made = build(name, target, drafter_module=module, **how).generate(CONDITION, keys=KEYS).codes
    assert torch.equal(made, expected)


@pytest.mark.parametrize("engine", [Engine(fused=True), Engine(compile=True)], ids=["fused", "compiled"])
@pytest.mark.filterwarnings("default")  # of what the compiler itself imports
def test_a_copy_of_a_target_is_run_layer_by_layer(engine: Engine) -> None:
    target = target_in(torch.float32)
    build("plain", target, sampling=Sampling(), engine=engine)
    assert "forward" in vars(target)
    for twin in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert "forward" not in vars(twin) and not getattr(twin, "is_fused", False)
        assert torch.equal(twin.output.weight, target.output.weight)


def test_filters_larger_than_what_they_filter_change_nothing() -> None:
    target, engine = target_in(torch.float32), Engine(fused=True)
    most = 2**32 + 1  # more than C++ holds in these numbers
    for wide, usual in ((Sampling(top_k=most), Sampling()), (Sampling(guidance_interval=most), Sampling())):
        made, expected = (
            build("plain", target, sampling=law, engine=engine).generate(CONDITION, keys=KEYS).codes
            for law in (wide, usual)
        )
        assert torch.equal(made, expected)


def test_parts_that_a_method_does_not_read_are_left_alone() -> None:
    class Unread(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise AssertionError(f"part {name} is read")

    parts = Unread(dict.fromkeys(("eagle3", "sam", "c2t")))
    target = target_in(torch.float32)
    build("gumbel-jacobi", target, sampling=Sampling(), trained=parts, engine=Engine(fused=True))


def test_laws_of_nan_are_noticed() -> None:
    target = target_in(torch.float32)
    target.layers[1].feed_forward.w2.weight.data[3, 5] = torch.nan
    made = build("plain", target, sampling=Sampling(), engine=Engine(fused=True)).generate(CONDITION, keys=KEYS)
    assert made.is_finite is not None and not made.is_finite.any()


def test_debug_mode_looks_at_the_layers_of_a_fused_target() -> None:
    target, sampling = target_in(torch.float32), Sampling()
    target.layers[1].feed_forward.w2.weight.data[3, 5] = torch.nan
    fuse_target(target)
    engine = layer_by_layer(Engine(fused=True))
    with pytest.raises(NotFiniteError, match="layer 1 feed-forward gave NaN"), watched_layers(target):
        build("plain", target, sampling=sampling, engine=engine).generate(CONDITION, keys=KEYS)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda: target_in(torch.float16), "fused passes compute in fp32 or bf16"),
        (lambda: target_in(torch.float32, vocab_size=24), "vocab_size is 24, fused passes want a multiple of 32"),
        (lambda: target_in(torch.float32, dim=72, n_head=3), "dim is 72"),
        (lambda: target_in(torch.float32, dim=96, n_head=4), "width of a head is 24"),
    ],
)
def test_what_fused_passes_are_not_written_for_is_refused(target: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("plain", target(), sampling=Sampling(), engine=Engine(fused=True))  # type: ignore[operator]


def test_fused_passes_and_four_bit_weights_are_refused_together() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: extra eval")
    with pytest.raises(ValueError, match="as they are or in 8 bits, these are quantized otherwise: leave fused out"):
        target = target_in(torch.float32, multiple_of=32)
        build("plain", target, sampling=Sampling(), engine=Engine(fused=True, int4=True))


def test_a_target_that_was_fused_is_quantised_as_one_that_was_not() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: extra eval")
    target, engine = target_in(torch.float32, multiple_of=32), Engine(int4=True)
    expected = build("plain", copy.deepcopy(target), sampling=Sampling(), engine=engine)
    fuse_target(target)
    made = build("plain", target, sampling=Sampling(), engine=engine)
    assert "forward" not in vars(made.target)
    assert torch.equal(made.generate(CONDITION, keys=KEYS).codes, expected.generate(CONDITION, keys=KEYS).codes)
