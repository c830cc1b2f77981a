"""Walks read only the rows that they visit; the matrix of tests/methods compares bits with walks over all rows."""

from typing import Any

import pytest

from lantern.core.sampling import Sampling
from lantern.decoding.rows import LogitRows
from tests.tiny import select
from tests.tiny_decoder import BLIND, CONDITION, KEYS, tiny_decoder


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
