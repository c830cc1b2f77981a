"""A board: rounds are measured once and resume, figures are paired, quality is that of `lantern eval`."""

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lantern.cli.command import run_command
from lantern.cli.measure import leaderboard, shuffled_prompts
from lantern.eval.boards import board
from lantern.eval.boards.board import expand, parse_pair, shipped
from lantern.eval.boards.table import figures_of
from lantern.eval.json_lines import read_lines
from lantern.eval.metrics import quality
from lantern.eval.speed import contenders
from lantern.eval.speed.contenders import Variant, name_of
from lantern.methods import METHODS
from tests.cli.calls import Capture
from tests.eval.tiny_metrics import save_pictures, save_tiny_clip
from tests.eval.workers import Patch

RELAXED = "bounded-window:window=4,delta=0.4"


def main(*words: object) -> int:
    return run_command(leaderboard, [str(word) for word in words])


def rows_of(path: Path) -> list[dict[str, Any]]:
    return figures_of(path)["boards"][0]["rows"]


def test_rows_have_the_figures_of_every_method(board_file: Path) -> None:
    found = figures_of(board_file)
    board, greedy = found["boards"]
    rows = {row["method"]: row for row in board["rows"]}
    assert (board["temperature"], greedy["temperature"], board["images"]) == (1.0, 0.0, 4)
    assert list(rows) == list(found["methods"]) and len(rows) == 6
    assert set(board["plain"]) == {name_of("plain", Variant("eager", dtype)) for dtype in ("fp32", "bf16")}
    assert board["baseline"] == min(board["plain"], key=lambda name: board["plain"][name]["median"])
    assert found["failures"] == []
    assert board["tokens_per_step"] == {"value": 1.0, "low": 1.0, "high": 1.0}
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


def test_lacking_and_failing_methods_have_a_row(
    copied: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    shutil.rmtree(copied / "parts")
    entered = contenders.entered

    def failing(stable: Any, spec: str, *given: Any) -> Any:
        if spec == "eagle1":
            raise RuntimeError("the kernel is missing")
        return entered(stable, spec, *given)

    monkeypatch.setattr(contenders, "entered", failing)
    words = ["--model", copied, "--engine", "eager", "--baseline", "eager", "--quiet", "--images", 1]
    assert main(*words, "--methods", "eagle1", "medusa", "gumbel-jacobi", "--out", tmp_path / "b.jsonl") == 1
    table, errors = capsys.readouterr()
    assert "eagle1 failed: RuntimeError: the kernel is missing" in errors
    assert "not measured: RuntimeError: the kernel is missing" in table and "- `medusa` not measured: " in table
    rows = rows_of(tmp_path / "b.jsonl")
    assert [row["method"] for row in rows if "reason" not in row] == ["gumbel-jacobi"]


def test_a_method_that_fails_in_a_round_ends_alone(
    board_words: list[str], tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    take, is_broken, path = board.take, True, tmp_path / "b.jsonl"

    def failing(contender: Any, number: int, *given: Any, **how: Any) -> Any:
        if is_broken and contender.label == "eagle1" and number == 1:
            raise RuntimeError("the device is lost")
        return take(contender, number, *given, **how)

    monkeypatch.setattr(board, "take", failing)
    words = [*board_words[:7], "--baseline", "eager", "--images", 3, "--methods", "eagle1", "gumbel-jacobi"]
    assert main(*words, "--out", path) == 1
    assert "eagle1 failed: RuntimeError: the device is lost" in capsys.readouterr().err
    assert {row["method"]: row["images"] for row in rows_of(path)} == {"eagle1": 1, "gumbel-jacobi": 3}
    is_broken = False  # it is tried again
    assert main(*words, "--out", path) == 0
    assert [row["images"] for row in rows_of(path)] == [3, 3]


def test_quality_is_that_of_eval(board_file: Path, board_words: list[str], tmp_path: Path, monkeypatch: Patch) -> None:
    path, clip = tmp_path / "board.jsonl", save_tiny_clip(tmp_path / "clip")
    shutil.copy(board_file, path)
    seen: list[Any] = []
    measure = quality.measure

    def noting(paths: Any, *given: Any, **named: Any) -> Any:
        seen.append(np.stack([np.asarray(Image.open(one)) for one in paths]))
        return measure(paths, *given, **named)

    monkeypatch.setattr(quality, "measure", noting)
    words = [*board_words, "--images", 4, "--out", path, "--metrics", "clip", "--weights", f"clip={clip}"]
    assert main(*words) == 0
    found = figures_of(path)
    rows = {row["method"]: row for row in found["boards"][0]["rows"]}
    assert len(seen) == 8 and "changes" not in rows["eagle1"]  # plain decoding and the relaxed methods
    change, plain = rows[RELAXED]["changes"]["clip"], found["boards"][0]["quality_of_plain"]
    assert change["low"] <= change["value"] <= change["high"] and plain["clip"]["low"] is not None
    assert (seen[0] != seen[-1]).any()
    before = path.read_bytes()
    assert main(*words) == 0 and len(seen) == 8 and path.read_bytes() == before  # measured once
    other, real = save_tiny_clip(tmp_path / "other", seed=1), tmp_path / "real"
    save_pictures(real, 2)
    for number, given in enumerate(((f"clip={other}",), ("--metrics", "clip-lantern"), ("--reference", real))):
        assert main(*words, *given) == 0 and len(seen) == 16 + 8 * number
        assert (figures_of(path)["boards"][0]["quality_of_plain"] == plain) == ("--reference" in given)
    assert main(*words) == 0 and len(seen) == 32 and figures_of(path) == found  # the figures of what was given last
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
