"""A sweep is measured once, goes on where it was stopped, and is drawn without a model."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.cli import measuring
from lantern.cli.frontier import main
from lantern.eval import frontier, variants
from lantern.eval.frontier import FrontierOptions, Sweep
from lantern.eval.frontier_figures import fronts, point_figures, speedup, step_compression
from lantern.eval.portrait import Portrait, pack, unpack
from lantern.eval.race import warm
from lantern.eval.sweep_folder import open_folder
from lantern.eval.variants import PLAIN_KINDS, Variant
from lantern.model_folder import DTYPES
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


def test_the_interval_of_a_speedup_holds_it_and_draws_both_sides_together() -> None:
    apart = speedup(rounds_of({"plain": [1.0, 2.0, 4.0, 3.0], "mine": [1.0, 1.0, 1.0, 1.0]}), "plain", "mine")
    assert apart.low is not None and apart.high is not None and 1.0 <= apart.low < apart.value < apart.high <= 4.0
    # a machine that slows both sides alike leaves the ratio as it is
    busy = speedup(rounds_of({"plain": [2.0, 20.0, 6.0], "mine": [1.0, 10.0, 3.0]}), "plain", "mine")
    assert (busy.low, busy.value, busy.high) == (2.0, 2.0, 2.0)


def test_rounds_without_a_contender_do_not_count_for_it() -> None:
    rounds = rounds_of({"plain": [2.0, 2.0], "mine": [1.0, 1.0]}) + rounds_of({"plain": [50.0]})
    assert speedup(rounds, "plain", "mine").value == 2.0
    assert point_figures(rounds, "plain", "mine", 16)["images"] == 2


def test_step_compression_is_of_all_passes_together() -> None:
    found = step_compression([{"passes": 4}, {"passes": 12}], 16)
    assert found.value == 2.0 and (found.low, found.high) == (16 / 12, 4.0)


def test_the_price_is_a_mean_per_code_and_depths_that_nobody_reached_are_left_out() -> None:
    found = point_figures(rounds_of({"plain": [1.0] * 3, "mine": [1.0] * 3}), "plain", "mine", 16)
    assert found["quality"]["total-variation"]["value"] == pytest.approx(0.05)
    assert found["relaxed_share"] == pytest.approx(2 / 16)
    assert found["depths"] == [{"reached": 9, "accepted": 6}]


def test_the_front_knows_which_axes_are_better_low() -> None:
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


def test_plain_pictures_are_rounded_as_the_methods_are(options: FrontierOptions, tmp_path: Path) -> None:
    half = replace(options, run=tmp_path / "sweep", images=1, shown=0, variant=Variant("eager", "bf16"))
    sweep = Sweep(replace(half, specs=SPECS[:1], baseline_dtypes=("fp32", "bf16")))
    plain, exact = sweep.figures(sweep.measure())["points"]
    assert plain["drawn_by"] == "plain | eager bf16" and exact["drawn_by"] == f"{SPECS[0]} | eager bf16"
    assert plain["portraits"] == [] and plain["speedup"]["value"] == 1.0


def test_exact_points_show_plain_pictures(figures: dict[str, Any]) -> None:
    plain, exact, _ = ([one["picture"] for one in point["portraits"]] for point in figures["points"])
    assert plain == exact and len(plain) == 2
    maps = [Portrait.from_dict(one).map for one in figures["points"][1]["portraits"]]
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


def test_a_stopped_sweep_goes_on(
    options: FrontierOptions, figures: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = replace(options, run=tmp_path / "sweep")
    kept = frontier.take_turns

    def stop_in_round_two(*given: Any, **named: Any) -> Any:
        if len(list((tmp_path / "sweep" / "rounds").glob("0*.json"))) == 1:
            raise KeyboardInterrupt
        return kept(*given, **named)

    monkeypatch.setattr(frontier, "take_turns", stop_in_round_two)
    with pytest.raises(KeyboardInterrupt):
        Sweep(stopped).measure()
    first = (stopped.run / "rounds" / "00000.json").read_bytes()
    monkeypatch.setattr(frontier, "take_turns", kept)
    sweep = Sweep(stopped)
    found = sweep.figures(sweep.measure())
    assert (stopped.run / "rounds" / "00000.json").read_bytes() == first
    assert codes_of(stopped.run) == codes_of(options.run)
    for mine, whole in zip(found["points"], figures["points"], strict=True):
        assert mine["step_compression"] == whole["step_compression"] and mine["portraits"] == whole["portraits"]


def codes_of(run: Path) -> list[dict[str, str]]:
    rounds = [json.loads(path.read_text()) for path in sorted((run / "rounds").glob("0*.json"))]
    return [{name: record["codes"] for name, record in sorted(entry["made"].items())} for entry in rounds]


def test_more_pictures_go_on_where_fewer_stopped(options: FrontierOptions, figures: dict[str, Any]) -> None:
    more = replace(options, images=4)
    sweep = Sweep(more)
    found = sweep.figures(sweep.measure())
    assert found["images"] == 4 and len(found["load_average"]) == 4
    assert Sweep(options).figures([])["points"] == figures["points"]


def test_another_sweep_is_refused_with_what_differs(options: FrontierOptions, figures: dict[str, Any]) -> None:
    for change, name in (
        ({"seed": 1}, "seed"),
        ({"specs": SPECS[:1]}, "points"),
        ({"prompts": PROMPTS[:2]}, "prompts"),
    ):
        with pytest.raises(ValueError, match=f"other {name}"):
            Sweep(replace(options, **change))


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(ValueError, match="no folder of a sweep"):
        open_folder(tmp_path, {})


def test_the_clock_turns_who_is_first(options: FrontierOptions, figures: dict[str, Any]) -> None:
    rounds = [json.loads((options.run / "rounds" / f"{number:05}.json").read_text()) for number in range(3)]
    assert len({next(iter(entry["made"])) for entry in rounds}) == 3


def test_a_point_that_this_machine_cannot_run_is_listed(
    options: FrontierOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(contender: Any, jobs: Any) -> None:
        if contender.label == SPECS[1]:
            raise RuntimeError("no such kernel")
        warm(contender, jobs)

    monkeypatch.setattr(frontier, "warm", fail)
    # what fails without being compiled is an error of the code, so the variants only bear the name
    monkeypatch.setattr(variants, "prepared", lambda target, variant: target)
    monkeypatch.setattr(Variant, "is_compiled", property(lambda self: False))
    sweep = Sweep(replace(options, run=tmp_path / "sweep", images=1, shown=1, variant=Variant("compile", "fp32")))
    for _ in range(2):  # told again by a run that finds everything done
        found = sweep.figures(sweep.measure())
        assert [point["spec"] for point in found["points"]] == ["plain", SPECS[0]]
        (failed,) = found["failed"]
        assert failed["method"] == SPECS[1] and "no such kernel" in failed["reason"]


# codes as text


def test_codes_survive_packing() -> None:
    codes = torch.tensor([[0, 1, 2047, 16383, 70000]])
    assert torch.equal(unpack([pack(codes[0])]), codes)


# the command


def test_the_options_name_what_there_is() -> None:
    assert set(measuring.PLAIN_KINDS) == set(PLAIN_KINDS) and set(measuring.DTYPES) == set(DTYPES)


@pytest.fixture(scope="module")
def drawn(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib", reason="plots need matplotlib, of the extra eval")
    home = tmp_path_factory.mktemp("frontier")
    (home / "prompts.txt").write_text("\n".join(PROMPTS))
    words = ["--model", str(folder), "--points", *SPECS, "--images", "2", "--shown", "1", "--baseline", "eager"]
    words += ["--prompts-file", str(home / "prompts.txt"), "--run", str(home / "run"), "--out", str(home / "out")]
    assert main([*words, "--quiet"]) == 0
    return home / "out"


def test_a_sweep_leaves_figures_plots_and_a_page(drawn: Path) -> None:
    assert {path.name for path in drawn.iterdir()} == {f"frontier.{end}" for end in ("json", "png", "svg", "html")}
    assert (drawn / "frontier.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (
        drawn / "frontier.svg"
    ).read_text()


def test_drawing_again_needs_no_model_and_gives_the_same_bytes(
    drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontier, "load_model", refuse)
    assert main(["--from", str(drawn / "frontier.json"), "--out", str(tmp_path), "--quiet"]) == 0
    for name in ("frontier.png", "frontier.svg", "frontier.html"):
        assert (tmp_path / name).read_bytes() == (drawn / name).read_bytes()


def test_the_page_holds_all_it_shows(drawn: Path) -> None:
    page = (drawn / "frontier.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', page) and "http" not in re.sub(r"base64,[^\"]*", "", page)
    assert page.count('class="face"') == 3 and page.count('<svg class="map"') == 3
    for words in ("Frontier", "Acceptance by depth", "side by side", "relaxed: accepted only thanks", "no claim"):
        assert words in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--weights", "inception={file}"], "--data"),
        (["--weights", "inception={file}", "--data", "{folder}", "--images", "7"], "at least 8"),
        (["--weights", "{file}"], "NAME of inception, clip"),
        (["--data", "{folder}"], "judges alone"),
        (["--points", "plain"], "always measured"),
        (["--from", "{file}"], "holds no frontier"),
        (["--shown", "13"], "from 0 to 12"),
    ],
)
def test_what_cannot_be_is_one_line_and_code_2(
    words: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some.json").write_text("{}")
    given = [word.format(file=tmp_path / "some.json", folder=tmp_path) for word in words]
    assert main(["--model", str(folder), "--run", str(tmp_path / "run"), *given]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1
