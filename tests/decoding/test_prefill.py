"""The prompt: one slot per layer, computed without attention scores, cached between calls."""

from functools import partial
from pathlib import Path

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.decoding.cache import PromptCache, TreeMask, make_cache, prefix_scores, read_prompts, start
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from tests.tiny import select, tiny_cache, tiny_condition, tiny_target
from tests.uncached import uncached

DATA = Path(__file__).parents[1] / "data"
TOLERANCE = 2e-5
TARGET = tiny_target()
CONDITION = tiny_condition((4, 1, 6, 2))


def collapsed(target: Transformer, condition: Condition, codes: torch.Tensor, rows: int) -> torch.Tensor:
    """Logits after the prompt and after each code, in one pass over the codes with the prompt in its slot."""
    state = read_prompts(target, condition, rows=rows, needs_whole_prefix=False)
    count = codes.shape[1]
    assert state.means is not None
    cache = make_cache(target, state, count)
    cache.write_prefix(state.means)
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    mask = TreeMask(cache, prefix_scores(state.counts, cache), count).update(torch.zeros(len(codes)), causal)
    positions = torch.arange(count).expand(len(codes) * rows, -1)
    inputs = target.tok_embeddings(codes).repeat_interleave(rows, 0)
    slots = positions + cache.first_stage_slot
    scores = target(inputs, positions + target.config.cls_token_num, mask, cache=cache, slots=slots)
    return torch.cat([target.head(state.features[:, :, -1:].flatten(0, 1)), scores.logits], dim=1)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(4, 1, 6, 2), (6,), (1,), (3, 3)])
def test_prompt_slot_equals_uncollapsed_attention(lengths: tuple[int, ...]) -> None:
    condition = tiny_condition(lengths)
    codes = torch.randint(0, 24, (len(lengths), 15), generator=torch.Generator().manual_seed(1))
    expected = uncached(TARGET, condition, codes)[:, :, 5:].flatten(0, 1)
    assert (collapsed(TARGET, condition, codes, 2) - expected).abs().max() <= TOLERANCE


@torch.no_grad()
def test_logits_equal_reference() -> None:
    vectors = torch.load(DATA / "gpt_t2i_io.pt", weights_only=True)
    target = Transformer(TransformerConfig(**vectors["config"])).eval()
    target.load_state_dict(torch.load(DATA / "gpt_t2i_state.pt", weights_only=True))
    condition = Condition(embeddings=vectors["caption"], mask=vectors["emb_masks"].bool())
    logits = collapsed(target, condition, vectors["idx"][:, :-1], 1)
    assert (logits - vectors["tf_logits"]).abs().max() <= TOLERANCE


