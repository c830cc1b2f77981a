"""`lantern methods`, and the options that `lantern-generate` makes of the methods."""

import json

import pytest

from lantern.cli.generate import main as generate
from lantern.cli.main import main
from lantern.methods import METHODS, find
from tests.cli.calls import Capture, refusal


def test_all_methods_are_listed_with_what_they_promise(capsys: Capture) -> None:
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for one, line in zip(METHODS.values(), lines[1:], strict=False):
        assert line.split()[:3] == [one.name, one.made.family, one.promise] and line.endswith(one.summary)
    assert main(["methods", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(METHODS)


def test_a_method_is_described_with_its_settings_and_needs(capsys: Capture) -> None:
    assert main(["methods", "lantern++"]) == 0
    out = capsys.readouterr().out
    assert "--lambda" in out and "arxiv.org/abs/2502.06352" in out and "drafter: lantern-emoji has it" in out
    assert main(["methods", "medusa", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["add_ons"][0]["folder"] == "parts/medusa" and found["add_ons"][0]["present"]
    assert found["settings"][0]["flag"] == "--tree" and found["page"] == "docs/methods/medusa.md"


def test_an_unknown_method_is_refused_with_the_nearest(capsys: Capture) -> None:
    assert "did you mean medusa?" in refusal(capsys, main(["methods", "medsua"]))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "auto"])
def test_the_help_of_a_method_lists_its_options(name: str, capsys: Capture) -> None:
    assert generate(["--method", name, "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"{option.flag} {option.label.upper()}" in out for option in METHODS[name].options.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "sam", "--macth", "grid"], "did you mean --match?"),
        (["--method", "eagle1", "--delta", "0.1"], 'method "eagle1" has no setting delta: it takes tree'),
        (["--method", "grouped", "--p-radius", "2"], "wanted a number from 0 to 1"),
        (["--method", "eagle2", "--set", "nodes=0"], "nodes is 0, wanted a whole number of at least 1"),
        (["--method", "eagle2", "--set", "adaptive=true"], "has no setting adaptive"),
    ],
)
def test_options_that_do_not_fit_the_method_are_refused(arguments: list[str], message: str, capsys: Capture) -> None:
    assert message in refusal(capsys, generate(["--prompt", "a red apple", *arguments]))


@pytest.mark.parametrize("command", [["methods", "nosuch"], ["generate", "--prompt", "a cat", "--method", "nosuch"]])
def test_an_unknown_method_is_refused_without_a_list_of_all(command: list[str], capsys: Capture) -> None:
    assert refusal(capsys, main(command)).endswith("'nosuch', wanted a method that `lantern methods` lists")


def test_no_method_is_suggested_for_a_name_unlike_all() -> None:
    with pytest.raises(ValueError, match='"nosuch" is unknown: `lantern methods` and lantern.list_methods'):
        find("nosuch")
