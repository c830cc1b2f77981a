"""Fused passes: the same numbers as eager ones, and the same bits whatever is scored with a token.

Equal tokens alone would hide another rounding, which changes a token only where two are nearly equal.
"""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lantern.core.config import Weights
from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Step, Target
from lantern.core.weights import quantized
from lantern.decoding.cache import PromptCache
from lantern.engines.cpu.engine import CpuEngine
from lantern.engines.cpu.target import CpuTarget
from lantern.engines.engine import EAGER, AutoEngine, EagerEngine
from lantern.generation.generator import Generator, build_decoder
from lantern.methods import METHODS
from lantern.models.folder import Model, load_model
from lantern.models.llamagen.transformer import Transformer
from tests.engines.cpu.test_linear import KINDS, in_steps
from tests.golden.record import TOY_NEIGHBOURS, WINDOW, WINDOWS, toy_folder
from tests.refusals import refused
from tests.tiny import needs_torchao, tiny_condition, tiny_eagle, wide_target
from tests.tiny_decoder import CONDITION, KEYS, chosen_from, plain_tokens
from tests.tiny_passes import Passes

KNOWN = 11  # tokens that are committed before the passes below
TREE = (-1, 0, 0, 1, 3, 2, 4)  # parents; node 6's path is 0, 1, 3, 4, 6
TOKENS = [3, 1, 4, 15, 9, 2, 6]


def target_in(dtype: torch.dtype, seed: int = 0, **changes: Any) -> Transformer:
    return wide_target(seed, block_size=64, **changes).to(dtype)


def target_of(kind: str, **changes: Any) -> Any:
    target = target_in(torch.float32 if kind == "fp32" else torch.bfloat16, **changes)
    return quantized(target, "int8") if kind == "int8" else target


def twin_of(target: Transformer) -> Target:
    return CpuEngine().prepare(copy.deepcopy(target))


def by_single_passes(target: Target, tokens: list[int]) -> list[Tensor]:
    passes, found = Passes(target, KNOWN), list[Tensor]()
    for known, token in enumerate(tokens, KNOWN):
        found.append(passes.score([token], (-1,), known).logits[:, 0])
        passes.cache.commit(torch.zeros(1, 1, dtype=torch.long), torch.tensor([known]))
    return found


@pytest.mark.parametrize("changes", [{}, {"dim": 128}, {"dim": 160}, {"dim": 96, "n_head": 3, "multiple_of": 32}])
def test_fused_pass_equals_eager_pass(changes: dict[str, Any]) -> None:
    target = target_in(torch.float32, **changes)
    eager, fused = Passes(target, KNOWN), Passes(twin_of(target), KNOWN)
    expected, found = eager.score(TOKENS, TREE), fused.score(TOKENS, TREE)
    for a, b in ((expected.logits, found.logits), (expected.features, found.features), (expected.tapped, found.tapped)):
        assert torch.allclose(a, b, atol=2e-5 * float(a.abs().max()))
    assert torch.allclose(eager.cache.buffer, fused.cache.buffer, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("negative", "whole"), [((), False), ((), True), ((2, 5, 1), False), ((6, 6, 6), False)])
def test_prompts_are_read_as_by_torch_with_bits_of_their_own(negative: tuple[int, ...], *, whole: bool) -> None:
    target = target_in(torch.float32)
    condition = tiny_condition((4, 1, 6))
    if negative:
        condition = replace(condition, negative=tiny_condition(negative, seed=1))
    for one in filter(None, (condition, condition.negative)):
        one.embeddings.add_(1.0)  # of padding too, which words must not see
    twin: Any = twin_of(target)
    together = twin.read(condition, 2, whole=whole, taps=(0, 1))
    for image in range(3):
        one = condition.select([image])
        expected, alone = (t.read(one, 2, whole=whole, taps=(0, 1)) for t in (target, twin))
        for name in ("entries", "scores", "logits", "features", "mask", "tapped"):
            found = getattr(together.at(image), name)
            assert torch.equal(found, getattr(alone, name)), name
            assert torch.allclose(getattr(expected, name).float(), found.float(), atol=1e-4), name


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_a_class_or_in_other_dtypes_are_read_as_by_torch(kind: str) -> None:
    captions, classes = target_of(kind), target_of(kind, model_type="c2i", num_classes=5, cls_token_num=1)
    labels = Condition(labels=torch.tensor([3, 0]))
    bound = {"fp32": 2e-5, "bf16": 0.03, "int8": 0.03}[kind]
    for target, condition in ((captions, tiny_condition((4, 1))), (classes, labels)):
        for name in ("entries", "logits", "features"):
            expected, found = (getattr(t.read(condition, 2), name).float() for t in (target, twin_of(target)))
            assert (found - expected).abs().mean() <= bound * expected.abs().mean(), name


