"""The prompt: one slot per layer, computed without attention scores, cached between calls."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch

from lantern.core.types import Condition, Prompt
from lantern.core.weights import PreparedTarget, read_in_passes, weights_of
from lantern.decoding.cache import CacheKind, PromptCache, StaticCache, prefill
from lantern.models.llamagen.transformer import Transformer, word_scores
from tests.tiny import one_thread, tiny_condition, tiny_target, uncached

TOLERANCE = 2e-5
TARGET = tiny_target()
CONDITION = tiny_condition((4, 1, 6, 2))


def watched(target: Transformer, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the sizes of the passes over prompts from now on."""
    sizes, read = [], target.read_slots
    monkeypatch.setattr(target, "read_slots", lambda x, *of, **how: sizes.append(x.shape[:2]) or read(x, *of, **how))
    return sizes


def meanwhile(target: Any, call: Callable[[], object]) -> None:
    """Make the call once while the target reads its next prompts, as another thread does."""
    read = target.read

    def interrupted(*args: Any, **how: Any) -> Prompt:
        target.read = read
        call()
        return read(*args, **how)

    target.read = interrupted


@torch.no_grad()
def test_features_of_all_slots_equal_uncollapsed_forward() -> None:
    state = TARGET.read(CONDITION, 1, whole=True)
    expected = uncached(TARGET, CONDITION, torch.zeros(4, 0, dtype=torch.long), "features", rows=1)
    assert state.features.shape[2] == 6
    assert (state.features - expected).abs().max() <= TOLERANCE


