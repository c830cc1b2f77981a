"""The loop with EAGLE-1 beside the matrix of tests/methods."""

from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Generation
from lantern.decoding import plain
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.trees.static import named
from lantern.models.llamagen.transformer import Transformer
from tests.tiny import select, tiny_condition, tiny_eagle, tiny_target
from tests.tiny_decoder import SAMPLING, TARGET, generate

CONDITION = tiny_condition((4, 1, 6, 3))
KEYS = [(5, i) for i in range(4)]


def decode(
    target: Transformer = TARGET,
    condition: Condition = CONDITION,
    *,
    sampling: Sampling = SAMPLING,
    keys: list[tuple[int, int]] = KEYS,
    kind: type[EagleDrafter] = EagleDrafter,
    module: Any = None,
    form: str = "guided",
    tree: str = "narrow_10",
) -> Generation:
    drafter = kind(module or tiny_eagle(target, form=form), target, tree=named(tree), mode="gumbel", sampling=sampling)
    return generate(drafter, target=target, condition=condition, sampling=sampling, keys=keys)


def plainly() -> torch.Tensor:
    return plain.generate(TARGET, CONDITION, sampling=SAMPLING, keys=KEYS).tokens


@pytest.mark.parametrize("guidance", [1.0, 7.5])
def test_tokens_of_64_seeds_equal_plain_decoding(guidance: float) -> None:
    sampling, keys = Sampling(guidance=guidance), [(seed, 0) for seed in range(64)]
    condition = select(CONDITION, [seed % 3 for seed in range(64)])
    expected = plain.generate(TARGET, condition, sampling=sampling, keys=keys).tokens
    assert torch.equal(decode(TARGET, condition, sampling=sampling, keys=keys).tokens, expected)


def test_class_labels_are_a_condition() -> None:
    target = tiny_target(model_type="c2i", cls_token_num=1, num_classes=3)
    condition, how = Condition(labels=torch.tensor([0, 2])), {"sampling": Sampling(guidance=2), "keys": KEYS[:2]}
    expected = plain.generate(target, condition, **how).tokens  # type: ignore[arg-type]
    assert not torch.equal(expected[0], expected[1])
    for form in ("guided", "rows"):
        assert torch.equal(decode(target, condition, form=form, **how).tokens, expected)  # type: ignore[arg-type]


def test_perfect_drafts_are_all_accepted() -> None:
    class Oracle(EagleDrafter):
        """Proposes the final tokens."""

        def propose(self):  # type: ignore[no-untyped-def]
            tree = super().propose()
            where = self.known[:, None] - 1 + tree.shape.depths
            tree.tokens.copy_(ANSWER.gather(1, where.clamp(max=15)))
            return tree

    ANSWER = plainly()
    made = decode(kind=Oracle, tree="chain_4")
    assert torch.equal(made.tokens, ANSWER)
    assert made.steps.tolist() == [4] * 4  # the prompt, then three steps of five tokens
    assert torch.equal(made.accepted, made.reached)


def test_half_precision_decodes() -> None:
    target = tiny_target().bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        made = decode(target, module=tiny_eagle(target).to(dtype))
        assert made.tokens.shape == (4, 16) and (made.tokens_per_step > 1).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_gives_the_same_tokens() -> None:
    target = tiny_target().cuda()
    made = decode(target, module=tiny_eagle(target).cuda())
    assert torch.equal(made.tokens.cpu(), plainly())
