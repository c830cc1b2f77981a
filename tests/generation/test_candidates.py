"""Candidates of tuning under bounds."""

from collections import defaultdict
from dataclasses import replace
from typing import Any, cast

import pytest

from lantern.drafters.trees.static import StaticTree, named
from lantern.generation.tuning import Bounds, candidates, swept
from lantern.methods import METHODS
from lantern.models.folder import Model
from tests.tiny_parts import tiny_part

KID = Bounds(max_kid=0.001, quality={"lantern++": {"2.0": 0.0004, "5": 0.02}})


def names(model: Model, bounds: Bounds | None = None, **how: Any) -> set[str]:
    return {method.name for method in candidates(model, bounds or Bounds(), **how)}


def test_without_a_bound_only_exact_methods_are_candidates(model: Model) -> None:
    found = names(model)
    assert "eagle1" in found and all(METHODS[name].exact for name in found) and not {"plain", "auto"} & found


def test_a_bound_on_total_variation_admits_relaxed_methods_at_several_settings(model: Model) -> None:
    found = candidates(model, Bounds(max_tv=0.1))
    assert {one.settings["lambda_"] for one in found if one.name == "lantern++"} == set(swept(METHODS["lantern++"])[1])
    assert {"lantern", "bounded", "bounded-window"} <= {one.name for one in found}
    exact = [one.exact for one in found]
    assert exact == sorted(exact, reverse=True)


def test_kid_figures_admit_only_the_listed_settings(model: Model) -> None:
    relaxed = [one for one in candidates(model, KID) if not one.exact]
    assert {(one.name, one.settings["lambda_"]) for one in relaxed} == {("lantern++", 2.0)}


@pytest.mark.parametrize(
    ("quality", "message"),
    [
        ({}, "a bound on KID needs the figures of an evaluation"),
        ({"eagle9": {}}, "quality figures name 'eagle9'"),
        ({"lantern++": 3}, "quality figures name"),
        ({"lantern++": {"x": 0.1}}, "quality figures of"),
        ({"lantern++": {"2": None}}, "quality figures of"),
    ],
)
def test_a_bound_on_kid_without_its_figures_is_refused(quality: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Bounds(max_kid=0.01, quality=quality)


def test_methods_are_candidates_if_the_model_has_their_networks(model: Model) -> None:
    bare = replace(model, drafter=None, add_ons={})
    found = candidates(bare, Bounds(max_tv=0.5))
    assert found and all("window" in one.options for one in found)
    parts = {"parallelspec": tiny_part("parallelspec", cast(Any, model.target))}
    drafted = names(replace(bare, add_ons=parts)) - names(bare)
    assert drafted == {"parallelspec", "parallelspec-paper"}
    assert {"eagle1"} <= names(replace(bare, drafter=model.drafter)) - names(bare)


def test_trees_and_windows_keep_to_the_sizes_allowed_and_those_of_the_model(model: Model) -> None:
    deep = tiny_part("medusa", cast(Any, model.target), depths=2)
    found = candidates(replace(model, add_ons={"medusa": deep}), Bounds(max_tv=0.5), max_nodes=12, max_depth=5)
    trees = defaultdict[str, set[StaticTree]](set)
    for one in found:
        if one.tree is not None:
            trees[one.name].add(named(one.tree))
        else:
            assert 2 <= one.settings["window"] <= model.target.config.block_size
    assert {tree.depth for tree in trees["medusa"]} <= {1, 2}
    sizes = [(tree.max_nodes, tree.depth) for tree in trees["eagle1"]]
    assert max(sizes)[0] == 12 and max(depth for _, depth in sizes) in (4, 5) and len(sizes) > 3
    k = {one.settings["k"] for one in found if one.name == "lantern"}
    assert k == {model.target.config.vocab_size - 2}  # of 100


def test_names_restrict_the_candidates(model: Model) -> None:
    assert names(model, names=["eagle1"]) == {"eagle1"}
    for name, message in (("eagle9", "cannot be tuned"), ("lantern++", "--max-tv")):
        with pytest.raises(ValueError, match=message):
            candidates(model, Bounds(), names=[name])
