"""The loop with EAGLE-1 beside the matrix of tests/methods: class labels, half precision and a GPU."""

from typing import Any

import pytest
import torch

from lantern.core.types import Condition, Generation
from lantern.decoding import plain
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.eagle.eagle1 import Eagle
from lantern.drafters.trees.static import named
from lantern.models.llamagen.transformer import Transformer
from tests.tiny import tiny_eagle, tiny_target
from tests.tiny_decoder import SAMPLING, TARGET, generate


def decode(target: Transformer, module: Eagle, **how: Any) -> Generation:
    drafter = EagleDrafter(module, target, tree=named("narrow_10"), mode="gumbel", sampling=SAMPLING)
    return generate(drafter, target=target, **how)


@pytest.mark.parametrize("form", ["guided", "rows"])
def test_class_labels_are_a_condition(form: str) -> None:
    target = tiny_target(model_type="c2i", cls_token_num=1, num_classes=3)
    how: dict[str, Any] = {"condition": Condition(labels=torch.tensor([0, 2])), "keys": [(5, 0), (5, 1)]}
    made = decode(target, tiny_eagle(target, form=form), **how)
    expected = plain.generate(target, sampling=SAMPLING, **how).tokens
    assert torch.equal(made.tokens, expected) and not torch.equal(expected[0], expected[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_decodes(dtype: torch.dtype) -> None:
    target = tiny_target().bfloat16()
    made = decode(target, tiny_eagle(target).to(dtype))
    assert made.tokens.shape == (3, 16) and (made.tokens_per_step > 1).all()


@pytest.mark.gpu
def test_cuda_gives_the_same_tokens() -> None:
    target = tiny_target().cuda()
    made = decode(target, tiny_eagle(target).cuda())
    assert torch.equal(made.tokens.cpu(), decode(TARGET, tiny_eagle(TARGET)).tokens)
