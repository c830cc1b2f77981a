"""Passes of EAGLE-1 modules by kernels: on a GPU if there is one, else in Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.decoding.cache import StaticCache
from lantern.drafters.eagle.networks import Eagle
from lantern.engines.engine import EAGER
from tests.tiny import tiny_eagle

pytest.importorskip("triton", reason="Triton is not installed")
from lantern.engines.cuda import fused_eagle as module
from lantern.engines.cuda.fused_eagle import FusedEagle, fault_of, tried
from tests.engines.cuda.kinds import DEVICE, TOKENS, decoder_of, generated, target_in
from tests.engines.cuda.test_kernels import random

pytestmark = pytest.mark.usefixtures("short_blocks")


def eagle_of(form: str, layers: int = 1) -> Eagle:
    made = tiny_eagle(target_in(torch.float32, dim=32, n_head=2), form=form, layers=layers).to(DEVICE)
    made.fc.bias.data.normal_(generator=torch.Generator(DEVICE).manual_seed(3))
    if form == "guided":
        made.guidance.data.normal_(generator=torch.Generator(DEVICE).manual_seed(4))
    return made


@torch.no_grad()
def drafted(made: Eagle, run: Callable[..., Tensor]) -> Tensor:
    """Features of committed pairs of two images, then of two depths of trees: two nodes, then three below them.

    The prompts have padding.
    """
    config, stage = made.config, 5
    rows, prefix = 1 if config.form == "guided" else 2, config.cls_token_num
    sizes = {"layers": len(made.layers), "images": 2, "rows": rows, "heads": 2, "head_dim": 16, "prefix": prefix}
    cache = StaticCache(**sizes, tokens=TOKENS, stage=stage, dtype=torch.float32, device=DEVICE)
    cache.buffer.copy_(random(*cache.buffer.shape, seed=1))
    sees = (torch.arange(prefix) >= torch.tensor([1, 2])[:, None]).to(DEVICE)
    cache.first.copy_(sees.sum(1).repeat_interleave(rows)[:, None])
    mask, known = cache.tree_mask(sees, stage), torch.tensor([1, 4], device=DEVICE)

    def mask_of(_: Tensor, seen: Tensor) -> Tensor:
        return mask.update(known, seen)

    fork = torch.eye(2, 5, dtype=torch.bool)
    last = torch.tensor([[1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [0, 1, 0, 0, 1]]).bool()
    last = torch.stack([last, last[:, [1, 0, 2, 3, 4]]])  # of each image another tree
    found = []
    for depth, ancestors in enumerate((torch.ones(4, 4, dtype=torch.bool).tril(), fork, last)):
        nodes, ancestors = ancestors.shape[-2], ancestors.to(DEVICE)
        ahead = torch.arange(4, device=DEVICE) if depth == 0 else torch.full((nodes,), depth - 1, device=DEVICE)
        tokens = torch.arange(2 * nodes, device=DEVICE).view(2, nodes) * 3 % 24
        out = run(
            *(made, random(2, rows, nodes, 32, seed=depth), tokens, known[:, None] + ahead),
            mask_of,
            known=known,
            ancestors=ancestors,
            scales=torch.tensor([[3.0], [2.0]], device=DEVICE).expand(-1, nodes) if rows == 1 else None,
            cache=cache,
            slots=torch.arange(nodes, device=DEVICE) + (2 if depth == 2 else 0) + cache.first_stage_slot,
        )
        if depth == 0:
            cache.commit(torch.arange(4, device=DEVICE).expand(2, -1), known)
            known += torch.tensor([1, 3], device=DEVICE)
        found.append(out)
    return torch.cat([*found, cache.buffer[:, :, :, :-1].flatten().view(1, 1, -1, 32).expand(2, rows, -1, -1)], 2)


@pytest.mark.parametrize(("form", "layers"), [("guided", 2), ("rows", 1)])
def test_features_and_keys_of_pairs_and_trees_are_those_of_torch(form: str, layers: int) -> None:
    made = FusedEagle(eagle_of(form, layers))
    torch.testing.assert_close(drafted(made, FusedEagle.draft), drafted(made, Eagle.draft), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("form", "images"), [("guided", 1), pytest.param("rows", 2, marks=pytest.mark.slow)])
def test_drafts_by_kernels_are_those_of_torch(form: str, images: int) -> None:
    target = target_in(torch.float32, block_size=4)
    module = tiny_eagle(target, form=form).to(DEVICE)
    by_torch, decoder = (
        decoder_of("fused", "eagle1", target, Sampling(guidance=3.0), one, module, tree="grown_4_3")
        for one in (EAGER, None)
    )
    expected, made = (generated("fused", each, images) for each in (by_torch, decoder))
    used: Any = decoder.drafter
    assert isinstance(used.module, FusedEagle) and used.module.spaces
    assert torch.equal(made.tokens, expected.tokens)
    assert torch.equal(made.steps, expected.steps)  # the drafts were the same, and so were the accepted ones


def test_weights_that_change_are_read_anew() -> None:
    of = eagle_of("guided")
    made = FusedEagle(of)
    before = tried(made, FusedEagle.draft)
    of.layers[0].feed_forward.w2.weight.data.mul_(2.0)
    of.to(torch.float64).to(torch.float32)  # in other memory
    after = tried(made, FusedEagle.draft)
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(after, tried(of, Eagle.draft), atol=1e-4, rtol=1e-4)


def test_a_trial_compares_two_passes_with_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = FusedEagle(eagle_of("guided"))
    assert fault_of(made) is None and tried(made, Eagle.draft).shape[2] == 6
    run = module.fused.gate_up
    monkeypatch.setattr(module.fused, "gate_up", lambda *given, **how: (run(*given, **how), given[4].mul_(1.1)))
    assert "features differ by" in (fault_of(made) or "")
    monkeypatch.setattr(module.fused, "gate_up", None)
    assert "a pass failed: TypeError" in (fault_of(made) or "")


def test_large_passes_and_other_modules_are_left_to_torch() -> None:
    of = eagle_of("rows")
    made = FusedEagle(of)
    made.draft, features = None, torch.zeros(200, 1, 32, device=DEVICE)  # type: ignore[assignment]
    target = target_in(torch.float32, dim=32, n_head=2)
    with torch.no_grad():
        assert torch.equal(made.logits(features, target), of.logits(features, target))
    other = torch.nn.Linear(2, 2)
    assert module.fused_eagle(other) is other
