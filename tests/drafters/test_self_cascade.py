"""A small model as drafter: its chain is its own image, and a copy of the target is always accepted."""

import pytest
import torch

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.drafters.combined.self_cascade import SelfCascadeDrafter
from lantern.drafters.combined.small_model import SmallModel
from lantern.drafters.trees.static import chain, named
from tests.drafters.sampled_trees import begin_after, drafted
from tests.tiny import select, tiny_target
from tests.tiny_decoder import CONDITION, KEYS, TARGET, plain_tokens, tiny_decoder
from tests.uncached import uncached

SMALL = tiny_target(seed=5, n_layer=1)


@torch.no_grad()
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_first_chain_equals_the_small_models_picture(guidance: float, temperature: float) -> None:
    sampling = Sampling(guidance=guidance, temperature=temperature)
    own = plain_tokens(SMALL, sampling)
    drafter = SelfCascadeDrafter(SMALL, TARGET, tree=chain(15), sampling=sampling)
    noise = Noise(KEYS, positions=16, vocab_size=24, is_silent=sampling.is_greedy)
    begin_after(drafter, own[:, 0], torch.zeros(3, 1, 1, 1), noise)
    assert torch.equal(drafter.propose().tokens, own)


@pytest.mark.parametrize("tree", ["chain_4", "narrow_10", "wide_15"])
def test_copy_of_the_target_is_always_accepted(tree: str) -> None:
    made = tiny_decoder("self-cascade", tree=tree, add_ons={"small": TARGET}).generate(CONDITION, keys=KEYS)
    assert torch.equal(made.tokens, plain_tokens())
    depth = named(tree).depth
    assert made.steps.tolist() == [1 + -(-15 // (depth + 1))] * 3


def test_recorded_log_q_is_the_small_models() -> None:
    sampling = Sampling(guidance=2)
    drafter = SelfCascadeDrafter(SMALL, TARGET, tree=named("0 1 0.0 1.0"), sampling=sampling, records_log_q=True)
    tokens, drafts = drafted(drafter, sampling=sampling)
    known, tree, _ = drafts[1]
    for image in range(3):
        for node, path in ((0, []), (1, [1]), (2, [2])):
            output = torch.cat([tokens[image, : known[image]], tree.tokens[image, path]])[None]
            logits = uncached(SMALL, select(CONDITION, [image]), output)[:, :, -1:]
            expected = sampling.log_probs(logits, torch.tensor([[output.shape[1]]]))[0, 0]
            torch.testing.assert_close(tree.log_q[image, node], expected, atol=1e-4, rtol=1e-4)


def test_small_models_of_other_sizes_raise() -> None:
    for name, value in (("vocab_size", 25), ("block_size", 9), ("cls_token_num", 5)):
        with pytest.raises(ValueError, match=f"the small model has {name} {value}, its target"):
            SmallModel(tiny_target(**{name: value}), TARGET, sampling=Sampling(), stage=2)
    with pytest.raises(ValueError, match='needs the trained part "small"'):
        tiny_decoder("self-cascade", add_ons={})
