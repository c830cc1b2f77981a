"""The frontier: a sweep is measured once, resumes, and is plotted without a model."""

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.cli import command as measuring
from lantern.cli.frontier import main
from lantern.eval.boards import board, frontier, frontier_report
from lantern.eval.boards.axes import fronts
from lantern.eval.boards.frontier import RULES, SWEEP, FrontierOptions, Point, Sweep, expand
from lantern.eval.boards.rounds import open_folder, pack, point_figures, speedup, step_compression, unpack
from lantern.eval.speed.contenders import Variant
from lantern.eval.speed.race import warm
from lantern.generation.acceptance_map import AcceptanceMap
from lantern.methods.registry import METHODS
from lantern.models.folder import DTYPES
from tests.tiny_folder import save_tiny_model

SPECS = ("gumbel-jacobi:window=4", "lantern:k=6,delta=0.5")
PROMPTS = ("a red apple", "a blue cat", "two dog")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def options(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> FrontierOptions:
    return FrontierOptions(
        run=tmp_path_factory.mktemp("run") / "sweep",
        prompts=PROMPTS,
        model=str(folder),
        specs=SPECS,
        images=3,
        shown=2,
        baselines=("eager",),
        baseline_dtypes=("fp32",),
        is_quiet=True,
    )


@pytest.fixture(scope="module")
def figures(options: FrontierOptions) -> dict[str, Any]:
    sweep = Sweep(options)
    return sweep.figures(sweep.measure())


def rounds_of(seconds: dict[str, list[float]], passes: int = 4) -> list[dict[str, Any]]:
    """Rounds with these seconds, all else alike."""
    made = {"passes": passes, "total_variation": 0.8, "relaxed": 2.0, "reached": [3, 0], "accepted": [2, 0]}
    count = len(next(iter(seconds.values())))
    return [{"made": {name: made | {"seconds": of[i]} for name, of in seconds.items()}} for i in range(count)]


# figures


def test_speedup_is_the_ratio_of_medians() -> None:
    rounds = rounds_of({"plain": [2.0, 4.0, 9.0], "mine": [2.0, 1.0, 1.0]})
    assert speedup(rounds, "plain", "mine").value == 4.0


def test_speedup_interval_resamples_both_sides_together() -> None:
    apart = speedup(rounds_of({"plain": [1.0, 2.0, 4.0, 3.0], "mine": [1.0, 1.0, 1.0, 1.0]}), "plain", "mine")
    assert apart.low is not None and apart.high is not None and 1.0 <= apart.low < apart.value < apart.high <= 4.0
    # a machine that slows both sides alike leaves the ratio as it is
    busy = speedup(rounds_of({"plain": [2.0, 20.0, 6.0], "mine": [1.0, 10.0, 3.0]}), "plain", "mine")
    assert (busy.low, busy.value, busy.high) == (2.0, 2.0, 2.0)


def test_rounds_without_a_contender_are_left_out() -> None:
    rounds = rounds_of({"plain": [2.0, 2.0], "mine": [1.0, 1.0]}) + rounds_of({"plain": [50.0]})
    assert speedup(rounds, "plain", "mine").value == 2.0
    assert point_figures(rounds, "plain", "mine", 16)["images"] == 2


def test_step_compression_pools_all_passes() -> None:
    found = step_compression([{"passes": 4}, {"passes": 12}], 16)
    assert found.value == 2.0 and (found.low, found.high) == (16 / 12, 4.0)


def test_tv_is_a_mean_per_code_and_unreached_depths_are_left_out() -> None:
    found = point_figures(rounds_of({"plain": [1.0] * 3, "mine": [1.0] * 3}), "plain", "mine", 16)
    assert found["quality"]["total-variation"]["value"] == pytest.approx(0.05)
    assert found["relaxed_share"] == pytest.approx(2 / 16)
    assert found["depths"] == [{"reached": 9, "accepted": 6}]


def test_front_respects_the_direction_of_axes() -> None:
    def point(gain: float, variation: float, retrieval: float) -> dict[str, Any]:
        quality = {"total-variation": {"value": variation}, "retrieval": {"value": retrieval}}
        return {"speedup": {"value": gain}, "step_compression": {"value": gain}, "quality": quality}

    found = fronts([point(1.0, 0.0, 0.5), point(2.0, 0.1, 0.6), point(1.5, 0.2, 0.7)])
    assert found["speedup"] == {"total-variation": [0, 1], "retrieval": [1, 2]}


# measuring


def test_a_sweep_measures_every_point_against_plain(figures: dict[str, Any]) -> None:
    assert [point["spec"] for point in figures["points"]] == ["plain", *SPECS]
    plain, exact, relaxed = figures["points"]
    assert plain["speedup"]["value"] == 1.0 and plain["step_compression"]["value"] == 1.0
    assert exact["exact"] and exact["quality"]["total-variation"]["value"] == 0.0
    assert not relaxed["exact"] and relaxed["quality"]["total-variation"]["value"] > 0.0
    assert relaxed["step_compression"]["value"] > 1.0 and relaxed["depths"]
    assert figures["baseline"] == "plain | eager fp32" and figures["images"] == 3
    assert all("no claim" in point["refusal"] for point in (exact, relaxed))


def test_plain_pictures_have_the_dtype_of_the_methods(options: FrontierOptions, tmp_path: Path) -> None:
    half = replace(options, run=tmp_path / "sweep", images=1, shown=0, variant=Variant("eager", "bf16"))
    sweep = Sweep(replace(half, specs=SPECS[:1], baseline_dtypes=("fp32", "bf16")))
    plain, exact = sweep.figures(sweep.measure())["points"]
    assert plain["drawn_by"] == "plain | eager bf16" and exact["drawn_by"] == f"{SPECS[0]} | eager bf16"
    assert plain["portraits"] == [] and plain["speedup"]["value"] == 1.0


def test_exact_points_show_plain_pictures(figures: dict[str, Any]) -> None:
    plain, exact, _ = ([one["picture"] for one in point["portraits"]] for point in figures["points"])
    assert plain == exact and len(plain) == 2
    maps = [AcceptanceMap.from_dict(one["map"]) for one in figures["points"][1]["portraits"]]
    assert all(one.cells == 16 for one in maps)


def test_a_finished_sweep_decodes_nothing(
    options: FrontierOptions, figures: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontier, "line_up", refuse)
    sweep = Sweep(options)
    again = sweep.figures(sweep.measure())
    assert again["points"] == figures["points"]


def refuse(*_: object, **__: object) -> Any:
    raise AssertionError("this was measured already")


def test_without_a_terminal_every_point_and_every_round_gets_a_line(
    options: FrontierOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loud = replace(options, run=tmp_path / "run", images=2, shown=1, specs=["eagle1"], is_quiet=False)
    Sweep(loud).measure()
    lines = capsys.readouterr().err.splitlines()
    points = ["plain | eager fp32", "eagle1 | eager fp32"]
    expected = [f"images to show: {i} of 2 points, {point}" for i, point in enumerate(points, start=1)]
    assert lines == [*expected, "rounds: 2 of 4 images", "rounds: 4 of 4 images"]


def test_an_interrupted_sweep_resumes(
    options: FrontierOptions, figures: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = replace(options, run=tmp_path / "sweep")
    kept = board.interleave

    def stop_in_round_two(*given: Any, **named: Any) -> Any:
        if len(list((tmp_path / "sweep" / "rounds").glob("0*.json"))) == 1:
            raise KeyboardInterrupt
        return kept(*given, **named)

    monkeypatch.setattr(board, "interleave", stop_in_round_two)
    with pytest.raises(KeyboardInterrupt):
        Sweep(stopped).measure()
    first = (stopped.run / "rounds" / "00000.json").read_bytes()
    monkeypatch.setattr(board, "interleave", kept)
    sweep = Sweep(stopped)
    found = sweep.figures(sweep.measure())
    assert (stopped.run / "rounds" / "00000.json").read_bytes() == first
    assert codes_of(stopped.run) == codes_of(options.run)
    for mine, whole in zip(found["points"], figures["points"], strict=True):
        assert mine["step_compression"] == whole["step_compression"] and mine["portraits"] == whole["portraits"]


def codes_of(run: Path) -> list[dict[str, str]]:
    rounds = [json.loads(path.read_text()) for path in sorted((run / "rounds").glob("0*.json"))]
    return [{name: record["codes"] for name, record in sorted(entry["made"].items())} for entry in rounds]


def test_more_pictures_extend_a_finished_sweep(options: FrontierOptions, figures: dict[str, Any]) -> None:
    more = replace(options, images=4)
    sweep = Sweep(more)
    found = sweep.figures(sweep.measure())
    assert found["images"] == 4 and len(found["load_average"]) == 4
    assert Sweep(options).figures([])["points"] == figures["points"]


def test_another_sweep_is_rejected_naming_the_difference(options: FrontierOptions, figures: dict[str, Any]) -> None:
    for change, name in (
        ({"seed": 1}, "seed"),
        ({"specs": SPECS[:1]}, "points"),
        ({"prompts": PROMPTS[:2]}, "prompts"),
    ):
        with pytest.raises(ValueError, match=f"other {name}"):
            Sweep(replace(options, **change))


def test_a_folder_of_other_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(ValueError, match="is not the folder of a sweep"):
        open_folder(tmp_path, {})


def test_the_order_of_a_sweep_rotates(options: FrontierOptions, figures: dict[str, Any]) -> None:
    rounds = [json.loads((options.run / "rounds" / f"{number:05}.json").read_text()) for number in range(3)]
    assert len({next(iter(entry["made"])) for entry in rounds}) == 3


@pytest.mark.slow  # loads torch.compile
def test_a_point_that_cannot_run_is_listed(
    options: FrontierOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(contender: Any, jobs: Any) -> None:
        if contender.label == SPECS[1]:
            raise RuntimeError("no such kernel")
        warm(contender, jobs)

    monkeypatch.setattr(frontier, "warm", fail)
    # what fails without being compiled is an error of the code, so the variants only bear the name
    monkeypatch.setattr(Variant, "is_compiled", property(lambda self: False))
    sweep = Sweep(replace(options, run=tmp_path / "sweep", images=1, shown=1, variant=Variant("compile", "fp32")))
    for _ in range(2):  # reported again by a run without missing rounds
        found = sweep.figures(sweep.measure())
        assert [point["spec"] for point in found["points"]] == ["plain", SPECS[0]]
        (failed,) = found["failed"]
        assert failed["method"] == SPECS[1] and "no such kernel" in failed["reason"]


# codes as text


def test_codes_round_trip_through_text() -> None:
    codes = torch.tensor([[0, 1, 2047, 16383, 70000]])
    assert torch.equal(unpack([pack(codes[0])]), codes)


# the command


def test_options_match_known_dtypes() -> None:
    assert set(measuring.DTYPES) == set(DTYPES)


@pytest.fixture(scope="module")
def sampled(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib", reason="plots need matplotlib, of the extra eval")
    home = tmp_path_factory.mktemp("frontier")
    (home / "prompts.txt").write_text("\n".join(PROMPTS))
    words = ["--model", str(folder), "--points", *SPECS, "--images", "2", "--shown", "1", "--baseline", "eager"]
    words += ["--prompts-file", str(home / "prompts.txt"), "--run", str(home / "run"), "--out", str(home / "out")]
    assert main([*words, "--quiet"]) == 0
    return home / "out"


def test_a_sweep_writes_figures_plots_and_a_page(sampled: Path) -> None:
    assert {path.name for path in sampled.iterdir()} == {f"frontier.{end}" for end in ("json", "png", "svg", "html")}
    assert (sampled / "frontier.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (
        sampled / "frontier.svg"
    ).read_text()


def test_redrawing_needs_no_model_and_gives_the_same_bytes(
    sampled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lantern.eval.boards.board.load_model", refuse)
    assert main(["--from", str(sampled / "frontier.json"), "--out", str(tmp_path), "--quiet"]) == 0
    for name in ("frontier.png", "frontier.svg", "frontier.html"):
        assert (tmp_path / name).read_bytes() == (sampled / name).read_bytes()


def test_page_is_self_contained(sampled: Path) -> None:
    page = (sampled / "frontier.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', page) and "http" not in re.sub(r"base64,[^\"]*", "", page)
    assert page.count('class="face"') == 3 and page.count('<svg class="map"') == 3
    for words in (
        "Frontier",
        "Acceptance by depth",
        "Images at the same seeds",
        "dot: relaxed, accepted only because",
        "no claim",
    ):
        assert words in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--weights", "inception={file}"], "--data"),
        (["--weights", "inception={file}", "--data", "{folder}", "--images", "7"], "at least 8"),
        (["--weights", "{file}"], "NAME of inception, clip"),
        (["--data", "{folder}"], "--data is only used by metrics"),
        (["--points", "plain"], "always measured"),
        (["--from", "{file}"], "holds no frontier"),
        (["--shown", "13"], "from 0 to 12"),
    ],
)
def test_invalid_input_gives_one_line_and_exit_status_2(
    words: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some.json").write_text("{}")
    given = [word.format(file=tmp_path / "some.json", folder=tmp_path) for word in words]
    assert main(["--model", str(folder), "--run", str(tmp_path / "run"), *given]) == 2
    output = capsys.readouterr().err
    assert message in output and len(output.splitlines()) == 1


def test_slashes_expand_to_a_grid() -> None:
    found = [point.spec for point in expand(["lantern:k=10/100,delta=0.1/0.2", "eagle1"])]
    assert found == [
        "lantern:k=10,delta=0.1",
        "lantern:k=10,delta=0.2",
        "lantern:k=100,delta=0.1",
        "lantern:k=100,delta=0.2",
        "eagle1",
    ]


def test_a_repeated_point_is_measured_once() -> None:
    assert len(expand(["gumbel-jacobi:window=8/16", "gumbel-jacobi:window=16"])) == 2


def test_default_sweep_varies_every_kind_of_setting() -> None:
    points = expand(SWEEP)
    assert 12 <= len(points) <= 16
    assert {name for point in points for name in point.settings} >= {"k", "delta", "lambda_", "omega", "window", "tree"}
    exact = {METHODS[point.family].exact for point in points}
    assert exact == {True, False}


def test_label_has_method_and_settings() -> None:
    assert Point("lantern++:k=10,lambda_=2").label == "lantern++ k 10, λ 2"
    assert Point("eagle1").label == "eagle1"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lantern:k", "expected NAME=VALUE"),
        ("lantern:k=1//2", "expected NAME=VALUE"),
        ("lantern:lambda_=2", "has no setting lambda"),
        ("lantren", 'did you mean "lantern"'),
        ("plain", "always measured"),
    ],
)
def test_invalid_points_are_rejected(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand([spec])


def test_rules_are_drawn_as_one_curve_each(figures: dict[str, Any], tmp_path: Path) -> None:
    curves = {**figures, "are_rules": True}
    plot = frontier_report.draw_curves(curves)
    assert len(plot.axes) == len(frontier_report.plotted_axes(curves))
    labels = plot.axes[0].get_legend_handles_labels()[1]
    assert labels == ["plain (exact)", "gumbel-jacobi (exact)", "lantern"]
    both = [frontier_report.save_plot(one, tmp_path / name) for name, one in (("curves", curves), ("points", figures))]
    assert both[0][1].read_bytes() != both[1][1].read_bytes()


def test_the_page_of_rules_has_a_row_for_each_point_and_a_link_to_the_plot(
    figures: dict[str, Any], tmp_path: Path
) -> None:
    written = frontier_report.save_rules(figures, tmp_path / "results/rules.png", tmp_path / "rules.md")
    text = written.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(figures["points"]) and rows[0].startswith("| `gumbel-jacobi")  # exact ones first
    relaxed = next(point for point in figures["points"] if not point["exact"])
    compression, spent = relaxed["step_compression"]["value"], relaxed["quality"]["total-variation"]["value"]
    row = next(line for line in rows if f"`{relaxed['spec']}`" in line)
    assert f"| {compression:.2f}" in row and f"| {spent:.3f} |" in row
    assert "](results/rules.png)" in text and figures["fingerprint"][:12] in text


def test_every_rule_has_three_or_four_strengths_on_one_tree_or_window() -> None:
    relaxed = [point for point in expand(RULES) if not METHODS[point.family].exact]
    families = [point.family for point in relaxed]
    assert len(set(families)) == 10
    for point in relaxed:
        method = METHODS[point.family].with_options(**METHODS[point.family].parsed(point.settings))
        if point.family == "vvs":  # behind the codes that are not verified, the tree of the others
            assert method.tree == f"spine_{method.settings['skip']}_8_2" and families.count("vvs") == 3
        else:
            assert method.tree == "grown_8_2" or point.family == "bounded-window"
            same = [one for one in relaxed if one.family == point.family]
            windows = Counter(one.settings.get("window") for one in same)
            assert windows == ({"16": 4, "32": 2, "64": 2} if point.family == "bounded-window" else {None: 4})


def test_points_without_their_add_on_are_left_out_by_default(options: FrontierOptions, tmp_path: Path) -> None:
    shutil.copytree(options.model, tmp_path / "model")
    shutil.rmtree(tmp_path / "model/parts/medusa")
    wanted = replace(options, run=tmp_path / "run", model=str(tmp_path / "model"), images=1, shown=0)
    wanted = replace(wanted, specs=(*SPECS, "vadusa:samples=2/3"))
    with pytest.raises(ValueError, match='method "vadusa" needs the trained part "medusa"'):
        Sweep(wanted).measure()
    sweep = Sweep(replace(wanted, run=tmp_path / "other", leaves_out=True))
    assert set(sweep.left_out) == {"vadusa:samples=2", "vadusa:samples=3"}
    assert all("medusa" in command for command in sweep.left_out.values())
    figures = sweep.figures(sweep.measure())
    assert [point["spec"] for point in figures["points"]] == ["plain", *SPECS]
    assert figures["left_out"] == sweep.left_out