@torch.no_grad()
def test_features_of_all_slots_equal_uncollapsed_forward() -> None:
    state = read_prompts(TARGET, CONDITION, rows=1, needs_whole_prefix=True)
    expected = uncached(TARGET, CONDITION, torch.zeros(4, 0, dtype=torch.long), "features", rows=1)
    assert state.features.shape[2] == 6
    assert (state.features - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_slots_have_the_weight_of_all_words(dtype: torch.dtype) -> None:
    prefix = 1 if dtype == torch.float32 else 2
    cache = tiny_cache(prefix=prefix, dtype=dtype)
    counts = torch.arange(1, 121)
    weights = prefix_scores(counts, cache).double().exp().sum(1)
    assert ((weights - counts) / counts).abs().max() < (1e-6 if dtype == torch.float32 else 5e-4)


def test_empty_prompt_has_no_weight() -> None:
    assert prefix_scores(torch.tensor([0]), tiny_cache()).tolist() == [[-torch.inf]]


@torch.no_grad()
def test_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target, read = tiny_target(), []
    real = target.read_prompt
    monkeypatch.setattr(target, "read_prompt", lambda x, mask: read.append(len(x)) or real(x, mask))
    prompts = PromptCache()
    first = prompts.read(target, CONDITION, rows=2, needs_whole_prefix=False)
    again = prompts.read(target, select(CONDITION, [2, 0]), rows=2, needs_whole_prefix=False)
    assert again.means is not None and first.means is not None
    assert read == [8] and torch.equal(again.means, first.means[[2, 0]])
    assert torch.equal(again.features, first.features[[2, 0]]) and again.counts.tolist() == [6, 4]
    prompts.read(target, select(CONDITION, [1]), rows=1, needs_whole_prefix=False)
    prompts.read(target, tiny_condition((4,), seed=5), rows=2, needs_whole_prefix=False)
    assert read == [8, 1, 2]


@torch.no_grad()
def test_reproducible_prefill_does_not_depend_on_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    target, read = tiny_target(), []
    real, head = target.read_prompt, target.head
    monkeypatch.setattr(target, "read_prompt", lambda x, mask: read.append(x.shape[:2]) or real(x, mask))
    monkeypatch.setattr(target, "head", lambda features: read.append(len(features)) or head(features))
    keys = [(0, number) for number in range(4)]
    begin = partial(start, target, sampling=Sampling(guidance=3.0), stage=1, reproducible=True)
    together = begin(CONDITION, keys=keys)
    # each prompt in both guidance rows, as long as it is; and each head in a product of its own
    assert CONDITION.mask is not None
    assert read == [(2, int(words)) for words in CONDITION.mask.sum(1)] + [1] * 4
    for image in range(4):
        alone = begin(select(CONDITION, [image]), keys=keys[:1])
        assert torch.equal(alone.logits[0], together.logits[image])
        values = together.cache.buffer.unflatten(1, (4, 2))[:, image]
        assert torch.equal(alone.cache.buffer, values)


@torch.no_grad()
@pytest.mark.parametrize("is_replaced", [False, True], ids=["weights", "submodule"])
def test_changed_weights_and_submodules_clear_the_prompt_cache(is_replaced: bool) -> None:
    target, prompts = tiny_target(), PromptCache()
    before = prompts.read(target, CONDITION, rows=1, needs_whole_prefix=False)
    if is_replaced:
        target.layers[0] = tiny_target(seed=1).layers[0]
    else:
        target.layers[0].attention.wqkv.weight.mul_(2.0)
    after = prompts.read(target, CONDITION, rows=1, needs_whole_prefix=False)
    assert len(prompts) == CONDITION.batch
    assert before.means is not None and after.means is not None and not torch.equal(before.means, after.means)


@torch.no_grad()
def test_prompt_cache_keeps_only_the_latest() -> None:
    prompts = PromptCache(limit=3)
    for seed in range(5):
        prompts.read(TARGET, tiny_condition((4,), seed=seed), rows=1, needs_whole_prefix=False)
    assert len(prompts) == 3


@torch.no_grad()
def test_passes_over_prompts_have_constant_size_if_the_target_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    sizes: list[tuple[int, ...]] = []
    read = target.read_prompt

    def watched(inputs: torch.Tensor, *args: torch.Tensor, **named: object) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(tuple(inputs.shape[:2]))
        return read(inputs, *args, **named)  # type: ignore[arg-type]

    how = {"rows": 2, "needs_whole_prefix": False}
    expected = PromptCache().read(target, CONDITION, **how)  # type: ignore[arg-type]
    monkeypatch.setattr(target, "read_prompt", watched)
    monkeypatch.setattr(target, "prompt_rows", 36, raising=False)
    together = PromptCache().read(target, CONDITION, **how)  # type: ignore[arg-type]
    alone = [PromptCache().read(target, select(CONDITION, [image]), **how) for image in range(4)]  # type: ignore[arg-type]
    assert sizes == [(6, 6)] * 6  # three prompts of two rows and six slots: two passes for four prompts, one for each
    assert together.means is not None and expected.means is not None
    assert (together.means - expected.means).abs().max() <= TOLERANCE
    assert torch.equal(together.means, torch.cat([state.means for state in alone if state.means is not None]))
    assert torch.equal(together.features, torch.cat([state.features for state in alone]))
