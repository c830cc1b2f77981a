"""A board: rounds are measured once and resume, figures are paired, quality is that of `lantern eval`; draft passes."""

import json
import math
import re
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lantern.cli.command import run_command
from lantern.cli.measure import leaderboard
from lantern.eval.boards import board, table
from lantern.eval.boards.board import expand, parse_pair, shipped
from lantern.eval.boards.draft_passes import against, counts
from lantern.eval.boards.plot import save
from lantern.eval.boards.table import correct, figures, figures_of, markdown, rendered
from lantern.eval.json_lines import read_lines
from lantern.eval.metrics import quality
from lantern.eval.speed import contenders
from lantern.eval.speed.contenders import Variant, name_of
from lantern.eval.speed.race import pack
from lantern.generation.requests import shuffled_prompts
from lantern.methods import METHODS
from lantern.models.folder import load_model
from tests.cli.calls import Capture
from tests.eval.tiny_metrics import save_pictures, save_tiny_clip
from tests.eval.workers import Patch
from tests.refusals import refused
from tests.tiny_folder import save_tiny_model

RELAXED = "bounded-window:window=4,delta=0.4"
MEASURED = ("eagle1", "eagle1-rejection", "lantern++:k=6", "bounded-window:window=4,delta=0.05/0.4")
PAIRS = ("eagle1==eagle1-rejection", "eagle1==gumbel-jacobi")


def main(*words: object) -> int:
    return run_command(leaderboard, [str(word) for word in words])


