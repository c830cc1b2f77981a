"""A small model as drafter: its chain is its own image, and a copy of the target is always accepted."""

import dataclasses

import pytest
import torch

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import Prefill, Step
from lantern.decoding import loop, plain
from lantern.drafters.combined.self_cascade import SelfCascadeDrafter
from lantern.drafters.combined.small_model import SmallModel
from lantern.drafters.trees.static import chain, named
from lantern.methods.registry import METHODS, build_decoder
from lantern.verifiers.gumbel import GumbelVerifier
from tests.tiny import tiny_condition, tiny_target

TARGET = tiny_target()
SMALL = tiny_target(seed=5, n_layer=1)
CONDITION = tiny_condition((4, 1, 6))
KEYS = [(9, 0), (9, 1), (4, 7)]


@torch.no_grad()
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_first_chain_equals_the_small_models_picture(guidance: float, temperature: float) -> None:
    sampling = Sampling(guidance=guidance, temperature=temperature)
    own = plain.generate(SMALL, CONDITION, sampling=sampling, keys=KEYS).codes
    drafter = SelfCascadeDrafter(SMALL, TARGET, tree=chain(15), sampling=sampling)
    noise = Noise(KEYS, positions=16, vocab_size=24, is_silent=sampling.is_greedy)
    drafter.begin(
        Prefill(torch.zeros(3, 1, 1, 1), torch.ones(3, 1, dtype=torch.bool), own[:, 0], condition=CONDITION), noise
    )
    assert torch.equal(drafter.propose().tokens, own)


@pytest.mark.parametrize("tree", ["chain_4", "narrow_10", "wide_15"])
def test_copy_of_the_target_is_always_accepted(tree: str) -> None:
    sampling = Sampling(guidance=3)
    built = build_decoder(
        METHODS["self-cascade"].with_options(tree=tree), TARGET, sampling=sampling, add_ons={"small": TARGET}
    )
    made = built.generate(CONDITION, keys=KEYS)
    assert torch.equal(made.codes, plain.generate(TARGET, CONDITION, sampling=sampling, keys=KEYS).codes)
    depth = named(tree).depth
    assert made.passes.tolist() == [1 + -(-15 // (depth + 1))] * 3


def test_recorded_log_q_is_the_small_models() -> None:
    sampling = Sampling(guidance=2)
    drafter = SelfCascadeDrafter(SMALL, TARGET, tree=named("0 1 0.0 1.0"), sampling=sampling, records_log_q=True)
    steps: list[Step] = []
    loop.generate(
        TARGET,
        CONDITION,
        sampling=sampling,
        keys=KEYS,
        drafter=drafter,
        verifier=GumbelVerifier(),
        callback=steps.append,
    )
    codes = torch.stack([torch.cat([step.codes[i, : step.counts[i]] for step in steps]) for i in range(3)])
    tree, start = steps[2].tree, steps[2].start
    assert tree is not None and tree.log_q is not None
    for image in range(3):
        for node, path in ((0, []), (1, [1]), (2, [2])):
            output = [*codes[image, : start[image]].tolist(), *(int(tree.tokens[image, n]) for n in path)]
            expected = distribution_after(output, image, sampling)
            torch.testing.assert_close(tree.log_q[image, node], expected, atol=1e-4, rtol=1e-4)


def distribution_after(output: list[int], image: int, sampling: Sampling) -> torch.Tensor:
    """Return the small model's log q of the next code, without a cache."""
    words, mask = CONDITION.embeddings[image : image + 1], CONDITION.mask[image : image + 1]  # type: ignore[index]
    rows = []
    for prompt in (SMALL.cls_embedding(words), SMALL.cls_embedding.unconditional(words)):
        inputs = torch.cat([prompt, SMALL.tok_embeddings(torch.tensor([output]))], 1)
        seen = torch.cat([mask, torch.ones(1, len(output), dtype=torch.bool)], 1)
        length = inputs.shape[1]
        sees = (torch.ones(length, length, dtype=torch.bool).tril() & seen[:, None]) | torch.eye(
            length, dtype=torch.bool
        )
        with torch.no_grad():
            rows.append(SMALL(inputs, torch.arange(length)[None], sees).logits[:, -1:])
    return sampling.log_probs(torch.stack(rows, 1), torch.tensor([[len(output)]]))[0, 0]


def test_small_models_of_other_sizes_raise() -> None:
    for name, value in (("vocab_size", 25), ("block_size", 9), ("cls_token_num", 5)):
        with pytest.raises(ValueError, match=f"the small model has {name} {value}, its target"):
            SmallModel(tiny_target(**{name: value}), TARGET, sampling=Sampling(), stage=2)
    with pytest.raises(ValueError, match='needs the trained part "small"'):
        build_decoder("self-cascade", TARGET, sampling=Sampling())


@torch.no_grad()
def test_prefill_without_condition_raises() -> None:
    drafter = SmallModel(SMALL, TARGET, sampling=Sampling(), stage=2)
    first = torch.zeros(1, dtype=torch.long)
    prefill = Prefill(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, dtype=torch.bool), first)
    with pytest.raises(ValueError, match="set Prefill.condition"):
        drafter.begin(prefill, Noise([(0, 0)], positions=16, vocab_size=24))
    drafter.begin(
        dataclasses.replace(prefill, condition=tiny_condition((3,))), Noise([(0, 0)], positions=16, vocab_size=24)
    )
    assert torch.equal(drafter.last, first[:, None])
