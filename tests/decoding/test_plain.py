import pytest
import torch

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.decoding import plain
from lantern.decoding.loop import begin, run
from tests.tiny import tiny_condition, tiny_target

KEYS = [(11, 0), (11, 1), (2**62, 0), (3, 5)]


def test_tokens_are_the_argmax_of_log_probs_plus_noise() -> None:
    target, condition, sampling = tiny_target(), tiny_condition((4,)), Sampling(guidance=3)
    made = plain.generate(target, condition, sampling=sampling, keys=KEYS[:1])
    noise = Noise(KEYS[:1], positions=16, vocab_size=24)
    words = condition.embeddings[:, -4:]
    rows = torch.cat([target.cls_embedding(words), target.cls_embedding.unconditional(words)])
    inputs = torch.cat([rows, target.tok_embeddings(made.tokens[:, :-1]).expand(2, -1, -1)], 1)
    with torch.no_grad():
        logits = target(inputs, torch.arange(2, 21).expand(2, -1)).logits[None, :, 3:]
    where = torch.arange(16)[None]
    assert torch.equal((sampling.log_probs(logits, where) + noise.gumbel(where)).argmax(-1), made.tokens)


def test_tokens_do_not_depend_on_padding() -> None:
    target, wide = tiny_target(), tiny_condition((3,))
    cut = Condition(embeddings=wide.embeddings[:, -3:], mask=wide.mask[:, -3:])
    one = plain.generate(target, wide, sampling=Sampling(), keys=KEYS[:1])
    assert torch.equal(one.tokens, plain.generate(target, cut, sampling=Sampling(), keys=KEYS[:1]).tokens)


def test_reused_cache_gives_the_same_tokens() -> None:
    target, condition = tiny_target(), tiny_condition((4,))
    state, runs, caches = plain.Plain(target, Sampling()), [], set()
    for keys in ([(1, 0)], [(2, 0)], [(1, 0)]):
        runs.append(run(begin(state, condition, keys=keys)).tokens)
        caches.add(state.cache)
    assert torch.equal(runs[0], runs[2]) and len(caches) == 1


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
