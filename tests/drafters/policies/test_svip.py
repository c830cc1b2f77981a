import pytest
import torch

from lantern.drafters.policies.svip import Svip
from tests.drafters.policies.layers import layer


def test_uncertain_nodes_other_than_the_root_have_no_children() -> None:
    entropy = torch.tensor([[0.1, 2.0, 6.0], [5.0, 0.0, 1.0]])  # sqrt(.15 H): .12 .55 .95 | .87 0 .39
    for depth, stopped in ((0, 0), (1, 2)):
        given = layer(depth, entropy=entropy)
        chances, _ = Svip(threshold=0.6).chances(given, ())
        is_over = (chances == -torch.inf).all(-1)
        assert int(is_over.sum()) == stopped
        assert given.match is not None and torch.equal(chances[~is_over], given.match[~is_over])


def test_the_constants_of_text_stop_a_distribution_of_four_nats() -> None:
    given = layer(1, entropy=torch.full((2, 3), 4.0))
    assert (Svip(threshold=0.3).chances(given, ())[0] == -torch.inf).all()


def test_zero_threshold_raises() -> None:
    with pytest.raises(ValueError, match="wanted both above 0"):
        Svip(threshold=0.0)
