"""`lantern demo`: both images as they came about, and the function of the page."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lantern.core.types import Callback
from lantern.generation import demo
from lantern.generation.choice import choose_method
from lantern.generation.comparison import Comparison
from lantern.generation.demo import GROUPS, SHADES, Mark, Side, SideBySide, acceptance_map
from lantern.generation.generator import generate, make_batch
from lantern.methods import METHODS, Method
from lantern.models.folder import Model, load_model
from tests.refusals import refused
from tests.tiny_folder import save_tiny_model

PROMPT = "a red apple"
needs_gradio = pytest.mark.skipif(find_spec("gradio") is None, reason="the extra demo is not installed")


@pytest.fixture
def sides(model: Model) -> Iterator[SideBySide]:
    found = SideBySide(model)
    yield found
    found.close()


def side(sides: SideBySide, method: str) -> Side:
    return sides.decode(sides.request(PROMPT, 3), method, sides.model.sampling())


@pytest.mark.parametrize("method", ["plain", "eagle1", "tolerance"])
def test_both_sides_are_the_pictures_of_the_generator(sides: SideBySide, method: str, model: Model) -> None:
    made = side(sides, method)
    (picture,) = generate(model, [sides.request(PROMPT, 3)], method=method)
    assert picture.pixels is not None and torch.equal(made.picture.tokens, picture.tokens)
    assert torch.equal(made.at(made.marks[-1].seconds)[1], picture.pixels)
    assert len(made.marks) == made.picture.statistics.steps
    assert acceptance_map(made, len(made.marks))[0].size == (picture.pixels.shape[1], picture.pixels.shape[0])


@pytest.mark.parametrize(
    ("start", "counts", "length", "chances", "expected"),
    [
        (1, 3, 2, [0.0, 0.9, 1.0], (2,)),  # two drafts and the target's own token; later nodes were not accepted
        (1, 3, 4, [0.7, 0.4, 0.7, 0.7], (1, 3)),  # drafts past the end
        (1, 1, None, [], ()),  # a step without drafts
    ],
)
def test_only_accepted_drafts_are_relaxed(
    start: int, counts: int, length: int | None, chances: list[float], expected: tuple[int, ...]
) -> None:
    cost = SimpleNamespace(relaxed=torch.tensor([chances]))
    verdict = None if length is None else SimpleNamespace(length=torch.tensor([length]), cost=cost)
    step = SimpleNamespace(start=torch.tensor([start]), counts=torch.tensor([counts]), verdict=verdict)
    assert demo.relaxed_places(step) == expected  # type: ignore[arg-type]


def test_marks_hold_the_relaxed_tokens(sides: SideBySide) -> None:
    made = side(sides, "tolerance")
    places = [place for mark in made.marks for place in mark.relaxed]
    assert places and len(places) == round(made.picture.statistics.relaxed * 16)
    *_, (mask, legend) = acceptance_map(made, len(made.marks))[1]
    assert legend == demo.MARK and (mask.reshape(4, 2, 4, 2).max((1, 3)).ravel().nonzero()[0] == sorted(places)).all()


@pytest.mark.parametrize(
    ("promise", "variation", "differing", "expected"),
    [
        ("tokens", 0.0, 0, "The same image, token for token, 1.9 times as fast in this run."),
        ("tokens", 0.0, 3, "Another image by rounding: 3 of 256 tokens differ, 1.9 times as fast in this run."),
        ("distribution", 0.0, 9, "Another image of the same distribution, 1.9 times as fast in this run."),
        ("relaxed", 0.06, 9, "Another image: total variation 0.06 a token, 1.9 times as fast in this run."),
        ("relaxed", float("nan"), 9, "Another image: total variation not measured, 1.9 times as fast in this run."),
        ("relaxed", 0.0, 0, "The same image, token for token, 1.9 times as fast in this run."),
    ],
)
def test_one_sentence_says_what_happened(promise: str, variation: float, differing: int, expected: str) -> None:
    plain, other = SimpleNamespace(tokens=torch.zeros(256)), SimpleNamespace(tokens=torch.arange(256) < differing)
    plain.statistics = SimpleNamespace(seconds={"decode": 1.9})
    figures = {"promise": promise, "total_variation": variation, "tokens": 256, "seconds": {"decode": 1.0}}
    other.statistics = SimpleNamespace(**figures)
    assert Comparison(plain, other).sentence == expected  # type: ignore[arg-type]


def test_rows_appear_in_order_and_later_rows_are_grey(sides: SideBySide) -> None:
    plain, other = side(sides, "plain"), side(sides, "eagle1")
    assert [plain.at(seconds)[0].known for seconds in plain.times()] == [4, 8, 12, 16]
    for made in (plain, other):
        times = made.times()
        assert times == sorted(times) and times[-1] == made.marks[-1].seconds
        assert [made.at(seconds)[0] in made.marks for seconds in times] == [True] * len(times)
    pixels = plain.at(plain.times()[0])[1]
    assert (pixels[2:] == 128).all() and not (pixels[:2] == 128).all()
    assert plain.at(plain.marks[5].seconds)[0] == plain.marks[5]


def test_time_of_callbacks_is_not_time_of_decoding(sides: SideBySide, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**6))  # a clock that advances by one at each look
    monkeypatch.setattr("lantern.generation.demo.time.perf_counter", lambda: float(next(ticks)))
    # each callback looks twice: one tick passes outside of it, one inside
    assert [mark.seconds for mark in side(sides, "plain").marks] == [float(i) for i in range(16)]


def test_marks_start_again_with_the_first_step(sides: SideBySide, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(*given: Any, callback: Callback, **how: Any) -> Any:
        make_batch(*given, callback=callback, **how)
        return make_batch(*given, callback=callback, **how)

    once = side(sides, "plain")
    monkeypatch.setattr(demo, "make_batch", twice)
    again = side(sides, "plain")
    assert [mark[1:] for mark in again.marks] == [mark[1:] for mark in once.marks] and len(again.marks) == 16
    assert again.marks[0].seconds == 0


@pytest.mark.parametrize(("chosen", "expected"), [("medusa", "medusa"), ("plain", "gumbel-jacobi")])
def test_the_default_is_fast_and_exact(
    sides: SideBySide, monkeypatch: pytest.MonkeyPatch, chosen: str, expected: str
) -> None:
    def choose(model: Model, name: str, **how: Any) -> Method:
        return METHODS[chosen] if name == "auto" else choose_method(model, name, **how)

    monkeypatch.setattr("lantern.generation.demo.choose_method", choose)
    assert sides.default.name == expected
    if chosen == "plain":  # the window is short, and ends where it does not pay
        assert sides.default.settings["window"] == 2 and sides.default.settings["least"] > 1
    assert len(side(sides, expected).picture.tokens) == 16


def test_methods_stand_in_groups_with_a_line_each(sides: SideBySide) -> None:
    (_, first), *others = sides.choices()
    assert first == sides.default.name and len(others) > 20
    promises = [METHODS[name].promise for _, name in others]
    assert promises == sorted(promises, key=list(GROUPS).index) and set(promises) == set(GROUPS)
    for label, name in others:
        assert label == f"{GROUPS[METHODS[name].promise]}: {name}, {METHODS[name].summary}"
    names, bare = [name for _, name in others], SideBySide(replace(sides.model, add_ons={}))
    assert {"eagle1", "medusa"} <= set(names) and "plain" not in names
    assert "medusa" not in [name for _, name in bare.choices()]  # a method whose part it lacks is not offered


def test_every_token_is_shaded_by_its_run(sides: SideBySide) -> None:
    made, known = side(sides, "plain"), (1, 3, 7, 8, 16)  # runs of 1, 2, 4, over the end of a row, 1 and 8
    marks = [Mark(0.0, end, i, (1,) if end == 3 else ()) for i, end in enumerate(known)]
    found = {legend: mask for mask, legend in acceptance_map(replace(made, marks=marks), 5)[1]}
    tokens = {legend: mask.reshape(4, 2, 4, 2).max((1, 3)).ravel() for legend, mask in found.items()}
    places = {legend: values.nonzero()[0].tolist() for legend, values in tokens.items()}
    two, four, eight = (shade.legend for shade in SHADES)
    assert places == {two: [1, 2], four: [3, 4, 5, 6], eight: [*range(8, 16)], demo.MARK: [1]}
    assert all(tokens[shade.legend].max() == pytest.approx(shade.opacity) for shade in SHADES)
    pixels, masks = acceptance_map(replace(made, marks=marks), 2)  # three tokens of the first row
    assert [legend for _, legend in masks] == [two, demo.MARK] and (np.asarray(pixels)[2:] == 128).all()
    assert acceptance_map(made, len(made.marks))[1] == []


def test_examples_are_recognised_names(model: Model, tmp_path: Path) -> None:
    (tmp_path / "recognised.txt").write_text("\n".join(f"thing {i}" for i in range(100)) + "\n")
    assert SideBySide(replace(model, folder=tmp_path)).examples == [f"thing {i}" for i in range(0, 100, 20)]
    for prompt in SideBySide(model).examples:  # a model without a list
        assert SideBySide(model).request(prompt, 0).prompt == prompt


def test_classes_are_numbers(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "classes", model_type="c2i", cls_token_num=1)
    found = SideBySide(load_model(folder, device="cpu", engine="eager"))
    assert found.request("1", 0).label == 1
    assert [found.request(label, 0).label for label in found.examples] == list(range(len(found.examples))) != []
    refused(found.request, "cat", 0, match="wanted a number")
    found.close()


@needs_gradio
def test_the_page_fills_pictures_numbers_map_and_gallery(model: Model) -> None:
    """In a process of its own: gradio leaves event loops and sockets open."""
    command = [sys.executable, "-m", "tests.generation.demo_page", str(model.folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "fills"


@needs_gradio
def test_files_of_the_server_are_private_and_none_are_taken(model: Model, tmp_path: Path) -> None:
    import httpx
    from gradio_client import Client

    (tmp_path / "gradio").touch()  # like a folder of another user, it cannot be written to
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "lantern", "demo", str(model.folder), "--port", str(port), "--engine", "eager"]
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": os.environ | {"TMPDIR": str(tmp_path)}}
    with subprocess.Popen(command, **how) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            sent = httpx.post(f"{url}gradio_api/upload", files={"files": ("a.txt", b"text")})
            client = Client(url, verbose=False, download_files=False)
            shown = client.predict("a red apple", "gumbel-jacobi", 3, 1, api_name="/fill")
            (private,) = tmp_path.glob("lantern-*")
            assert sent.status_code == 413 and str(private) in str(shown[4]) and private.stat().st_mode & 0o777 == 0o700
        finally:
            server.terminate()
    assert [path.name for path in tmp_path.iterdir()] == ["gradio"]
