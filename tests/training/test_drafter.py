"""Training of a drafter at toy size: acceptance rises, and what is trained is what drafting runs."""

from pathlib import Path

import torch

from lantern.drafters.eagle import Eagle, EagleConfig, Unroll
from lantern.io import load_component, weights_digest
from lantern.training.drafter import DrafterConfig, DrafterTask, teacher_features
from lantern.training.loop import LoopConfig, train
from tests.tiny import tiny_condition, tiny_target


def made(target, pictures: int) -> dict[str, torch.Tensor]:
    condition = tiny_condition((4,) * pictures)
    codes = torch.randint(0, 24, (pictures, 16), generator=torch.Generator().manual_seed(0))
    assert condition.embeddings is not None and condition.mask is not None
    with torch.no_grad():
        features = teacher_features(target, condition.embeddings, condition.mask, codes)
    return {"codes": codes.short(), "features": features.bfloat16()}


def test_training_raises_acceptance_at_every_depth(tmp_path: Path) -> None:
    target = tiny_target()
    loop = LoopConfig(steps=80, warmup=5, precision="fp32", log_every=40, evaluate_every=80)
    config = DrafterConfig(loop=loop, batch=8, lr=1e-2, unroll=3)
    task = DrafterTask(config, target, made(target, 32))
    before = task.evaluate()
    train(task, loop, out=tmp_path)
    after = task.evaluate()
    assert all(after[name] > before[name] + 0.05 for name in before)
    drafter = load_component(Eagle, EagleConfig, tmp_path / "drafter")
    signed = weights_digest(target.state_dict())
    assert drafter.config == EagleConfig.for_target(target.config, target=signed)


@torch.no_grad()
def test_guided_features_have_the_guided_logits() -> None:
    target = tiny_target()
    rows = made(target, 2)["features"].float()
    guided = rows[:, 1] + 3.0 * (rows[:, 0] - rows[:, 1])
    conditional, unconditional = target.head(rows[:, 0]), target.head(rows[:, 1])
    wanted = unconditional + 3.0 * (conditional - unconditional)
    torch.testing.assert_close(target.head(guided), wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_unrolled_pass_draws_on_what_drafting_would_know() -> None:
    """Pass 2 at pair j must not depend on the true feature of pair j, which drafting does not have."""
    target = tiny_target()
    drafter = Eagle(EagleConfig.for_target(target.config))
    drafter.init_weights(target.tok_embeddings.weight.data, torch.Generator().manual_seed(1))
    torch.nn.init.normal_(drafter.get_parameter("layers.0.attention.wo.weight"), std=0.3)
    data = made(target, 1)
    tokens, features = data["codes"].long(), data["features"][:, 0].float()

    def second(given: torch.Tensor) -> torch.Tensor:
        cache = Unroll()
        out = drafter.training_forward(given, tokens, unroll=cache)
        shifted = torch.cat([given[:, :1], out[:, :-1]], dim=1)
        return drafter.training_forward(shifted, tokens, unroll=cache)

    changed = features.clone()
    changed[:, 7] += 1.0
    difference = (second(changed) - second(features)).abs().amax(-1)[0]
    assert difference[7] < 1e-6
    assert difference[8] > 1e-3
