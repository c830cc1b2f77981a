"""Fair tests of pairs: paired intervals, verdicts, and runs that resume."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lantern.cli.leaderboard import main
from lantern.eval.boards.pairs import (
    PAIRS,
    lines,
    network_of,
    page,
    parse_pair,
    refusal_of,
    refusal_of_layers,
    split_part,
    variation_difference,
    verdict,
    with_pairs,
    with_part,
)
from lantern.eval.boards.rounds import codes_ratio
from lantern.eval.metrics.distances import Estimate
from lantern.methods import METHODS
from lantern.models.folder import load_model
from tests.tiny_folder import save_tiny_model


def records(passes: list[int], variation: float = 0.0) -> list[dict[str, Any]]:
    return [{"passes": count, "total_variation": variation} for count in passes]


def test_both_methods_are_resampled_together() -> None:
    found = codes_ratio(records([10, 20, 60]), records([20, 40, 120]))
    assert (found.low, found.value, found.high) == (2.0, 2.0, 2.0)
    apart = variation_difference(records([1, 1], 3.2), records([1, 1], 1.6), codes=16)
    assert apart.value == pytest.approx(0.1) and apart.low == pytest.approx(0.1)


@pytest.mark.parametrize(("low", "high", "word"), [(1.01, 1.3, "more"), (0.7, 0.99, "less"), (0.9, 1.1, None)])
def test_a_verdict_needs_an_interval_without_equality(low: float, high: float, word: str | None) -> None:
    assert verdict(Estimate((low + high) / 2, low, high), 1.0, "more", "less") == word


def test_networks_of_other_training_allow_no_verdict() -> None:
    assert refusal_of({"drafter": None}, {"drafter": None}, images=64) is None  # the same network
    assert refusal_of({}, {"drafter": 640}, images=64) is None
    assert refusal_of({"parts/eagle3": 640}, {"drafter": 640}, images=64) is None
    assert "parts/poss 300; drafter 640" in str(refusal_of({"parts/poss": 300}, {"drafter": 640}, images=64))
    assert "not recorded" in str(refusal_of({"parts/poss": None}, {"drafter": None}, images=64))
    assert refusal_of({}, {}, images=2) == "2 images, wanted at least 3"


def test_published_pairs_name_known_methods() -> None:
    for spec in (spec for pair in PAIRS for spec in pair):
        name, _, rest = split_part(spec)[0].partition(":")
        given = dict(pair.split("=", 1) for pair in rest.split(",") if pair)
        method = METHODS[name].with_options(**METHODS[name].parsed(given))
        if split_part(spec)[1]:
            assert network_of(method).name == name.removesuffix("-paper")


def test_networks_of_other_depth_allow_no_verdict() -> None:
    assert refusal_of_layers({"drafter": 2}, {"drafter": 2}) is None  # the same network
    assert refusal_of_layers({"parts/eagle3": 1}, {"drafter": 1}) is None
    assert refusal_of_layers({"parts/medusa": None}, {"drafter": 2}) is None
    assert "parts/poss 1; drafter 2" in str(refusal_of_layers({"parts/poss": 1}, {"drafter": 2}))


def test_a_method_reads_the_network_that_is_named(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny")
    shutil.copytree(folder / "parts/poss", folder / "parts/other")
    weights = folder / "parts/other/model.safetensors"
    save_file({name: x * 1.5 for name, x in load_file(weights).items()}, weights)
    (folder / "parts/other/SHA256SUMS").unlink()
    shutil.copytree(folder / "drafter", folder / "parts/deeper")
    arguments = ["--model", str(folder), "--pairs", "poss==poss@other", "eagle1==eagle1@deeper", "poss==poss@absent"]
    arguments += ["poss==poss@deeper", "--images", "3", "--engine", "eager"]
    arguments += ["--run", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--quiet"]
    assert main(arguments) == 0
    figures = json.loads((tmp_path / "out/pairs.json").read_text())
    rows = {one["method"]: one for one in figures["methods"]}
    assert rows["poss@other"]["made_with"]["layers"] == {"parts/other": 1}
    assert rows["poss@other"]["made_with"]["training_steps"] == {"parts/other": None}
    assert "no parts/absent" in rows["poss@absent"]["reason"] and "reason" in rows["poss@deeper"]
    compared, same = figures["pairs"]
    assert compared["pair"] == ["poss", "poss@other"]
    model = load_model(folder, device="cpu")
    read = with_part(model, METHODS["poss"], "other").add_ons["poss"].state_dict()
    torch.testing.assert_close(read, {name: x * 1.5 for name, x in model.add_ons["poss"].state_dict().items()})
    assert same["pair"] == ["eagle1", "eagle1@deeper"] and same["codes_ratio"]["value"] == 1
    assert "`poss@other`" in with_pairs("<!-- pairs: poss -->\n<!-- pairs: end -->", figures)
    with pytest.raises(ValueError, match="reads no trained network"):
        network_of(METHODS["gumbel-jacobi"])


def test_a_pair_is_two_methods() -> None:
    assert parse_pair("sjd:window=4==scd") == ("sjd:window=4", "scd")
    with pytest.raises(ValueError, match="wanted METHOD==METHOD"):
        parse_pair("eagle1")


def test_pairs_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_model(tmp_path / "tiny")
    arguments = ["--model", str(folder), "--pairs", "gumbel-jacobi==eagle1", "poss==eagle1", "--images", "5"]
    arguments += ["--engine", "eager", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--quiet"]
    assert main(arguments) == 0
    figures = json.loads((tmp_path / "out/pairs.json").read_text())
    (pair,) = [one for one in figures["pairs"] if one["pair"][0] == "gumbel-jacobi"]
    assert pair["codes_ratio"]["value"] > 0 and pair["variation_difference"]["value"] == 0 and figures["fingerprint"]
    assert figures["surroundings"]["commit"] == figures["commit"] and figures["images"] == 5
    assert lines(figures) == capsys.readouterr().out.splitlines()
    monkeypatch.setattr("lantern.eval.boards.pairs.assemble", None)  # nothing is decoded again
    assert main([*arguments, "--overwrite"]) == 0
    assert json.loads((tmp_path / "out/pairs.json").read_text())["pairs"] == figures["pairs"]
    written = (tmp_path / "out/pairs.md").read_text()
    row = next(line for line in written.splitlines() if line.startswith("| `gumbel-jacobi` | `eagle1` | "))
    assert f"{pair['codes_ratio']['value']:.2f} (" in row and "| +0.000 | " in row
    lacking = figures | {"pairs": []} | {"methods": [{"method": "poss", "reason": "no weights"}]}
    assert "\n| `poss` | not measured: no weights |  |  |  |\n" in page(lacking)
    (tmp_path / "out/pairs.md").unlink()
    methods = tmp_path / "out/methods"
    methods.mkdir()
    before = "# A\n\n<!-- pairs: {} -->\nbefore\n<!-- pairs: end -->\n\n## Reference\n"
    (methods / "a.md").write_text(before.format("gumbel-jacobi") + before.format("medusa"))
    (methods / "b.md").write_text("# B\n")
    assert main(["--pairs", "--from", str(tmp_path / "out/pairs.json"), "--quiet"]) == 0
    assert (tmp_path / "out/pairs.md").read_text().count("|") == written.count("|")
    marked = (methods / "a.md").read_text()
    assert (
        row in marked and "\nbefore\n" not in marked and marked.count("## Reference") == 2 and "Not measured." in marked
    )
    assert with_pairs(marked, figures) == marked and (methods / "b.md").read_text() == "# B\n"
