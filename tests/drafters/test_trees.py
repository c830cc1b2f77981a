import pytest
import torch

from lantern.drafters import trees
from lantern.drafters.trees import StaticTree, chain, from_widths, named
from tests.refusals import refused


@pytest.mark.parametrize(
    ("name", "per_depth"),
    [
        ("mc_sim_7b_63", [1, 4, 8, 8, 3, 2]),
        ("naive_extend_57", [1, 5, 13, 16, 14, 9]),
        ("chain", [1, 1, 1, 1, 1, 1]),
        ("narrow_10", [1, 3, 3, 2, 1, 1]),
    ],
)
def test_named_trees_have_the_published_sizes(name: str, per_depth: list[int]) -> None:
    shape = named(name).shape()
    assert torch.bincount(shape.depths).tolist() == per_depth
    assert shape.num_nodes == named(name).max_nodes == sum(per_depth)


def test_shape_of_small_trees() -> None:
    shape = StaticTree(((1, 1), (0,), (1,), (0, 0), (1, 0))).shape()
    assert shape.parents.tolist() == [0, 0, 0, 1, 2, 2] and shape.ranks.tolist() == [0, 0, 1, 0, 0, 1]
    assert shape.depths.tolist() == [0, 1, 1, 2, 2, 2] and shape.widths == (2, 2)
    above = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 2, 4}, {0, 2, 5}]
    assert shape.ancestors.tolist() == [[node in of for node in range(6)] for of in above]
    assert chain(3).choices == ((0,), (0, 0), (0, 0, 0))
    assert from_widths((2, 3)).choices == ((0,), (1,), (0, 0), (0, 1), (1, 0))


def test_grown_trees_take_the_nodes_of_highest_value() -> None:
    rates = (0.5, 0.3, 0.1)
    assert trees.grown(4, 2, rates).choices == ((0,), (1,), (0, 0), (0, 1))
    assert trees.grown(3, 1, rates).choices == ((0,), (1,), (2,))
    assert trees.grown(9, 1, rates).max_nodes == 4
    assert named("grown_8_2").depth == 2 and named("grown_15_3").max_nodes == 16


@pytest.mark.parametrize("choices", [(), ((0,), (0,)), ((1,),), ((0, 0),), ((),)])
def test_malformed_trees_raise(choices: tuple[tuple[int, ...], ...]) -> None:
    assert "tree" in refused(StaticTree, choices)


@pytest.mark.parametrize("name", ["mc_sim_7b_36", "chain_0", "chain_100", "grown_1000_3", "spine_4_1000_2"])
def test_unknown_names_are_refused_with_those_that_are_known(name: str) -> None:
    line = refused(named, name, match=r"wanted one of mc_sim_7b_63, .* N from 1 to 99\), nodes such as '0 1 0.0'")
    assert ("did you mean 'mc_sim_7b_63'" in line) == (name == "mc_sim_7b_36")


@pytest.mark.parametrize("name", [*trees.TREES, "chain_3", "grown_32_6", "grown_16_1"])
def test_a_tree_is_named_by_its_spelling(name: str) -> None:
    assert named(named(name).spelling) == named(name)