@pytest.mark.parametrize("dim", [64, 128, 160, 192, 256])  # heads of 32, 64, 80, 96 and 128
def test_fused_bf16_is_as_accurate_as_eager_bf16(dim: int) -> None:
    target = target_in(torch.float32, dim=dim)
    wide = copy.deepcopy(target.bfloat16()).float()
    expected = Passes(wide, KNOWN).score(TOKENS, TREE).logits
    eager, fused = (Passes(t, KNOWN).score(TOKENS, TREE).logits for t in (target, twin_of(target)))
    assert (fused - expected).abs().mean() <= 1.2 * (eager - expected).abs().mean()


def full(target: Transformer) -> Transformer:
    """Return the target with dequantized weights, in fp32, whose linears round each row of inputs to 127 steps."""
    wide = copy.deepcopy(target)
    for module in wide.modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "qdata"):
            module.weight = nn.Parameter(module.weight.qdata.float() * module.weight.scale)  # type: ignore[operator]
            module.register_forward_pre_hook(lambda _, inputs: (in_steps(inputs[0]),))
    return wide.float()


@pytest.mark.parametrize("dim", [64, 128, 160, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_8_bit_passes_equal_dequantized_weights(dim: int, dtype: torch.dtype) -> None:
    unrounded = target_in(dtype, dim=dim)
    target: Any = quantized(unrounded, "int8")
    made = (Passes(t, KNOWN).score(TOKENS, TREE).logits for t in (unrounded, full(target), twin_of(target)))
    by_full_weights, expected, found = made
    # where sums in another order round no input to another step, logits are equal; elsewhere they are close
    apart = (found - expected).abs()
    assert float(apart.amax((0, -1)).min()) < 1e-4
    assert float(apart.mean()) < 0.5 * float((by_full_weights - expected).abs().mean())


def random_tree(nodes: int, random: Random) -> tuple[int, ...]:
    """Return the parents of nodes, of which most follow the one before them."""
    return (-1, *(node - 1 if random.random() < 0.7 else random.randrange(node) for node in range(1, nodes)))


@pytest.mark.parametrize(
    ("kind", "dim"),  # attention, in which the sizes of heads enter, is the same for all kinds
    [*(("fp32", dim) for dim in (64, 128, 160, 192, 256)), *product(("bf16", "int8"), (64, 160, 256))],
)
def test_logits_have_the_same_bits_alone_in_a_tree_in_a_batch_and_by_any_number_of_threads(kind: str, dim: int) -> None:
    target, random, threads = twin_of(target_of(kind, dim=dim)), Random(dim), torch.get_num_threads()
    for nodes, images in ((1, 1), (7, 3), (random.randint(2, 16), 1), (random.randint(17, 40), 2), (17, 1)):
        parents = random_tree(nodes, random)
        tokens = [random.randrange(32) for _ in parents]
        path = [nodes - 1]
        while path[0]:
            path.insert(0, parents[path[0]])
        torch.set_num_threads(1)
        alone = by_single_passes(target, [tokens[node] for node in path])
        try:
            for calls in range(5):  # the first ones use one thread, to measure its time
                torch.set_num_threads(1 + (calls > 1))
                tree = Passes(target, KNOWN, images, stage=nodes).score(tokens, parents).logits
                for node, expected in zip(path, alone, strict=True):
                    assert torch.equal(tree[:, node], expected.repeat(images, 1))
        finally:
            torch.set_num_threads(threads)


def test_the_engine_changes_neither_the_target_nor_the_tokens_and_prepares_the_original_once() -> None:
    target, sampling = target_in(torch.float32), Sampling(guidance=3.0)
    expected = plain_tokens(target, sampling)
    before = dict(vars(target))
    made = build_decoder("plain", target, sampling=sampling, engine=CpuEngine())
    assert made.target is not target
    assert torch.equal(made.generate(CONDITION, keys=KEYS).tokens, expected)
    assert vars(target) == before and build_decoder("plain", target, sampling=sampling).target is target
    once, again = made.target, CpuEngine().prepare(made.target)
    assert isinstance(once, CpuTarget) and isinstance(again, CpuTarget)
    assert again.module is target and again.program is once.program
    assert EAGER.prepare(once) is target


@pytest.mark.parametrize(
    "changed", [lambda _: nn.ReLU(), lambda _: nn.GELU(), lambda gelu: nn.Sequential(gelu, nn.ReLU())]
)
def test_captions_are_embedded_by_the_layers_that_there_are(changed: Callable[[nn.Module], nn.Module]) -> None:
    target, captions = target_in(torch.float32, caption_dim=16), torch.ones(1, 2, 16)
    embedder: Any = target.cls_embedding
    embedder.cap_proj.gelu = changed(embedder.cap_proj.gelu)
    torch.testing.assert_close(CpuTarget(target).cls_embedding(captions), embedder(captions))


def test_prompts_that_amx_read_are_kept_apart() -> None:
    target, prompts = target_in(torch.bfloat16), PromptCache()
    for amx in (True, False):
        prompts.read(CpuEngine(amx=amx).prepare(target), CONDITION, 1)
    assert len(prompts) == 2 * CONDITION.batch


@pytest.mark.parametrize("name", ["plain", "gumbel-jacobi", "eagle1"])
def test_changed_weights_are_packed_again(name: str) -> None:
    target, other = target_in(torch.float32), target_in(torch.float32, seed=1)
    how: dict[str, Any] = {"sampling": Sampling(guidance=3.0), "engine": CpuEngine()}
    module = tiny_eagle(target)
    parts = build_decoder(name, target, add_ons={"eagle1": module}, **how)
    parts.generate(CONDITION, keys=KEYS)
    expected = build_decoder("plain", other, **how).generate(CONDITION, keys=KEYS).tokens
    target.load_state_dict(other.state_dict())
    assert torch.equal(parts.generate(CONDITION, keys=KEYS).tokens, expected)
    # as a pipeline is moved to another dtype between two calls
    expected = build_decoder("plain", copy.deepcopy(other).bfloat16(), **how).generate(CONDITION, keys=KEYS).tokens
    target.bfloat16()
    module.bfloat16()
    made = build_decoder(name, target, add_ons={"eagle1": module}, **how).generate(CONDITION, keys=KEYS).tokens
    assert torch.equal(made, expected)


def test_packed_weights_are_of_one_target_and_freed_with_it() -> None:
    target = target_in(torch.float32)
    build_decoder("plain", target, sampling=Sampling(), engine=CpuEngine()).generate(CONDITION, keys=KEYS)
    for twin in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert torch.equal(twin.output.weight, target.output.weight)
        made = CpuEngine().prepare(twin)
        assert isinstance(made, CpuTarget) and made.module is twin
    target = target_in(torch.float32)
    alive = weakref.ref(target), weakref.ref(CpuEngine().prepare(target).program)  # type: ignore[attr-defined]
    del target
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_unused_add_ons_are_not_read() -> None:
    class Unread(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise AssertionError(f"part {name} is read")

    parts = Unread(dict.fromkeys(("eagle3", "sam", "c2t")))
    target = target_in(torch.float32)
    build_decoder("gumbel-jacobi", target, sampling=Sampling(), add_ons=parts, engine=CpuEngine())


class Adapter(nn.Linear):
    """A layer of another library, which may compute otherwise."""


def adapted() -> Transformer:
    target = target_in(torch.float32)
    target.output = Adapter(64, 32, bias=False)
    return target


def hooked() -> Transformer:
    target = target_in(torch.float32)
    target.layers[0].attention.wo.register_forward_hook(lambda module, given, out: out * 0)
    return target


@pytest.mark.parametrize(
    ("target", "weights", "message"),
    [
        (lambda: target_in(torch.float16), "full", "the cpu engine computes in fp32 or bf16"),
        (lambda: target_in(torch.float32, vocab_size=24), "full", "vocab_size is 24, the cpu engine needs a multiple"),
        (lambda: target_in(torch.float32, dim=72, n_head=3), "full", "dim is 72"),
        (lambda: target_in(torch.float32, dim=96, n_head=4), "full", "width of a head is 24"),
        (hooked, "full", "layers.0.attention.wo has a forward hook"),
        (adapted, "full", "output is a Adapter of tests"),
        pytest.param(lambda: target_in(torch.float32, multiple_of=32), "int4", "int4 was given", marks=needs_torchao),
    ],
)
def test_unsupported_targets_are_left_to_eager(
    target: Callable[[], Transformer], weights: Weights, message: str
) -> None:
    refused(build_decoder, "plain", target(), sampling=Sampling(), engine=CpuEngine(weights=weights), match=message)
    found = AutoEngine(weights=weights).resolve(target())
    assert found == EagerEngine(weights=weights) and message.removeprefix("the cpu engine ") in found.reason


def test_mixed_weights_are_refused() -> None:
    target = target_of("int8")
    target.output = nn.Linear(64, 32, bias=False).bfloat16()
    refused(CpuEngine().prepare, target, match="all weights in 8 bits or none, this model has both")


PROMISED = [name for name, method in METHODS.items() if method.promise == "tokens"]
OTHERS = [name for name in PROMISED if name not in ("plain", "auto")]
PROMPTS, SEEDS = ["a red apple", "two cats"], [(3, 0), (3, 1)]  # of other lengths, and shorter than the model's slots


@cache
def model(dtype: str, weights: Weights) -> Model:
    return load_model(str(toy_folder()), dtype=dtype, engine=CpuEngine(weights=weights))


@cache
def logits_of(name: str, *of: Any) -> list[Tensor]:
    """Return for each image the logits of its tokens `(tokens, guidance rows, v)`."""
    settings: dict[str, Any] = {"window": WINDOW} if name in WINDOWS else {}
    settings |= {"k": TOY_NEIGHBOURS} if "k" in METHODS[name].settings else {}
    generator = Generator(model(*of), METHODS[name].with_options(**settings), Sampling(guidance=3.0))
    found = [list[Tensor]() for _ in SEEDS]

    def collect(step: Step) -> None:
        for image, logits in enumerate(found):
            logits += chosen_from(step, image)

    text = generator.model.text
    condition = text.condition(PROMPTS, slots=generator.model.target.config.cls_token_num)
    generator.parts.generate(condition, keys=SEEDS, callback=collect)
    return [torch.stack(one) for one in found]


# Each method has both dtypes and both kinds of weights, a pair of them in the default run; the next one has the others.
PAIRS = [("fp32", "full"), ("bf16", "int8"), ("fp32", "int8"), ("bf16", "full")]
CASES = [
    pytest.param(name, *PAIRS[number], marks=[pytest.mark.slow] * is_second)
    for i, name in enumerate(OTHERS)
    for is_second, number in enumerate((i % 4, (i + 1) % 2 + i % 4 // 2 * 2))
]


@pytest.mark.parametrize(("name", "dtype", "weights"), CASES)
def test_tokens_are_chosen_from_the_logits_of_plain_decoding(name: str, dtype: str, weights: Weights) -> None:
    for mine, plain in zip(logits_of(name, dtype, weights), logits_of("plain", dtype, weights), strict=True):
        assert mine.shape == plain.shape
        assert torch.equal(mine, plain)