@torch.no_grad()
def test_hooks_and_adapters_take_effect_on_the_prompt() -> None:
    target, merged = tiny_target(), tiny_target()
    target.layers[0].attention.wqkv.register_forward_hook(lambda *of: 2 * of[-1])
    merged.layers[0].attention.wqkv.weight.mul_(2)
    found, expected = (one.read(CONDITION, 2, whole=True) for one in (target, merged))
    torch.testing.assert_close(found.features, expected.features)
    torch.testing.assert_close(found.entries, expected.entries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_slots_have_the_weight_of_all_words(dtype: torch.dtype) -> None:
    counts = torch.arange(1, 121)
    scores = word_scores(counts, dtype)
    weights = scores.to(dtype).double().exp().sum(1)
    assert scores.shape[1] == (1 if dtype == torch.float32 else 2)
    assert ((weights - counts) / counts).abs().max() < (1e-6 if dtype == torch.float32 else 5e-4)
    assert word_scores(torch.tensor([0]), torch.float32).tolist() == [[-torch.inf]]  # an empty prompt


@torch.no_grad()
def test_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = tiny_target(), PromptCache()
    read = watched(target, monkeypatch)
    first = prompts.read(target, CONDITION, 2)
    again = prompts.read(target, CONDITION.select([2, 0]), 2)
    assert [rows for rows, _ in read] == [8] and torch.equal(again.entries, first.entries[[2, 0]])
    assert torch.equal(again.features, first.features[[2, 0]])
    torch.testing.assert_close(again.scores[:, 0, 0].exp(), torch.tensor([6.0, 4.0], dtype=torch.double))
    prompts.read(target, CONDITION.select([1]), 1)
    prompts.read(target, tiny_condition((4,), seed=5), 2)
    assert [rows for rows, _ in read] == [8, 1, 2]
    few = PromptCache(limit=3)
    for seed in range(5):
        few.read(target, tiny_condition((4,), seed=seed), 1)
    assert len(few) == 3


@torch.no_grad()
def test_reproducible_prefill_does_not_depend_on_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    read, head = watched(target, monkeypatch), target.head
    monkeypatch.setattr(target, "head", lambda features: read.append(len(features)) or head(features))
    together, cache = prefill(target, CONDITION, 2, stage=1, kind=CacheKind(is_wide=True))
    # each prompt in both guidance rows, as long as it is; and each head in a product of its own
    assert read == [entry for words in CONDITION.mask.sum(1) for entry in ((2, int(words)), 1)]
    for image in range(4):
        alone, own = prefill(target, CONDITION.select([image]), 2, stage=1, kind=CacheKind(is_wide=True))
        assert torch.equal(alone.logits[0], together.logits[image])
        assert torch.equal(own.buffer, cache.buffer.unflatten(1, (4, 2))[:, image])


@torch.no_grad()
def test_a_prompt_that_another_engine_read_is_read_again() -> None:
    class Doubled(PreparedTarget):
        def read(self, *args: Any, **how: Any) -> Prompt:
            prompt = self.module.read(*args, **how)
            return replace(prompt, entries=2 * prompt.entries)

    target, prompts = tiny_target(), PromptCache()
    found = [prompts.read(one, CONDITION, 1).entries for one in (target, Doubled(target), target)]
    assert torch.equal(found[1], 2 * found[0]) and torch.equal(found[2], found[0])


@torch.no_grad()
def test_prompts_of_a_target_with_hooks_and_of_other_weights_meanwhile_are_not_kept() -> None:
    target, other, prompts, strength = tiny_target(), tiny_target(seed=1), PromptCache(), [1.0]
    expected, others = (one.read(CONDITION, 1).entries for one in (target, other))
    meanwhile(target, lambda: prompts.read(other, CONDITION, 1))
    prompts.read(target, CONDITION, 1)
    assert torch.equal(prompts.read(other, CONDITION, 1).entries, others)
    target.cls_embedding.register_forward_hook(lambda *given: given[2].mul(strength[0]))
    for strength[0] in (2.0, 1.0):
        assert torch.equal(prompts.read(target, CONDITION, 1).entries, expected) == (strength[0] == 1)


@torch.no_grad()
def test_prompts_that_another_thread_drops_meanwhile_are_there() -> None:
    target, prompts = tiny_target(), PromptCache(limit=2)
    expected = target.read(CONDITION, 1).entries
    prompts.read(target, CONDITION.select([0]), 1)
    meanwhile(target, lambda: prompts.read(target, tiny_condition((3, 5), seed=1), 1))
    torch.testing.assert_close(prompts.read(target, CONDITION, 1).entries, expected)
    assert len(prompts) == 2


@torch.no_grad()
def test_a_cache_that_another_thread_replaces_while_weights_are_compared_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, other, prompts = tiny_target(), tiny_target(seed=1), PromptCache()
    waiting = list[Condition]()

    class Weights(tuple[Any, ...]):
        def __ne__(self, value: object) -> bool:
            is_other = tuple.__ne__(self, value)
            if waiting:
                prompts.read(other, waiting.pop(), 1)  # as another thread does
            return is_other

    monkeypatch.setattr("lantern.decoding.cache.weights_of", lambda module: Weights(weights_of(module)))
    prompts.read(target, CONDITION, 1)
    waiting.append(CONDITION)
    found = prompts.read(target, CONDITION.select([0]), 1).entries
    torch.testing.assert_close(found, target.read(CONDITION.select([0]), 1).entries)


@one_thread()
@torch.no_grad()
def test_prompts_read_in_passes_of_constant_size_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    expected, sizes = target.read(CONDITION, 2), watched(target, monkeypatch)
    read = partial(target.read, rows=2, is_padded=True)
    together = read_in_passes(read, CONDITION, 3)
    alone = [read_in_passes(read, CONDITION.select([image]), 3)[0] for image in range(4)]
    assert sizes == [(6, 6)] * 6  # three prompts of two rows and six slots: two passes for four prompts, one for each
    for image in range(4):
        assert (together[image].entries - expected.entries[image]).abs().max() <= TOLERANCE
        for name in ("entries", "scores", "logits", "features"):
            assert torch.equal(getattr(together[image], name), getattr(alone[image], name)), name


def test_the_memory_of_a_cache_of_another_size_is_free_before_the_new_one_is_made() -> None:
    sizes: dict[str, Any] = {"layers": 1, "images": 2, "rows": 2, "heads": 1, "head_dim": 2, "prefix": 1, "tokens": 4}
    sizes |= {"stage": 1, "dtype": torch.float32, "device": "cpu"}
    held = list[bool]()

    class Watched(StaticCache):
        def __init__(self, **sizes: Any) -> None:
            held.append(memory() is not None)
            super().__init__(**sizes)

    memory: Any = lambda: None  # noqa: E731
    cache = Watched.of(None, **sizes)
    memory = ref(cache.buffer)
    assert Watched.of(cache, **sizes) is cache
    smaller = Watched.of(cache, **sizes | {"images": 1})
    assert held == [False, False] and smaller.images == 1
    assert Watched.of(cache, **sizes) is not cache  # after an error in between
