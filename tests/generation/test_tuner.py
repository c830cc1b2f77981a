"""Tuning: candidates under bounds, and the choice of a method from given times of batches."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from lantern.core.sampling import Sampling
from lantern.decoding.statistics import median_interval
from lantern.drafters.trees import StaticTree, named
from lantern.generation.requests import Request
from lantern.generation.tuning import (
    FINALISTS,
    LAST_ROUNDS,
    OF_A_METHOD,
    Timing,
    batches_to_measure,
    candidates,
    race,
    swept,
    tune,
)
from lantern.methods import METHODS, Method
from lantern.models.folder import Model
from tests.refusals import refused
from tests.tiny_parts import tiny_part


def names(model: Model, **how: Any) -> set[str]:
    return {method.name for method in candidates(model, **how)}


def test_candidates_are_exact_without_a_bound_and_those_of_the_names(model: Model) -> None:
    found = names(model)
    assert "eagle1" in found and all(METHODS[name].exact for name in found) and not {"plain", "auto"} & found
    assert names(model, names=["eagle1"]) == {"eagle1"}
    for name, message in (("eagle9", "cannot be tuned"), ("lantern++", "--max-tv"), ("svip", "`lantern bench`")):
        refused(candidates, model, names=[name], match=message)


def test_a_bound_on_total_variation_admits_relaxed_methods_at_several_settings(model: Model) -> None:
    found = candidates(model, 0.1)
    values = {one.settings["lambda_"] for one in found if one.name == "lantern++"}
    assert values == {one["lambda_"] for one in swept(METHODS["lantern++"])} and swept(METHODS["eagle1"]) == [{}]
    assert {"lantern", "bounded", "bounded-window"} <= {one.name for one in found}
    exact = [one.exact for one in found]
    assert exact == sorted(exact, reverse=True)


def test_methods_are_candidates_if_the_model_has_their_networks(model: Model) -> None:
    bare = replace(model, add_ons={})
    found = candidates(bare, 0.5)
    assert found and all("window" in one.options for one in found)
    parts = {"parallelspec": tiny_part("parallelspec", cast(Any, model.target))}
    drafted = names(replace(bare, add_ons=parts)) - names(bare)
    assert drafted == {"parallelspec", "parallelspec-paper"}
    own = candidates(replace(model, add_ons=parts | {"eagle1": model.drafter}), 0.5, names=["lantern++"])
    assert {one.settings["drafts"] for one in own} == {"eagle1", "parallelspec"}
    assert {"eagle1"} <= names(replace(bare, add_ons={"eagle1": model.drafter})) - names(bare)


def test_trees_and_windows_keep_to_the_sizes_allowed_and_those_of_the_model(model: Model) -> None:
    deep = tiny_part("medusa", cast(Any, model.target), depths=2)
    add_ons = {"eagle1": model.drafter, "medusa": deep}
    found = candidates(replace(model, add_ons=add_ons), 0.5, max_nodes=12, max_depth=5)
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


def test_windows_keep_to_the_range_of_their_option(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    method = METHODS["gumbel-jacobi"]
    own = replace(method.options["window"], low=3, high=9, default=4)
    monkeypatch.setitem(METHODS, "own", replace(method, name="own", options={**method.options, "window": own}))
    assert [one.settings["window"] for one in candidates(model, names=["own"])] == [4, 8]


Scripted = Callable[[Method, int], Timing]


def decide(
    monkeypatch: pytest.MonkeyPatch, model: Model, folder: Path, script: Scripted, **how: Any
) -> tuple[dict[str, Any], list[list[str]]]:
    """Tune with given instead of measured runs, by method and number of the batch; return the profile and the races.

    The batches of the first race are numbered from 1, those of the winner alone from 101.
    """
    races: list[list[str]] = []
    keys: list[set[tuple[int, int]]] = []

    def scripted(_: Model, methods: Sequence[Method], sampling: Sampling, batches: Sequence[Any]) -> list[list[Timing]]:
        races.append([method.name for method in methods])
        keys.append({(one.seed, one.number) for batch in batches for one in batch})
        first = 0 if len(methods) == 1 else 101 if len(races[-2]) > 1 else 1
        assert first != 101 or not keys[-1] & keys[-2]  # other images
        return [[script(method, i + first) for i in range(len(batches))] for method in methods]

    monkeypatch.setattr("lantern.generation.tuning.race", scripted)
    profile, path = tune(model, out=folder / "profile.json", **how)
    assert path.is_file()
    return profile, races


def nodes(method: Method) -> int:
    return named(method.tree).max_nodes if method.tree else 1


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        (lambda n: 0.9 + 0.1 * abs(n - 8), 8),  # least for a tree of eight nodes
        (lambda n: 2.0, None),  # no tree is as fast as plain decoding
        (lambda n: 0.99, None),  # within noise
    ],
)
def test_the_fastest_tree_is_chosen(
    monkeypatch: pytest.MonkeyPatch, model: Model, tmp_path: Path, seconds: Callable[[int], float], chosen: int | None
) -> None:
    def script(method: Method, batch: int) -> Timing:
        return Timing(seconds(nodes(method)) if method.tree else 1.0, 1.0, 0.0)

    profile, races = decide(monkeypatch, model, tmp_path, script, methods=["eagle1"])
    assert races[0] == ["plain"] and max(map(len, races)) <= 1 + OF_A_METHOD
    choice = profile["choice"]
    if chosen is None:
        assert choice == profile["plain"] and choice["method"] == "plain"
    else:
        assert nodes(METHODS["eagle1"].with_options(**choice["settings"])) == chosen
        assert choice["interval_95"] == [pytest.approx(1 / 0.9, abs=1e-4)] * 2 and choice["rounds"] == LAST_ROUNDS
        assert profile["candidates"][0] == choice


def test_slow_candidates_do_not_race(monkeypatch: pytest.MonkeyPatch, model: Model, tmp_path: Path) -> None:
    def script(method: Method, batch: int) -> Timing:
        """sjd is fast in its first batch only, and in a round of the race gumbel-jacobi is slow."""
        window = method.settings.get("window", 0)
        seconds = {"sjd": 0.2 if batch == 0 else 1.5, "gumbel-jacobi": 0.4 + 0.01 * window, "scd": 3.0}
        slow = 4 if method.name == "gumbel-jacobi" and batch == 2 else 1
        return Timing(slow * seconds.get(method.name, 1.0), 2.0, 0.0)

    names = ["sjd", "gumbel-jacobi", "scd"]
    profile, races = decide(monkeypatch, model, tmp_path, script, methods=names, images=8)
    assert len(races[-2]) == 1 + FINALISTS and "scd" not in races[-2] and len(races[-1]) == 2
    assert profile["choice"]["settings"] == {"window": 2} and profile["choice"]["method"] == "gumbel-jacobi"


@pytest.mark.parametrize(("slow", "chosen"), [(1, "gumbel-jacobi"), (2, "plain")])  # of ten rounds
def test_the_winner_is_confirmed_on_other_images(
    monkeypatch: pytest.MonkeyPatch, model: Model, tmp_path: Path, slow: int, chosen: str
) -> None:
    def script(method: Method, batch: int) -> Timing:
        is_slow = 101 <= batch < 101 + slow
        return Timing(1.0 if method.is_plain else 2.0 if is_slow else 0.8 if batch > 100 else 0.5, 2.0, 0.0)

    profile, _ = decide(monkeypatch, model, tmp_path, script, methods=["gumbel-jacobi"])
    best, *others = profile["candidates"]
    assert profile["choice"]["method"] == chosen and (best["rounds"], best["speedup"]) == (LAST_ROUNDS, 1.25)
    assert best["interval_95"] == [1.25 if slow == 1 else 0.5, 1.25]
    assert all(one["interval_95"] is None for one in others)  # of four rounds and of one


def test_images_are_of_other_prompts(model: Model) -> None:
    found = [[one.prompt for [one] in batches_to_measure(model, 10, 1, (), seed)] for seed in (0, 1)]
    assert len(set(found[0])) == 10 and found[0] != found[1]


@pytest.mark.parametrize(("in_race", "chosen"), [(0.05, "lantern++"), (0.08, "plain")])
def test_a_run_that_breaks_the_bound_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, model: Model, tmp_path: Path, in_race: float, chosen: str
) -> None:
    def script(method: Method, batch: int) -> Timing:
        return Timing(0.5 if method.tree else 1.0, 2.0, in_race if batch and method.tree else 0.0)

    profile, _ = decide(monkeypatch, model, tmp_path, script, methods=["lantern++"], max_tv=0.07)
    assert profile["choice"]["method"] == chosen
    assert all(one["total_variation"] <= 0.07 for one in profile["candidates"])


def test_an_interval_holds_the_median_and_shrinks_with_the_rounds() -> None:
    few, many = median_interval([2.0, 1.0, 3.0]), median_interval([1.0, 2.0, 3.0] * 30)
    assert few == (1.0, 3.0) and many == (2.0, 2.0)
    # the ranks that hold the median with at least 95 %, by the binomial distribution
    ranks = {n: median_interval(range(1, n + 1)) for n in (1, 6, 8, 9, 20, 100)}
    assert ranks == {1: (1, 1), 6: (1, 6), 8: (1, 8), 9: (2, 8), 20: (6, 15), 100: (40, 61)}


def test_a_race_makes_whole_batches_by_every_method(model: Model) -> None:
    batches = [[Request(prompt="a cat", seed=0, number=number)] for number in range(2)]
    methods = [METHODS["plain"], METHODS["gumbel-jacobi"].with_options(window=4)]
    plain, windows = race(model, methods, model.sampling(), batches)
    assert [run.tokens_per_step for run in plain] == [1.0, 1.0]
    assert len(windows) == 2 and all(1 < run.tokens_per_step <= 4 and run.seconds > 0 for run in windows)
