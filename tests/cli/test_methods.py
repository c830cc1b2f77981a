import shutil
from pathlib import Path

import pytest

from lantern.cli.generate import main as generate
from lantern.cli.main import main
from lantern.methods import METHODS
from tests.cli.calls import Capture, answer


def test_all_methods_are_listed_with_what_they_promise(capsys: Capture) -> None:
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for one, line in zip(METHODS.values(), lines[1:], strict=False):
        assert line.split()[:3] == [one.name, one.made.family, one.promise] and line.endswith(one.summary)
    assert [row["name"] for row in answer(capsys, "methods", "--json")] == list(METHODS)


def test_a_method_is_described_with_its_settings_and_needs(capsys: Capture) -> None:
    assert main(["methods", "lantern++"]) == 0
    out = capsys.readouterr().out
    assert "--lambda" in out and "arxiv.org/abs/2502.06352" in out and "drafter: lantern-emoji has it" in out
    found = answer(capsys, "methods", "medusa", "--json")
    assert found["add_ons"][0]["folder"] == "parts/medusa" and found["add_ons"][0]["present"]
    assert found["settings"][0]["flag"] == "--tree" and found["page"] == "docs/methods.md#medusa"


@pytest.mark.parametrize("name", [name for name in METHODS if not any(o.fits for o in METHODS[name].options.values())])
def test_a_method_is_described_with_all_of_its_settings(name: str, capsys: Capture) -> None:
    assert main(["methods", name]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for option in METHODS[name].options.values():
        (found,) = [line for line in lines if line[:1] == [option.flag]]
        assert found[1:3] == [type(option.default).__name__, *str(option.default).split()[:1]]


def test_a_setting_is_the_one_that_the_default_engine_uses(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lantern.generation.choice.suited", lambda _, method: method.with_options(window=3))
    assert main(["methods", "gumbel-jacobi"]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.split()[:1] == ["--window"]]
    assert line.split()[2] == "3" and line.endswith("engine of this machine, elsewhere 16")
    found = answer(capsys, "methods", "gumbel-jacobi", "--json")
    assert {one["name"]: (one["default"], one["here"]) for one in found["settings"]}["window"] == (16, 3)


def test_methods_whose_part_the_model_lacks_are_marked(copied: Path, capsys: Capture) -> None:
    for gone, marked in ((), set()), (("parts/medusa", "drafter"), {"*medusa", "*eagle1"}):
        for name in gone:
            shutil.rmtree(copied / name)
        assert main(["methods", "--model", str(copied)]) == 0
        out = capsys.readouterr().out
        found = {line.split()[0] for line in out.splitlines() if line.startswith("*") and ":" not in line.split()[0]}
        assert found >= marked and bool(found) == bool(gone) == (f"NAME --model {copied} has the command" in out)
        assert "*plain" not in found and "*gumbel-jacobi" not in found
        assert main(["methods", "medusa", "--model", str(copied)]) == 0
        out = capsys.readouterr().out
        assert bool(gone) == ("lantern train drafter --kind medusa" in out) == (f"--target {copied}/transformer" in out)
    config = copied / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"t2i"', '"c2i"'))
    assert main(["methods", "medusa", "--model", str(copied)]) == 0
    assert "lacks it; drafters are trained for targets that take captions" in capsys.readouterr().out


def test_help_fits_one_screen_and_help_all_lists_the_rest(capsys: Capture) -> None:
    assert generate(["--help"]) == 0
    brief = capsys.readouterr().out
    assert len(brief.splitlines()) <= 30 and "--seed" in brief and "--help-all" in brief and "--guidance" not in brief
    assert generate(["--help-all"]) == 0
    whole = capsys.readouterr().out
    assert all(flag in whole for flag in ("--seed", "--guidance", "--engine", "--init-image", "--tokens"))
    assert "--delta" not in whole and "lantern methods NAME" in brief
