"""Wrong declarations of methods: each is refused in one line when it is made."""

from typing import Any

import pytest

from lantern.methods import METHODS
from lantern.methods.method import Parts, lazy, method, opt, preset
from tests.refusals import refused

guess, match = lazy(__name__, "Guess", "Match")
BEFORE = dict(METHODS)


@pytest.fixture(autouse=True)
def _own() -> Any:
    yield
    assert METHODS.keys() - BEFORE.keys() <= {"own"}
    METHODS.pop("own", None)


def own(m: Parts, *, size: int = opt(3, 1, 8)) -> Any:
    """a method of its own"""
    return guess(m.target, size), match()


@pytest.mark.parametrize(
    ("message", "name", "default"),
    [
        ('"eagle1" is declared by lantern.methods.catalogue.eagle1 already', "eagle1", 3),
        ('"Own:x" has no name that `find` reads', "Own:x", 3),
        ("size is 9, wanted a whole number from 1 to 8", "own", 9),
        (r"size is \[1\], wanted a number, a name or a bool", "own", [1]),
    ],
)
def test_names_and_options(message: str, name: str, default: Any) -> None:
    option = opt(default, 1, 8)

    def own(m: Parts, *, size: Any = option) -> Any:
        return guess(m.target, size), match()

    refused(method(name=name), own, match=message)


def test_parameters_and_what_is_returned() -> None:
    def bare(m: Parts, *, size: int) -> Any:
        return guess(m.target, size), match()

    refused(method(name="own"), bare, match='"own": size has no default')
    for made in (None, guess(3), (guess(3), None)):
        method(name="own")(lambda m, made=made: made)
        refused(METHODS["own"].describe, match='"own" returned .*, wanted a drafter and a verifier')
        METHODS.pop("own")
    refused(method(name="own"), lambda: None, match='"own" takes nothing, wanted the parts of a model')
    refused(Parts().part, "mine", match='the part "mine" is not declared')
    refused(guess, [Parts().target], match="got parts inside a list, wanted each as an argument")
    refused(getattr, Parts().target, "config", error=AttributeError, match="config of a part .* by `lazy`")


def test_presets() -> None:
    method()(own)
    method()(own)  # as a cell of a notebook that runs again
    refused(preset, "own-9", "own", "s", size=9, match="size is 9, wanted a whole number from 1 to 8")
    refused(preset, "own-9", "nope", "s", match='method "nope" is unknown')
    refused(preset, "eagle1", "own", "s", match='"eagle1" is declared by')
