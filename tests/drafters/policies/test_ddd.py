import pytest
import torch

from lantern.drafters.policies.ddd import Ddd
from tests.drafters.policies.layers import layer, pool


def test_beams_of_low_probability_have_no_children() -> None:
    reach = torch.tensor([[0.3, 0.2, 0.1], [0.05, 0.04, 0.01]]).log()  # probabilities .6 and .1
    given = layer(reach=reach)
    chances, _ = Ddd(alive=0.2).chances(given, ())
    assert given.match is not None
    assert torch.equal(chances[0], given.match[0]) and (chances[1] == -torch.inf).all()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_nothing_stops_before_the_first_check(depth: int) -> None:
    given = layer(depth, reach=torch.full((2, 3), -9.0))
    stops = (Ddd(alive=0.5, check=2).chances(given, ())[0] == -torch.inf).all()
    assert bool(stops) == (depth >= 2)


def test_one_more_depth_only_where_the_last_beam_continues() -> None:
    values = [[0.9, 0.8, 0.0], [0.9, 0.1, 0.05]]
    size = Ddd(alive=0.3).preferred_size(pool(values, [1, 2, 2], deepest=2, most=9), ())
    assert size.depth.tolist() == [3, 2]


def test_share_outside_0_to_1_raises() -> None:
    with pytest.raises(ValueError, match="wanted a share between 0 and 1"):
        Ddd(alive=1.0)
