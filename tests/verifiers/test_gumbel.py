"""The path that Gumbel match keeps; tests/proof compares its tokens with plain decoding's."""

from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.decoding.loop import LogitRows
from lantern.drafters.trees import named
from lantern.verifiers.gumbel import deepest_path
from tests.tiny import select
from tests.tiny_decoder import BLIND, CONDITION, KEYS, tiny_decoder


def test_the_deepest_path_is_found() -> None:
    shape = named("0 1 2 0.0 0.1 1.0 2.0 2.1").shape()  # 1 2 3 below the root, 4 5 below 1, 6 below 2, 7 8 below 3
    matches = torch.tensor(
        [
            [1, 0, 0, 0, 1, 1, 1, 1, 1],  # nothing below the root matches: deeper matches do not count
            [1, 0, 1, 0, 0, 0, 0, 0, 0],
            [1, 0, 0, 1, 1, 0, 0, 0, 1],
            [1, 1, 0, 1, 0, 0, 0, 1, 0],
        ]
    ).bool()
    path = deepest_path(matches, shape)
    assert path.length.tolist() == [0, 1, 2, 2]
    assert path.last.tolist() == [0, 2, 8, 7]
    assert path.nodes.tolist() == [[0, 0], [2, 0], [3, 8], [3, 7]]


@pytest.mark.parametrize("name", ["eagle1", "eagle1-rejection", "lantern", "tolerance", "bounded", "eagle2-rejection"])
def test_as_many_rows_are_read_as_tokens_are_sampled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, at = list[int](), LogitRows._at
    monkeypatch.setattr(LogitRows, "_at", lambda self, nodes: read.append(nodes.numel()) or at(self, nodes))
    sampling = Sampling(guidance=2.0, temperature=0.9, top_k=20, top_p=0.98)
    how: dict[str, Any] = {"keys": KEYS[:1], "keep_history": True}
    made = tiny_decoder(name, sampling=sampling).generate(select(CONDITION, [0]), **how)
    lengths = [int(step.verdict.length) for step in made.history if step.verdict is not None]
    assert read == [1] * (1 + sum(lengths) + len(lengths)) and max(lengths) > 0
    read.clear()
    tiny_decoder(name, sampling=sampling, engine=BLIND).generate(select(CONDITION, [0]), **how)
    assert read == []
