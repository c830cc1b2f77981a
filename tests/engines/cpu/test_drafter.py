import copy
from typing import Any

import pytest
import torch
from torch import nn

from lantern.core.types import Step
from lantern.drafters.base import target_logits
from lantern.drafters.eagle.networks import EagleLayer
from lantern.engines.cpu.engine import CpuEngine
from lantern.engines.cpu.target import PackedDrafterLayer, packed_drafter
from lantern.engines.engine import EAGER
from lantern.models.llamagen.transformer import Transformer
from tests.tiny import tiny_eagle, wide_target
from tests.tiny_decoder import CONDITION, KEYS, tiny_decoder


def drafts_of(method: str, target: Transformer, *, is_fused: bool, **how: Any) -> list[Step]:
    parts, steps = tiny_decoder(method, copy.deepcopy(target), engine=CpuEngine() if is_fused else EAGER, **how), []
    parts.generate(CONDITION, keys=KEYS, callback=steps.append)
    return steps


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("eagle1", {"form": "guided", "layers": 2}),
        ("eagle1", {"form": "rows", "layers": 1}),
        ("eagle2", {"form": "guided", "layers": 1}),
        ("eagle2", {"form": "rows", "layers": 2}),
        *((name, None) for name in ("parallelspec", "vispec", "eagle3", "poss")),
    ],
    ids=str,
)
def test_fused_drafters_draft_as_eager(
    method: str, shape: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = wide_target(block_size=36)
    how = {} if shape is None else {"module": tiny_eagle(target, **shape)}
    eager = drafts_of(method, target, is_fused=False, **how)
    if shape is not None:  # all of its layers are packed
        monkeypatch.setattr(EagleLayer, "forward", None)
    fused = drafts_of(method, target, is_fused=True, **how)
    assert len(eager) == len(fused) > 5
    for a, b in zip(eager[1:], fused[1:], strict=True):
        assert torch.equal(a.tree.tokens, b.tree.tokens) and torch.equal(a.counts, b.counts)


def test_fused_8_bit_drafters_are_close_to_full_ones() -> None:
    target = wide_target().bfloat16()
    module, fused = tiny_eagle(target).bfloat16(), CpuEngine().prepare(target)
    features = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        whole, narrow = (
            target_logits(fused, made(features, tokens, tokens)).log_softmax(-1)
            for made in (packed_drafter(module), packed_drafter(module, int8=True))
        )
    assert 0 < float((narrow - whole).abs().max()) <= 0.1 * float(whole.std())
    assert packed_drafter(module, int8=True) is packed_drafter(module, int8=True) is not packed_drafter(module)


def test_drafter_is_packed_once_and_not_changed() -> None:
    module = tiny_eagle(wide_target())
    twin = packed_drafter(module)
    assert packed_drafter(module) is twin and twin is not module
    assert type(module.layers[0]) is EagleLayer and type(twin.layers[0]) is PackedDrafterLayer
    assert twin.embed_tokens is module.embed_tokens
    assert module.cache_dtype == twin.cache_dtype == torch.float32
    half = tiny_eagle(wide_target()).bfloat16()
    assert half.cache_dtype == torch.bfloat16 and packed_drafter(half).cache_dtype == torch.float32


def test_unfit_widths_and_passes_without_a_cache_are_eager() -> None:
    module = tiny_eagle(wide_target(dim=40))
    assert packed_drafter(module) is module
    other = nn.Linear(32, 32)
    assert packed_drafter(other) is other
    module = tiny_eagle(wide_target())
    features, tokens = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0)), torch.arange(5)[None]
    with torch.no_grad():
        expected = module(features, tokens, tokens)
        assert torch.allclose(packed_drafter(module)(features, tokens, tokens), expected, atol=1e-5)