@pytest.fixture(scope="module")
def board_words(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of the leaderboard, without its number of images and its file."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    prompts.write_text("a red apple\na blue cat\ntwo dog\n")
    words = ["--model", str(folder), "--prompts-file", str(prompts), "--engine", "eager", "--quiet"]
    return [*words, "--baseline", "eager", "--temperature", "1", "0", "--methods", *MEASURED, "--pairs", *PAIRS]


@pytest.fixture(scope="module")
def board_file(board_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A leaderboard of four images per method."""
    path = tmp_path_factory.mktemp("run") / "board.jsonl"
    assert main(*board_words, "--images", 4, "--out", path) == 0
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return figures_of(path)["boards"][0]["rows"]


def test_rows_have_the_figures_of_every_method(board_file: Path) -> None:
    found = figures_of(board_file)
    warm, greedy = found["boards"]
    rows = {row["method"]: row for row in warm["rows"]}
    assert (warm["temperature"], greedy["temperature"], warm["images"]) == (1.0, 0.0, 4)
    assert list(rows) == list(found["methods"]) and len(rows) == 6
    assert set(warm["plain"]) == {name_of("plain", Variant("eager", dtype)) for dtype in ("fp32", "bf16")}
    assert warm["baseline"] == min(warm["plain"], key=lambda name: warm["plain"][name]["median"])
    assert found["failures"] == []
    assert warm["tokens_per_step"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert rows["eagle1"]["nodes_per_step"] > 1
    assert rows["eagle1"]["differing_images"] == 0 and rows["eagle1"]["images"] == 4
    assert rows["eagle1"]["tokens_per_step"]["value"] > 1 and rows["eagle1"]["total_variation"]["value"] == 0
    assert "differing_images" not in rows["eagle1-rejection"]  # it promises the distribution
    assert next(row for row in greedy["rows"] if row["method"] == "eagle1-rejection")["differing_images"] == 0
    deltas = (0.05, 0.4)
    gentle, strong = (rows[f"bounded-window:window=4,delta={delta}"]["total_variation"] for delta in deltas)
    assert 0 < gentle["value"] <= 0.05 < strong["value"] <= 0.4
    assert all("no claim" in row["speedup"]["refusal"] for row in rows.values())
    assert [pair["method"] for pair in rows["eagle1"]["against"]] == ["eagle1-rejection", "gumbel-jacobi"]
    for pair in rows["eagle1"]["against"]:
        assert pair["tokens_ratio"]["low"] <= pair["tokens_ratio"]["value"] <= pair["tokens_ratio"]["high"]
        assert pair["variation"] == {"value": 0.0, "low": 0.0, "high": 0.0} and "verdict" in pair


def test_a_longer_run_extends_a_shorter_one(
    board_file: Path, board_words: list[str], tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    path = tmp_path / "board.jsonl"
    shutil.copy(board_file, path)
    before, names, take = path.read_bytes(), list[str](), board.take
    monkeypatch.setattr(board, "take", lambda one, *given, **how: names.append(one.label) or take(one, *given, **how))
    assert main(*board_words, "--images", 4, "--out", path) == 0
    assert path.read_bytes() == before and not names
    path.write_bytes(before[: before[:-1].rfind(b"\n") + 20])  # killed while the last line was written
    assert main(*board_words, "--images", 4, "--out", path) == 0
    assert len(names) == 1
    for one, other in zip(rows_of(path), rows_of(board_file), strict=True):
        assert one["tokens_per_step"] == other["tokens_per_step"] and one["against"] == other["against"]
    capsys.readouterr()
    assert main(*board_words, "--images", 5, "--out", path, "--json") == 0
    assert len(names) == 1 + 16 and json.loads(capsys.readouterr().out)["boards"][0]["rows"][0]["images"] == 5
    assert main(*board_words, "--images", 5, "--out", path, "--seed", 1) == 2
    assert "begun with" in capsys.readouterr().err


def test_batches_make_the_same_images(board_file: Path, board_words: list[str], tmp_path: Path) -> None:
    words = [*board_words[:7], "--baseline", "eager", "--methods", "eagle1", RELAXED]
    assert main(*words, "--images", 4, "--batch", 2, "--out", tmp_path / "b.jsonl") == 0
    one, other = (rows_of(path) for path in (board_file, tmp_path / "b.jsonl"))
    figures = {row["method"]: row["tokens_per_step"] for row in one}
    assert {row["method"]: row["tokens_per_step"] for row in other}.items() <= figures.items()
    rounds = [line for line in read_lines(tmp_path / "b.jsonl")[1] if "eagle1" in line.get("contender", "")]
    assert [len(line["images"]) for line in rounds] == [2, 2]


def test_the_table_is_printed_without_the_model(board_file: Path, tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- rows: pairs -->\n<!-- end rows -->\n")
    assert main("--from", board_file, "--docs", page, "--json") == 0
    (tmp_path / "board.json").write_text(capsys.readouterr().out)
    assert "| `eagle1` | `gumbel-jacobi` | 0 | " in page.read_text()
    assert main("--from", tmp_path / "board.json") == 0
    text = capsys.readouterr().out
    assert "| same tokens |" in text and "| `eagle1` | `eagle1-rejection` | 1 | " in text


def test_methods_that_lack_a_part_or_fail_have_a_row_and_those_that_fail_are_tried_again(
    copied: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    shutil.rmtree(copied / "parts")
    entered, take, path, is_broken = contenders.entered, board.take, tmp_path / "b.jsonl", True

    def without_kernel(stable: Any, spec: str, *given: Any) -> Any:
        if is_broken and spec == "eagle1":
            raise RuntimeError("the kernel is missing")
        return entered(stable, spec, *given)

    def without_device(contender: Any, number: int, *given: Any, **how: Any) -> Any:
        if is_broken and contender.label == "eagle1-rejection" and number == 1:
            raise RuntimeError("the device is lost")
        return take(contender, number, *given, **how)

    monkeypatch.setattr(contenders, "entered", without_kernel)
    monkeypatch.setattr(board, "take", without_device)
    words = ["--model", copied, "--engine", "eager", "--baseline", "eager", "--quiet", "--images", 3, "--out", path]
    words += ["--methods", "eagle1", "medusa", "eagle1-rejection", "gumbel-jacobi"]
    assert main(*words) == 1
    shown, errors = capsys.readouterr()
    assert "eagle1 failed: RuntimeError: the kernel is missing" in errors
    assert "eagle1-rejection failed: RuntimeError: the device is lost" in errors
    assert "not measured: RuntimeError: the kernel is missing" in shown and "- `medusa` not measured: " in shown
    assert [row.get("images") for row in rows_of(path)] == [None, None, 1, 3]
    is_broken = False
    assert main(*words) == 0
    assert [row.get("images") for row in rows_of(path)] == [3, None, 3, 3]


def test_quality_is_that_of_eval(board_words: list[str], tmp_path: Path, monkeypatch: Patch) -> None:
    path, clip = tmp_path / "board.jsonl", save_tiny_clip(tmp_path / "clip")
    seen: list[Any] = []
    measure = quality.measure

    def noting(paths: Any, *given: Any, **named: Any) -> Any:
        seen.append(np.stack([np.asarray(Image.open(one)) for one in paths]))
        return measure(paths, *given, **named)

    monkeypatch.setattr(quality, "measure", noting)
    words = [*board_words[:7], "--baseline", "eager", "--methods", "eagle1", MEASURED[-1], "--temperature", "1", "0"]
    words += ["--images", 2, "--out", path, "--metrics", "clip", "--weights", f"clip={clip}"]
    assert main(*words) == 0
    found = figures_of(path)
    rows = {row["method"]: row for row in found["boards"][0]["rows"]}
    assert len(seen) == 6 and "changes" not in rows["eagle1"]  # plain decoding and the relaxed methods
    change, plain = rows[RELAXED]["changes"]["clip"], found["boards"][0]["quality_of_plain"]
    assert change["low"] <= change["value"] <= change["high"] and plain["clip"]["low"] is not None
    assert (seen[0] != seen[-1]).any()
    before = path.read_bytes()
    assert main(*words) == 0 and len(seen) == 6 and path.read_bytes() == before  # measured once
    other, real = save_tiny_clip(tmp_path / "other", seed=1), tmp_path / "real"
    save_pictures(real, 2)
    for number, given in enumerate(((f"clip={other}",), ("--metrics", "clip-lantern"), ("--reference", real))):
        assert main(*words, *given) == 0 and len(seen) == 12 + 6 * number
        assert (figures_of(path)["boards"][0]["quality_of_plain"] == plain) == ("--reference" in given)
    assert main(*words) == 0 and len(seen) == 24 and figures_of(path) == found  # the figures of what was given last
    for number, pixels in enumerate(seen[0]):  # of plain decoding, whose PSNR to itself is infinite
        Image.fromarray(pixels).save(real / f"{number:06}.png")
    for extra in real.glob("???.png"):
        extra.unlink()
    assert main(*words, "--metrics", "psnr", "--reference", real) == 0
    assert list(figures_of(path)["boards"][0]["quality_of_plain"]) == ["clip"]
    path.write_bytes(before.replace(b'"judged"', b'"earlier"'))
    assert figures_of(path) == found


def test_metrics_that_cannot_be_measured_are_refused_before_rounds(
    board_words: list[str], copied: Path, tmp_path: Path, capsys: Capture
) -> None:
    path, clip = tmp_path / "b.jsonl", save_tiny_clip(tmp_path / "clip")
    save_pictures(tmp_path / "real", 2)
    shutil.rmtree(copied / "vqvae")
    for words, message in {
        ("psnr", "--reference", tmp_path / "real"): "got 8 images and 2 reference images",
        ("clip", "--weights", f"clip={clip}", "--model", copied): "has no vqvae/ folder",
    }.items():
        capsys.readouterr()
        assert main(*board_words, "--out", path, "--metrics", *words) == 2 and not path.exists()
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("spec", dict.fromkeys([*chain(*map(parse_pair, shipped("pairs"))), *shipped("rules")]))
def test_published_specs_name_known_methods(spec: str) -> None:
    for one in expand(spec):
        name, _, rest = one.partition(":")
        given = dict(pair.split("=", 1) for pair in rest.split(",") if pair)
        METHODS[name].with_options(**METHODS[name].parsed(given))


def test_prompts_of_another_seed_have_another_order() -> None:
    first, again, other = (shuffled_prompts(None, seed) for seed in (0, 0, 1))
    assert first == again != other and sorted(first) == sorted(other)


def test_both_methods_are_resampled_together_and_equal_images_are_no_test() -> None:
    found = table.ratio([(20, 10), (40, 20), (120, 60)])
    assert (found.low, found.value, found.high) == (2.0, 2.0, 2.0)
    assert table.p_value(np.zeros(20), 1.0) is None
    assert table.p_value(np.arange(1.0, 17.0), 1.0) == pytest.approx(2 ** (1 - 16), rel=1e-4)
    assert table.p_value(np.arange(1.0, 17.0), -1.0) == 1.0  # it contradicts the mean


def around(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.05, "high": value + 0.05}


def test_verdicts_are_those_that_holm_leaves() -> None:
    pairs: list[dict[str, Any]] = [
        {"p": {"tokens": p, "variation": None}, "tokens_ratio": around(value), "variation": around(0.0)}
        for p, value in ((0.02, 1.1), (0.001, 0.9), (0.04, 1.2), (0.012, 1.3))
    ]
    correct(pairs)
    assert [pair["p_holm"]["tokens"] for pair in pairs] == pytest.approx([0.04, 0.004, 0.04, 0.036])
    words = ["more tokens per step", "fewer tokens per step", "more tokens per step", "more tokens per step"]
    assert [pair["verdict"] for pair in pairs] == words
    pairs.append({"p": {"tokens": 0.03, "variation": 0.5}, "tokens_ratio": around(1.1), "variation": around(0.0)})
    correct(pairs)  # two tests more
    assert [pair["verdict"] for pair in pairs] == ["none", words[1], "none", "none", "none"]
    pairs[1]["tokens_ratio"] = around(1.02)  # its interval contains 1
    correct(pairs)
    assert pairs[1]["verdict"] == "none"


def test_the_foreground_has_its_share_of_steps_and_the_background_the_most_frequent_token() -> None:
    # runs of 1, 3 and 2 tokens; foreground are the first, one of the second run and the last two
    image = {"tokens": pack(torch.tensor([5, 7, 7, 5, 5, 5])), "runs": "1 3 2"}
    found = table.foreground([image, image], 7)
    assert found.value == pytest.approx(4 / (1 + 1 / 3 + 1 / 2 + 1 / 2)) and found.low == found.high == found.value
    tokens = torch.arange(40)
    assert table.background_of([{"tokens": pack(tokens)}]) is None
    assert table.background_of([{"tokens": pack(torch.where(tokens < 8, 3, tokens))}]) == 3


def test_networks_of_other_training_allow_no_verdict() -> None:
    assert table.refusal_of({"drafter": None}, {"drafter": None}) is None  # the same network
    assert table.refusal_of({}, {"drafter": 640}) is None
    assert table.refusal_of({"parts/eagle3": 640}, {"drafter": 640}) is None
    assert "parts/poss 300 and drafter 640" in str(table.refusal_of({"parts/poss": 300}, {"drafter": 640}))
    assert "not recorded" in str(table.refusal_of({"parts/poss": None}, {"drafter": None}))


def test_differences_have_an_interval_from_both_sides() -> None:
    plain = {"kid": {"value": 0.10, "low": 0.07, "high": 0.14}}
    far, near = ({"kid": {"value": value, "low": value - 0.04, "high": value + 0.03}} for value in (0.2, 0.11))
    found = table.changes(far, plain)["kid"]
    assert found["value"] == pytest.approx(0.1) and not found["is_within"]
    assert (found["low"], found["high"]) == pytest.approx((0.1 - 0.0565685, 0.1 + 0.0424264), abs=1e-6)
    assert table.changes(near, plain)["kid"]["is_within"]


def test_a_differing_exact_method_is_a_failure(board_file: Path) -> None:
    header, lines = read_lines(board_file)
    plain = {line["round"]: line for line in lines if line.get("contender") == "plain | eager fp32"}
    for line in lines:
        if line.get("contender") == "eagle1 | eager fp32" and line["round"] == 2:
            line["images"][0]["tokens"] = plain[0]["images"][0]["tokens"]
    assert figures(header, lines)["failures"] == ["eagle1 differs from plain decoding in 1 of 4 images"]


def test_equal_lines_give_equal_bytes(board_file: Path, tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "c.png"):
        save(figures_of(board_file), tmp_path / name)
    made = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert made[0] == made[1] and min(map(len, made)) > 10_000


PAGE = """# Methods

<!-- rows: leaderboard -->
old
<!-- end rows -->

text
<!-- rows: pairs -->
<!-- end rows -->
end
"""


def test_a_page_gets_the_rows_between_its_marks(board_file: Path) -> None:
    found = figures_of(board_file)
    text = rendered(PAGE, found)
    lines = text.splitlines()
    assert lines[:3] == PAGE.splitlines()[:3] and lines[-1] == "end" and "old" not in lines
    row = next(line for line in lines if line.startswith("| `eagle1` | ") and "same tokens" in line)
    (own,) = [one for one in found["boards"][0]["rows"] if one["method"] == "eagle1"]
    assert f"| {own['tokens_per_step']['value']:.2f} (" in row
    assert [line.split(" | ")[1] for line in lines if line.startswith("| `eagle1` | `")] == [
        *["`eagle1-rejection`"] * 2,
        *["`gumbel-jacobi`"] * 2,
    ]
    assert rendered(text, found) == text
    more = text.replace("| `eagle1` | ", "| `svip` | 1.00 |\n| `eagle1` | ", 1)
    refused(rendered, more, found, match=r"the page has methods that the file lacks \(1, as svip\): measure them")
    in_wheel = {"commits": [found["surroundings"]["lantern"]]}
    assert ", commit e874578" in markdown(found | {"commits": ["e874578"]})
    assert ", commit" not in markdown(found | in_wheel)
    refused(rendered, "# Methods\n", found, match="rows: leaderboard")


def test_a_file_of_two_runs_is_refused(board_file: Path, tmp_path: Path) -> None:
    (both := tmp_path / "both.jsonl").write_bytes(board_file.read_bytes() * 2)
    refused(figures_of, both, match="begins another file: take the files one by one")


def test_a_method_with_another_window_is_not_resumed(
    board_file: Path, board_words: list[str], tmp_path: Path, capsys: Capture
) -> None:
    other = re.sub(r'("contender": "gumbel-jacobi \|[^"]*", "window": )\d+', r"\g<1>999", board_file.read_text())
    (out := tmp_path / "board.jsonl").write_text(other)
    assert main(*board_words, "--images", 5, "--out", out) == 2
    assert "has gumbel-jacobi with window 999, here it is" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["leaderboard", "pairs"])
def test_the_rows_of_the_page_of_methods_are_those_of_the_results(name: str) -> None:
    root = Path(__file__).resolve().parents[3]
    text = (root / "docs" / "methods.md").read_text(encoding="utf-8")
    found = figures_of(root / "eval" / "results" / "leaderboard.json")
    assert rendered(text, found) == text
    start = text.index(f"<!-- rows: {name} -->")
    figure = re.compile(r"\d\.\d\d (?=\()").search(text, start)
    changed = text[: figure.start()] + "9.99 " + text[figure.end() :]
    assert rendered(changed, found) == text  # a number written by hand does not stay


def test_depths_are_interpolated_at_as_many_passes_a_step() -> None:
    method, below, above = (torch.tensor([of] * 3, dtype=torch.float64) for of in ([100, 150], [120, 120], [90, 180]))
    found = against(method, below, above)
    assert found["passes_per_step"] == 1.5
    ratio = found["log_of_tokens_ratio"]
    assert isinstance(ratio, dict)
    assert ratio["value"] == pytest.approx(math.log(120 * 90) / 2 - math.log(100)) == ratio["low"]


def test_passes_of_a_drafter_are_counted(tmp_path: Path) -> None:
    model = load_model(save_tiny_model(tmp_path / "toy", block_size=64), parts=("drafter", "text"), device="cpu")
    ((steps, passes),) = counts(model, "eagle2-paper:tree=eagle2_4_4_2", 1).tolist()
    assert 1.9 * steps < passes <= 2 * steps  # two depths, fewer at the end of the image
    ((steps, passes),) = counts(model, "eagle1:tree=chain_2", 1).tolist()
    assert passes == 2 * steps
