"""Buffers: what is assigned is copied to the memory of its name, shape and dtype."""

import pytest
import torch

from lantern.core.types import Buffers


def test_each_name_and_entry_has_memory_of_its_own() -> None:
    held, one, two = Buffers(), torch.tensor([1.0]), torch.tensor([2.0])
    held.x = one
    place = held.x
    held.x = two
    assert held.x is place and place.tolist() == [2.0] and one.tolist() == [1.0]
    held.pair = (one, two)
    assert [entry.tolist() for entry in held.pair] == [[1.0], [2.0]] and place.tolist() == [2.0]
    held.x = torch.zeros(3)
    assert held.x.shape == (3,) and place.tolist() == [2.0]
    held.x = one
    assert held.x is place
    with pytest.raises(AttributeError, match="nothing was assigned to y yet"):
        _ = held.y
