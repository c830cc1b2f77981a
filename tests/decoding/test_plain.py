"""Plain decoding."""

import pytest
import torch

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Step
from lantern.decoding import plain
from tests.tiny import select, tiny_cache, tiny_condition, tiny_target

KEYS = [(11, 0), (11, 1), (2**62, 0), (3, 5)]


def test_tokens_are_the_argmax_of_log_probs_plus_noise() -> None:
    target, condition, sampling = tiny_target(), tiny_condition((4,)), Sampling(guidance=3)
    made = plain.generate(target, condition, sampling=sampling, keys=KEYS[:1])
    noise = Noise(KEYS[:1], positions=16, vocab_size=24)
    assert condition.embeddings is not None
    words = condition.embeddings[:, -4:]
    rows = torch.cat([target.cls_embedding(words), target.cls_embedding.unconditional(words)])
    inputs = torch.cat([rows, target.tok_embeddings(made.tokens[:, :-1]).expand(2, -1, -1)], 1)
    with torch.no_grad():
        logits = target(inputs, torch.arange(2, 21).expand(2, -1)).logits[None, :, 3:]
    where = torch.arange(16)[None]
    assert torch.equal((sampling.log_probs(logits, where) + noise.gumbel(where)).argmax(-1), made.tokens)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_tokens_do_not_depend_on_the_batch_or_its_order(guidance: float) -> None:
    target, condition = tiny_target(), tiny_condition((4, 1, 6, 3))
    sampling = Sampling(guidance=guidance)
    batch = plain.generate(target, condition, sampling=sampling, keys=KEYS).tokens
    order = [2, 0, 3, 1]
    turned = plain.generate(target, select(condition, order), sampling=sampling, keys=[KEYS[i] for i in order])
    assert torch.equal(turned.tokens, batch[order])
    for i in range(4):
        alone = plain.generate(target, select(condition, [i]), sampling=sampling, keys=[KEYS[i]])
        assert torch.equal(alone.tokens, batch[i : i + 1])


def test_tokens_do_not_depend_on_padding() -> None:
    target, wide = tiny_target(), tiny_condition((3,))
    assert wide.embeddings is not None and wide.mask is not None
    cut = Condition(embeddings=wide.embeddings[:, -3:], mask=wide.mask[:, -3:])
    one = plain.generate(target, wide, sampling=Sampling(), keys=KEYS[:1])
    assert torch.equal(one.tokens, plain.generate(target, cut, sampling=Sampling(), keys=KEYS[:1]).tokens)


def test_class_labels_are_a_condition() -> None:
    target = tiny_target(model_type="c2i", cls_token_num=1, num_classes=3)
    condition = Condition(labels=torch.tensor([0, 2]))
    made = plain.generate(target, condition, sampling=Sampling(guidance=2), keys=KEYS[:2])
    assert made.tokens.shape == (2, 16)
    assert not torch.equal(made.tokens[0], made.tokens[1])


def test_a_grid_of_one_token_takes_one_pass() -> None:
    target = tiny_target(block_size=1)
    made = plain.generate(target, tiny_condition(), sampling=Sampling(), keys=KEYS[:1])
    assert made.tokens.shape == (1, 1) and made.steps.tolist() == [1]


def test_reused_cache_gives_the_same_tokens() -> None:
    target, condition = tiny_target(), tiny_condition((4,))
    cache = tiny_cache(layers=2, rows=2, heads=2, head_dim=16, tokens=16, stage=0)
    runs = [
        plain.generate(target, condition, sampling=Sampling(), keys=keys, cache=cache).tokens
        for keys in ([(1, 0)], [(2, 0)], [(1, 0)])
    ]
    assert torch.equal(runs[0], runs[2]) and cache.buffer.abs().sum() > 0


def test_callbacks_see_every_token() -> None:
    seen: list[Step] = []
    made = plain.generate(
        tiny_target(), tiny_condition(), sampling=Sampling(), keys=KEYS[:1], callback=seen.append, is_timed=True
    )
    assert torch.cat([step.tokens for step in seen], 1).shape == made.tokens.shape
    assert set(made.seconds) == {"prefill", "draw", "score"}


def test_bad_arguments_are_refused() -> None:
    target, condition = tiny_target(), tiny_condition()
    with pytest.raises(ValueError, match="2 noise keys for 1 images"):
        plain.generate(target, condition, sampling=Sampling(), keys=KEYS[:2])
    with pytest.raises(ValueError, match="at most 6"):
        plain.generate(target, tiny_condition((9,), slots=9), sampling=Sampling(), keys=KEYS[:1])
    with pytest.raises(ValueError, match="training mode"):
        plain.generate(target.train(), condition, sampling=Sampling(), keys=KEYS[:1])
    with pytest.raises(ValueError, match="on the left"):
        right = Condition(embeddings=torch.zeros(1, 3, 8), mask=torch.tensor([[True, True, False]]))
        plain.generate(target.eval(), right, sampling=Sampling(), keys=KEYS[:1])
