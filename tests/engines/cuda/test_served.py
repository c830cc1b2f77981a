"""Replayed rounds of a server, whose generations follow each other without a pause between their rounds."""

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern import LanternPipeline
from lantern.core.sampling import Sampling
from lantern.decoding.loop import State
from lantern.decoding.rounds import Joint
from lantern.engines.engine import EAGER
from lantern.methods import METHODS
from tests.engines.cuda.replay import Rehearsed, RehearsedEngine
from tests.engines.cuda.test_claimed import UNCAPTURED
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import small_method, tiny_decoder

NAMES = [name for name in METHODS if name not in UNCAPTURED and name != "auto"]
FEW = ("plain", "eagle1", "lantern++", "gumbel-jacobi", "medusa")


@dataclass(frozen=True)
class Alone(RehearsedEngine):
    """Generations are not joined, as those of `graph`."""

    def group(self, state: State) -> Hashable:
        return id(state)


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in FEW)) for one in NAMES])
def test_images_that_follow_each_other_have_their_own_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of the first image is replayed for the others, from their third round on."""
    monkeypatch.setattr(Rehearsed, "captured", 0)
    monkeypatch.setattr(Rehearsed, "replayed", 0)
    target, condition = tiny_target(), tiny_condition((4,))
    by_torch, decoder = (
        tiny_decoder(small_method(name), target, Sampling(guidance=3.0), engine=engine) for engine in (EAGER, Alone())
    )
    joint = Joint(decoder.engine.group, decoder.engine.drive)
    for seed in range(4):
        how: dict[str, Any] = {"keys": [(seed, 0)]}
        state = decoder.begin(condition, is_joined=True, **how)
        while not state.is_done():
            joint.take([state])
        assert torch.equal(state.result().tokens, by_torch.generate(condition, **how).tokens), f"image {seed}"
    assert Rehearsed.captured == 1 and Rehearsed.replayed > 4


def test_calls_of_a_pipeline_replay_the_rounds_of_the_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rehearsed, "captured", 0)
    pipe: Any = LanternPipeline.from_pretrained(folder, engine=Alone())
    by_torch: Any = LanternPipeline.from_pipe(pipe)
    by_torch.engine = "eager"
    inner, captured = list[torch.Tensor](), list[int]()

    def tokens(pipe: Any, seed: int, **how: Any) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        return pipe("a red apple", generator=seed, method="eagle1", output_type="latent", **how).tokens

    def within(pipe: Any, step: int, *_: object) -> None:
        if step == 4:
            inner.append(tokens(pipe, 9))

    calls: list[dict[str, Any]] = [
        {},
        {},
        {"temperature": 0.5},
        {"temperature": 0.5},
        {},
        {"callback_on_step_end": within},
        {},
    ]
    for seed, how in enumerate(calls):
        found = tokens(pipe, seed, **how)
        captured.append(Rehearsed.captured)
        assert torch.equal(found, tokens(by_torch, seed, **{k: v for k, v in how.items() if k == "temperature"}))
    assert torch.equal(inner[0], tokens(by_torch, 9))
    assert captured == [1, 1, 2, 2, 3, 4, 4]  # that within the call of another has its own
    with torch.no_grad():
        pipe.transformer.output.weight.mul_(0.5)
    assert torch.equal(tokens(pipe, 7), tokens(by_torch, 7)) and Rehearsed.captured == 5
