"""`lantern demo`: the views of both images, the function of the page, and the page in a browser."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.generation.comparison import Comparison
from lantern.generation.demo import GROUPS, Moment, SideBySide, Track, decode, sentence, table
from lantern.generation.generator import Generator, choose_method, generate
from lantern.methods import METHODS, Method
from lantern.models.folder import Model, load_model
from tests.tiny_folder import save_tiny_model

PROMPT = "a red apple"
needs_gradio = pytest.mark.skipif(find_spec("gradio") is None, reason="the extra demo is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(save_tiny_model(tmp_path_factory.mktemp("demo") / "toy"), device="cpu", engine="eager")


@pytest.fixture
def sides(model: Model) -> Iterator[SideBySide]:
    found = SideBySide(model)
    yield found
    found.close()


def moments(sides: SideBySide, method: str, seed: int = 3) -> list[Moment]:
    return list(sides.moments(sides.request(PROMPT, seed), method, sides.model.sampling()))


@pytest.mark.parametrize("method", ["eagle1", "gumbel-jacobi", "medusa", "tolerance"])
def test_both_sides_end_with_the_pictures_of_the_generator(sides: SideBySide, method: str, model: Model) -> None:
    *filling, last = moments(sides, method)
    result = last.result
    assert result is not None and all(moment.result is None for moment in filling)
    (plain,) = generate(model, [sides.request(PROMPT, 3)], method="plain")
    assert plain.pixels is not None
    assert torch.equal(last.plain.pixels, plain.pixels) and torch.equal(result.comparison.plain.tokens, plain.tokens)
    other = result.comparison.other
    assert other.pixels is not None and torch.equal(last.other.pixels, other.pixels)
    assert result.accepted.cells == 16 and len(result.accepted.runs) == other.statistics.steps == last.other.mark.steps
    assert result.comparison.is_identical or method == "tolerance"
    assert "steps" in table(result.comparison) and sentence(result.comparison) in table(result.comparison)


@pytest.mark.parametrize(
    ("promise", "variation", "differing", "expected"),
    [
        ("tokens", 0.0, 0, "The same image, token for token, 1.9 times as fast."),
        ("tokens", 0.0, 3, "Another image by rounding: 3 of 256 tokens differ, 1.9 times as fast."),
        ("distribution", 0.0, 9, "Another image of the same distribution, 1.9 times as fast."),
        ("relaxed", 0.06, 9, "Another image: total variation 0.06 a token, 1.9 times as fast."),
        ("relaxed", float("nan"), 9, "Another image: total variation not measured, 1.9 times as fast."),
        ("relaxed", 0.0, 0, "The same image, token for token, 1.9 times as fast."),
    ],
)
def test_one_sentence_says_what_happened(promise: str, variation: float, differing: int, expected: str) -> None:
    statistics = SimpleNamespace(promise=promise, total_variation=variation, tokens=256)
    plain, other = SimpleNamespace(tokens=torch.zeros(256)), torch.arange(256) < differing
    found: Any = Comparison(plain, SimpleNamespace(tokens=other.float(), statistics=statistics), 1.9, 1.0)  # type: ignore[arg-type]
    assert sentence(found) == expected


def test_rows_appear_in_order_and_later_rows_are_grey(sides: SideBySide) -> None:
    *filling, last = moments(sides, "eagle1")
    known = [moment.plain.mark.known for moment in filling[:4]]
    assert known == [4, 8, 12, 16]
    first = filling[0].plain.pixels
    assert (first[2:] == 128).all() and not (first[:2] == 128).all()
    seconds = [moment.plain.mark.seconds for moment in filling]
    assert seconds == sorted(seconds)
    for moment in filling[:4]:  # the method is shown as it was after the same seconds
        assert moment.other.mark.seconds <= moment.plain.mark.seconds
    assert [m.other.mark.known for m in filling] == sorted(m.other.mark.known for m in filling)
    assert last.other.mark.known == 16


def test_time_of_callbacks_is_not_time_of_decoding(sides: SideBySide, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**6))  # a clock that advances by one at each look
    monkeypatch.setattr("lantern.generation.demo.time.perf_counter", lambda: float(next(ticks)))
    *_, last = moments(sides, "eagle1")
    # each callback looks twice: one tick passes outside of it, one inside
    assert last.plain.mark.seconds == 15.0 and last.other.mark.seconds == last.other.mark.steps - 1


def test_a_closed_page_ends_the_decoding_and_the_next_one_starts(sides: SideBySide) -> None:
    started: Any = sides.moments(sides.request(PROMPT, 0), "eagle1", sides.model.sampling())
    next(started)
    started.close()
    assert moments(sides, "eagle1")[-1].result is not None


def test_errors_are_one_line(sides: SideBySide) -> None:
    with pytest.raises(ValueError, match="empty"):
        sides.request(" ", 0)
    with pytest.raises(ValueError, match="seed is -1"):
        sides.request(PROMPT, -1)
    with pytest.raises(ValueError, match="method"):
        moments(sides, "eagel1")


@pytest.mark.parametrize(("chosen", "expected"), [("medusa", "medusa"), ("plain", "gumbel-jacobi")])
def test_the_default_is_the_fastest_exact_method(
    sides: SideBySide, monkeypatch: pytest.MonkeyPatch, chosen: str, expected: str
) -> None:
    def choose(model: Model, name: str, **how: Any) -> Method:
        return METHODS[chosen] if name == "auto" else choose_method(model, name, **how)

    monkeypatch.setattr("lantern.generation.demo.choose_method", choose)
    assert sides.default.name == expected
    if chosen == "plain":  # the window is short, and ends where it does not pay
        assert sides.default.settings["window"] == 2 and sides.default.settings["least"] > 1
    assert moments(sides, expected)[-1].result is not None


def test_methods_stand_in_groups_with_a_line_each(sides: SideBySide) -> None:
    groups = {promise: sides.choices(promise) for promise in GROUPS}
    names = [name for choices in groups.values() for _, name in choices]
    assert sorted(names) == sorted(sides.methods) and all(groups.values())
    for promise, choices in groups.items():
        assert all(METHODS[name].promise == promise for _, name in choices)
        assert all(label == f"{name}: {METHODS[name].summary}" for label, name in choices)
    assert groups[sides.default.promise][0][1] == sides.default.name
    bare = SideBySide(replace(sides.model, add_ons={}))  # methods whose part it lacks are not offered
    assert "medusa" in names and "medusa" not in [name for _, name in bare.choices("tokens")]
    bare.close()


def test_classes_are_numbers(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "classes", model_type="c2i", cls_token_num=1)
    found = SideBySide(load_model(folder, device="cpu", engine="eager"))
    assert found.request("1", 0).label == 1
    with pytest.raises(ValueError, match="wanted a number"):
        found.request("cat", 0)
    assert "plain" not in found.methods and {"eagle1", "gumbel-jacobi"} <= set(found.methods)
    found.close()


def test_tracks_start_again_with_the_first_step(model: Model) -> None:
    generator = Generator(model, choose_method(model, "plain"), Sampling())
    seen: list[int] = []
    track = Track(generator, threading.Event(), lambda track: seen.append(track.marks[-1].known))
    request = SideBySide(model).request(PROMPT, 0)
    one, other = decode(generator, request, track)[0], decode(generator, request, track)[0]
    assert torch.equal(one.tokens, other.tokens) and torch.equal(track.tokens, one.tokens)
    assert seen == [4, 8, 12, 16] * 2 and len(track.steps) == 16


def run_page(kind: str, model: Model) -> str:
    """Run a check of the page in a process of its own: gradio leaves event loops and sockets open."""
    command = [sys.executable, "-m", "tests.generation.demo_page", kind, str(model.folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_gradio
def test_the_page_fills_pictures_numbers_map_and_gallery(model: Model) -> None:
    assert run_page("function", model).splitlines()[-1] == "fills"


@pytest.mark.slow
@needs_gradio
def test_the_page_in_a_browser(model: Model) -> None:
    pytest.importorskip("selenium", reason="selenium is not installed")
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.skip("chromium and chromedriver are not installed")
    assert run_page("browser", model).splitlines()[-1] == "shown"
