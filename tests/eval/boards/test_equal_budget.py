"""Comparisons at equal budget: claims, alternatives and verdicts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.drafters.trees.static import named
from lantern.eval.boards.contest import LeaderboardOptions
from lantern.eval.boards.equal_budget import (
    CLAIMS,
    FIGURES,
    INT4,
    Claim,
    Constants,
    at_tree,
    base_of,
    claims,
)
from lantern.eval.boards.leaderboard import Leaderboard, late, outcome, ratio_of, verdict
from lantern.eval.metrics.distances import Estimate
from lantern.eval.speed.contenders import PLAIN
from lantern.methods import METHODS
from tests.tiny_folder import save_tiny_model

RATES = [[0.6, 0.2, 0.1], [0.5, 0.1, 0.05], [0.4, 0.1, 0.0]]
# published configurations whose drafts and verification no constant tree has are left out
POLICIES = [
    name
    for name, method in METHODS.items()
    if method.spec.policy is not None and (base_of(method) is not None or not name.endswith("-paper"))
]


def constants(base: str, depth: int) -> Constants:
    return Constants(RATES, depth)


def test_every_policy_has_a_claim_at_its_number_of_nodes() -> None:
    found = claims(dict.fromkeys(POLICIES, 6.4), constants)
    assert [claim.method for claim in found] == POLICIES
    for claim in found:
        assert claim.specs[0] == claim.method and len(claim.specs) >= 2
        for spec in claim.specs[1:]:
            base, _, tree = spec.partition(":tree=")
            assert named(tree).max_nodes - 1 == 6 and METHODS[base].spec.mode == METHODS[claim.method].spec.mode


def test_alternatives_have_the_verification_of_the_policy() -> None:
    assert base_of(METHODS["eagle2"]) == "eagle1" and base_of(METHODS["eagle2-rejection"]) == "eagle1-rejection"
    assert base_of(METHODS["bounded-window"]) is None


def test_constant_tree_has_the_best_expected_acceptance() -> None:
    # .6, .6 x .5, .2, .6 x .5 x .4: as far down as it pays
    assert Constants(RATES, 3).tree(4, 3).choices == ((0,), (1,), (0, 0), (0, 0, 0))
    assert Constants(RATES, 3).tree(4, 2).depth == 2
    assert Constants([[0.0] * 3] * 3, 3).tree(5, 3).max_nodes == 6


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.method} {claim.specs[0]}")
def test_claims_name_known_methods_and_figures(claim: Claim) -> None:
    assert claim.method in METHODS and set(claim.figures) <= set(FIGURES) and claim.tests
    for spec in claim.contenders:
        name, _, rest = spec.removesuffix(INT4).partition(":")
        options = dict(pair.split("=", 1) for pair in filter(None, rest.split(",")))
        method = METHODS[name]
        method.with_options(**{option: method.option(option).parse(text) for option, text in options.items()})


def test_drafters_are_compared_at_one_tree() -> None:
    for claim in CLAIMS:
        trees = {tree_of(spec) for spec in claim.contenders if METHODS[spec.partition(":")[0].removesuffix(INT4)].tree}
        assert claim.method == "specmquant" or len(trees) <= 1
    assert at_tree("eagle1", METHODS["eagle1"].tree) == "eagle1"


def tree_of(spec: str) -> str | None:
    name, _, tree = spec.partition(":tree=")
    return tree or METHODS[name.removesuffix(INT4)].tree


def test_absent_methods_have_no_claim() -> None:
    assert claims({"eagle1": 8.0, "lantern": 8.0}, constants) == []
    assert [claim.method for claim in claims({"poss": 15.0}, constants)] == ["poss"]


# how they come out


@pytest.mark.parametrize(
    ("ratio", "more", "expected"),
    [
        (Estimate(1.2, 1.1, 1.3), True, "holds"),
        (Estimate(1.2, 1.1, 1.3), False, "fails"),
        (Estimate(1.2, 0.9, 1.3), True, "open"),
        (Estimate(0.4), False, "holds"),
        (Estimate(1.0), True, "fails"),
        (Estimate(0.9, 0.8, 0.95), True, "fails"),
        (Estimate(1.0, 1.0, 1.0), True, "open"),
    ],
)
def test_verdict_follows_the_interval(ratio: Estimate, more: bool, expected: str) -> None:
    assert verdict(ratio, more) == expected


def rounds_of(**made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"made": dict(zip(made, records, strict=True))} for records in zip(*made.values(), strict=True)]


def record(passes: int, seconds: float, taken: int = 1) -> dict[str, Any]:
    return {"passes": passes, "seconds": seconds, "reached": [9, 5, 4], "accepted": [5, 4, taken]}


def test_ratios_use_the_same_pictures() -> None:
    rounds = rounds_of(a=[record(10, 1.0, 2), record(20, 1.0, 2)], b=[record(20, 2.0), record(40, 2.0)])
    tau, seconds, speed = (ratio_of(f, "a", "b", rounds) for f in ("step_compression", "seconds", "codes_per_second"))
    assert tau is not None and (tau.value, tau.low, tau.high) == (2.0, 2.0, 2.0)
    assert seconds is not None and seconds.value == 0.5 and speed is not None and speed.value == 2.0
    deep = ratio_of("late_acceptance", "a", "b", rounds)
    assert deep is not None and deep.value == 2.0 and late([rounds[0]["made"]["a"]]) == (2, 4)
    assert ratio_of("kv_length", "a", "b", rounds) is None


def test_a_claim_without_alternatives_is_not_measured() -> None:
    claim = CLAIMS[0]
    figures = dict.fromkeys(FIGURES, 1.0)
    found = outcome(claim.tests[0], claim, {claim.specs[0]: figures}, None, [])  # type: ignore[arg-type]
    assert found["outcome"] == "not measured" and found["ratio"] is None


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Leaderboard:
    home = tmp_path_factory.mktemp("claims")
    options = LeaderboardOptions(
        run=home / "run",
        prompts=("a red apple", "two dog"),
        model=str(save_tiny_model(home / "tiny")),
        specs=("eagle2", "eagle2-rejection"),
        temperatures=(1.0,),
        images=(2,),
        equal_budget=1,
        baselines=("eager",),
        baseline_dtypes=("fp32",),
        is_quiet=True,
    )
    found = Leaderboard(options)
    found.measure()
    return found


def test_claims_are_measured_in_the_first_rounds(board: Leaderboard) -> None:
    first, second = board.contests[0].folder.rounds(2).values()
    rivals = {name for name in first["made"] if ":tree=" in name}
    assert len(rivals) >= 2 and not any(name in second["made"] for name in rivals)
    gumbel, rejection = board.figures()["equal_budget"]
    assert gumbel["images"] == 1 and gumbel["missing"] == [] and len(gumbel["entries"]) >= 2
    assert {entry["nodes_per_pass"] for entry in gumbel["entries"]} == {15.0}
    assert all(test["outcome"] == "open" for test in gumbel["tests"]), "of one image"
    assert rejection["entries"][1]["spec"].startswith("eagle1-rejection:tree=")


def test_rates_are_measured_once_on_pictures_of_another_seed(board: Leaderboard) -> None:
    contest = board.contests[0]
    kept = contest.constants("eagle1", 6)
    assert all(0 <= rate <= 1 for row in kept.rates for rate in row) and any(row[0] > 0 for row in kept.rates)
    assert contest.constants("eagle1", 6) == kept


def test_a_4_bit_contender_leaves_the_target_unchanged(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="4-bit weights need torchao, of the extra eval")
    options = LeaderboardOptions(
        run=tmp_path / "run",
        prompts=("a",),
        model=str(save_tiny_model(tmp_path / "tiny", multiple_of=32)),
        specs=("eagle1",),
        temperatures=(1.0,),
        images=(1,),
        equal_budget=0,
        is_quiet=True,
    )
    contest = Leaderboard(options).contests[0]
    plain = contest.enter(PLAIN, options.variant).parts.target
    quantised = contest.enter(f"{PLAIN}{INT4}", options.variant)
    assert quantised.parts.target is not plain and quantised.label == f"{PLAIN}{INT4}"
    assert all(type(weight) in (torch.Tensor, torch.nn.Parameter) for weight in plain.parameters())
