import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.cli.main import main
from lantern.cli.measure import DTYPES, SHAPES
from lantern.core.types import Generation
from lantern.eval.speed import race
from lantern.models.folder import DTYPES as KNOWN_DTYPES
from lantern.models.llamagen.transformer import SIZES
from tests.cli.calls import Capture

QUICK = ["--images", "1", "--variants", "eager", "--baseline", "eager", "--dtype", "fp32"]
QUICK += ["--methods", "eagle1", "--quiet"]


def test_options_list_all_choices() -> None:
    assert set(DTYPES) == set(KNOWN_DTYPES) and set(SHAPES) == set(SIZES)


def test_json_is_one_line_and_then_the_table_is_on_stderr(model: str, tmp_path: Path, capsys: Capture) -> None:
    out, before = tmp_path / "bench.json", torch.get_num_threads()
    try:
        assert main(["bench", "--model", model, *QUICK, "--json", "--out", str(out), "--threads", "1"]) == 0
    finally:
        torch.set_num_threads(before)
    output = capsys.readouterr()
    (line,) = output.out.splitlines()
    figures = json.loads(line)
    assert figures["races"][0]["results"][0]["claim"] is None and figures["surroundings"]["threads"] == 1
    assert out.read_text(encoding="utf-8") == line + "\n" and list(tmp_path.iterdir()) == [out]
    assert "no claim" in output.err and "images/s" in output.err
    assert main(["bench", "--model", model, *QUICK]) == 0
    output = capsys.readouterr()
    assert "plain" in output.out and "{" not in output.out and output.err == ""


def test_tokens_unlike_plain_give_exit_code_1(model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = race.Contender.decode

    def altered(*given: Any, **watching: Any) -> Generation:
        made = kept(*given, **watching)
        made.tokens[0, 3] += int(made.steps[0] < made.tokens.numel())
        return made

    monkeypatch.setattr(race.Contender, "decode", altered)
    assert main(["bench", "--model", model, *QUICK]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lantern: error: eagle1 (eager fp32, batch 1) differs from plain decoding in 1 of 1")


def test_a_stopped_bench_prints_its_rounds(
    model: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, made = race.pack, []

    def interrupted(tokens: Tensor) -> str:
        made.append(kept(tokens))
        if len(made) == 6:  # in the third round of two contenders
            signal.raise_signal(signal.SIGTERM)
        return made[-1]

    monkeypatch.setattr(race, "pack", interrupted)
    out = tmp_path / "bench.json"
    words = ["--model", model, "--out", str(out), *(word for word in QUICK if word != "--quiet")]
    assert main(["bench", *words, "--images", "9"]) == 143
    output = capsys.readouterr()
    assert "terminated: figures are of the rounds before" in output.out and "batch 1: 2 rounds" in output.out
    figures = json.loads(out.read_text())
    assert figures["stopped"] == "terminated" and figures["races"][0]["rounds"] == 2
    lines = output.err.splitlines()
    assert lines[0].startswith("warming up 1 of 2: plain as eager") and lines[-1] == "lantern: error: terminated"
    assert any(line.startswith("round 2 of 9, ") and line.endswith(" minutes left") for line in lines)
