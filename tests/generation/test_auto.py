"""The choice of "auto": by a profile, or without one by a scripted T(n)."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern import LanternPipeline
from lantern.cli.main import main
from lantern.core.io import write_json
from lantern.core.sampling import Sampling
from lantern.engines.cpu.engine import CpuEngine
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import EagerEngine, Engine, WideEngine
from lantern.generation import choice
from lantern.generation.choice import FLAT, GAIN, choose, choose_method, place_of
from lantern.methods import METHODS
from lantern.methods.method import find
from lantern.models.folder import PROFILE_NAME, Model, load_model
from tests.cli.calls import Capture
from tests.refusals import refused

NODES = (1, 2, 4, 8, 16)
Curve = Callable[[int], float]
CURVES: dict[str, Curve] = {  # bent: flat up to four tokens, as passes that wait for weights are
    "flat": lambda n: 0.004,
    "linear": lambda n: 0.004 * n,
    "bent": lambda n: 0.004 * max(1.0, n / 4),
}


@pytest.fixture
def model(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return load_model(copied, parts=("drafter",))


def script(monkeypatch: pytest.MonkeyPatch, seconds: Curve) -> list[int]:
    """Let passes over n tokens take `seconds(n)`; return the list of the rows that T(n) is read for."""
    rows_read: list[int] = []

    def times(engine: Engine, target: object, *, rows: int) -> dict[int, float]:
        rows_read.append(rows)
        return {n: seconds(n) for n in NODES}

    monkeypatch.setattr(choice, "pass_times", times)
    return rows_read


@pytest.mark.parametrize(
    ("batch", "guidance", "rows", "window"),
    [(1, 3.0, 2, 16), (8, 3.0, 16, 16), (16, 3.0, 32, 8), (64, 3.0, 128, 2), (16, 1.0, 16, 16)],
)
def test_windows_shrink_with_the_rows_of_a_batch(
    model: Model, monkeypatch: pytest.MonkeyPatch, batch: int, guidance: float, rows: int, window: int
) -> None:
    rows_read, graphed = script(monkeypatch, CURVES["flat"]), replace(model, engine=GraphEngine())
    how: dict[str, Any] = {"sampling": Sampling(guidance=guidance), "batch": batch, "report": lambda _: None}
    found = choose_method(graphed, "auto", **how)
    assert found.name == "gumbel-jacobi" and found.settings["window"] == window and rows_read == [rows]


def test_a_profile_is_of_a_sampling_that_is_similar_in_every_setting() -> None:
    far = {"guidance": [5.0, 1.0], "temperature": [1.3, 0.0], "top_k": [24], "top_p": [0.7], "guidance_interval": [4]}
    there = Sampling()
    assert [*far] == [one.name for one in fields(Sampling)] and there.guidance == 3
    for name, value in ((name, value) for name, values in far.items() for value in values):
        here = replace(there, **{name: value})
        assert f"measured at {name} " in choice.too_far(there, here, 100)
        assert f"measured at {name} " in choice.too_far(here, there, 100)
    for here in (there, Sampling(guidance=2.0), Sampling(guidance=4.5, temperature=0.9), Sampling(top_k=800)):
        assert choice.too_far(there, here, 2048) == ""
    assert choice.too_far(Sampling(guidance=0), Sampling(guidance=1), 24) == ""


@pytest.mark.parametrize(("low", "high", "window"), [(5, 9, 9), (20, None, 20), (2, None, 16)])
def test_a_chosen_window_is_in_the_range_of_its_option(
    model: Model, monkeypatch: pytest.MonkeyPatch, low: int, high: int | None, window: int
) -> None:
    monkeypatch.setattr(choice, "pass_times", lambda engine, target: dict.fromkeys(NODES, 1.0))
    method = METHODS["gumbel-jacobi"]
    option = replace(method.options["window"], low=low, high=high)
    own = replace(method, options={**method.options, "window": option})
    assert choice.suited(replace(model, engine=CpuEngine()), own).settings["window"] == window


@pytest.mark.parametrize(
    ("curve", "spec"), [("flat", "gumbel-jacobi"), ("linear", "plain"), ("bent", "gumbel-jacobi:window=4")]
)
def test_longest_free_window_is_chosen(model: Model, monkeypatch: pytest.MonkeyPatch, curve: str, spec: str) -> None:
    script(monkeypatch, CURVES[curve])
    lines: list[str] = []
    method = choose_method(model, "auto", report=lines.append)
    assert method.spec == spec and find(spec).settings == method.settings and method.exact
    [line] = lines
    assert line.startswith(f"method auto is {spec}: ") and "`lantern tune`" in line and method.reason in line


@pytest.mark.parametrize(("slope", "window"), [(0.0, 16), (0.006, 16), (0.01, 8), (0.05, 2), (0.3, 1), (1.0, 1)])
def test_the_choice_is_never_slower_than_plain_by_more_than_its_bound(slope: float, window: int) -> None:
    times = {n: 0.01 * (1 + slope * (n - 1)) for n in NODES}
    assert choose(times).settings.get("window", 1) == window and times[window] <= FLAT * times[1]


TOKENS = {2: 1.5, 4: 2.4, 8: 3.6, 16: 5.5}


@pytest.mark.parametrize(("slope", "window"), [(0.0, 16), (0.1, 8), (0.3, 4), (0.4, 1), (1.0, 1)])
def test_known_tokens_per_pass_give_the_shortest_window_that_is_nearly_best(slope: float, window: int) -> None:
    times = {n: 0.01 * (1 + slope * (n - 1)) for n in NODES}
    method = choose(times, TOKENS | {64: 9.0})
    assert method.settings.get("window", 1) == window
    speed = {n: (TOKENS | {1: 1.0})[n] * times[1] / times[n] for n in NODES}
    shown = next(n for n in TOKENS if speed[n] >= 0.95 * max(speed[n] for n in TOKENS))
    assert window == shown or (method.is_plain and max(speed.values()) < GAIN)
    # a picture for which such a window is slower than plain decoding gives it up
    assert method.settings.get("least", 0.0) == pytest.approx(
        0.0 if slope == 0.0 or window == 1 else GAIN * times[window] / times[1], abs=0.005
    )
    assert choose(times, TOKENS, can_shrink=False).settings.get("least", 0.0) == 0.0
    assert f"a step over {shown} tokens" in method.reason and f"commits {TOKENS[shown]:.2f} tokens" in method.reason


def test_a_shorter_window_that_does_not_pay_excludes_none_that_does() -> None:
    times, tokens = {1: 1.0, 2: 1.375, 4: 1.8, 8: 3.4}, {2: 1.5, 4: 2.05, 8: 3.0}  # 1.09 and 1.14 times as fast
    assert choose(times, tokens).settings["window"] == 4


def test_windows_must_be_nearly_free_and_times_of_a_busy_machine_are_not_trusted() -> None:
    assert choose({n: 0.01 * (1 + 0.1 * (n - 1)) for n in NODES}, {32: 6.0}).settings["window"] == 2
    for times in ({1: 17.4, 2: 2.0, 4: 1.4}, {1: 1.1, 2: 489.0, 4: 499.0}):
        method = choose(times)
        assert method.is_plain and "other programs" in method.reason


def test_the_log_warns_once(model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    script(monkeypatch, lambda n: 0.01234)
    for _ in range(2):
        choose_method(model, "auto")
    assert caplog.text.count("`lantern tune` measures other methods") == 1


def test_the_command_gives_the_reason(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    script(monkeypatch, CURVES["linear"])
    words = ["--prompt", "a cat", "--tokens", str(tmp_path / "t.json"), "--json", "--method", "auto"]
    assert main(["generate", "--model", str(model.folder), *words]) == 0
    seen = capsys.readouterr()
    found = json.loads(seen.out)
    assert found["method"] == "plain" and "2.00 times" in found["method_reason"] and "lantern tune" in seen.err


def test_doctor_reports_the_choice_with_its_reason(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    script(monkeypatch, CURVES["bent"])
    main(["doctor"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "method auto" in line]
    assert "gumbel-jacobi" in line and "times a step over one" in line and "lantern tune" in line


def test_doctor_does_not_advise_what_was_done(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def of_profile(*given: Any) -> Any:
        given[-1]("window 3, chosen by the times of passes on this machine")  # another line than the method's
        return find("plain")

    monkeypatch.setattr(choice, "_of_profile", of_profile)
    main(["doctor"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "method auto" in line]
    assert line.endswith("method auto is plain: a profile of `lantern tune` recommends it")


def write(model: Model, /, **changes: Any) -> Path:
    found: dict[str, Any] = {
        "version": choice.VERSION,
        "machine": choice.describe_machine(model),
        "model": {"name": model.name, "weights": model.weights_digest},
        "sampling": {"guidance": 3.0, "temperature": 1.0, "top_k": 12, "top_p": 1.0, "guidance_interval": -1},
        "choice": {"method": "eagle1", "settings": {"tree": "0 1 0.0"}},
    }
    for name, changed in changes.items():
        found[name] = found[name] | changed if isinstance(changed, dict) else changed
    write_json(place_of(model), found)
    return place_of(model)


def reported(model: Model, **options: Any) -> tuple[str, list[str]]:
    lines: list[str] = []
    method = choose_method(model, "auto", report=lines.append, **options)
    return f"{method.name} {method.tree}", lines


def test_auto_is_the_method_of_the_profile(model: Model) -> None:
    assert model.folder is not None and write(model) == model.folder / PROFILE_NAME
    assert reported(model) == ("eagle1 0 1 0.0", [])
    assert choose_method(model, "auto", {"tree": "chain_2"}).tree == "chain_2"
    assert "lantern tune" in choose_method(model, "auto").reason
    write(model, choice={"method": "plain", "settings": {}})
    assert choose_method(model, "auto").name == "plain"
    message = '"auto" chose method "plain", which has no setting tree: name the method with its settings'
    refused(choose_method, model, "auto", {"tree": "chain_2"}, match=message)
    refused(choose_method, model, "auto", {"num_steps": 20}, match='no method has a setting "num_steps"; wanted the')
    assert choose_method(model, "eagle1") == METHODS["eagle1"]  # only "auto" reads it


@pytest.mark.parametrize("is_packaged", [False, True])
def test_without_write_access_it_is_cached(model: Model, monkeypatch: pytest.MonkeyPatch, is_packaged: bool) -> None:
    if is_packaged:
        monkeypatch.setattr("lantern.generation.choice.PACKAGE", model.folder.resolve().parent)
    else:
        monkeypatch.setattr("os.access", lambda path, mode: path != model.folder)
    assert write(model) == choice.cache_folder() / f"{model.weights_digest}.json"
    assert not (model.folder / PROFILE_NAME).exists()
    assert reported(model) == ("eagle1 0 1 0.0", [])
    write_json(model.folder / PROFILE_NAME, {"version": 99})  # one that does not fit, which the folder came with
    assert reported(model) == ("eagle1 0 1 0.0", [])


def test_a_profile_is_of_stored_weights(model: Any) -> None:
    pipe = LanternPipeline.from_pretrained(model.folder, torch_dtype=torch.float16)
    assert pipe.model.weights_digest == model.weights_digest == load_model(model.folder, dtype="fp16").weights_digest


@pytest.mark.parametrize(
    ("changes", "output"),
    [
        ({"machine": {"threads": 999}}, "measured with threads 999"),
        ({"machine": {"dtype": "bf16"}}, "measured with dtype bf16, here it is fp32"),
        ({"machine": {"passes": "fused"}}, "measured with passes fused, here it is as torch runs them"),
        ({"sampling": {"guidance": 7.5}}, "measured at guidance 7.5, this is 3"),
        ({"model": {"weights": "0" * 64}}, "other weights"),
        ({"batch": 4}, "measured with 4 images at a time, here it is 1"),
        ({"batch": "1e999"}, "measured with inf images at a time"),
        ({"choice": {"method": "eagel9"}}, 'method "eagel9" is unknown'),
        ({"choice": {"method": "eagle1", "settings": {"delta": 1}}}, "no setting delta"),
        ({"choice": {"method": "eagle1", "settings": [1]}}, "cannot convert"),
        ("{", "is not JSON"),
        ("[]", "wanted an object"),
        ('{"version": 99}', "has version 99"),
        ('{"version": 2}', "'machine' is missing"),
    ],
)
def test_a_profile_that_does_not_fit_is_reported_and_not_used(model: Model, changes: Any, output: str) -> None:
    path = write(model, **({} if isinstance(changes, str) else changes))
    path.write_text(changes if isinstance(changes, str) else path.read_text().replace('"1e999"', "1e999"))
    method, [line, *_] = reported(model)
    assert method == "gumbel-jacobi None" and output in line and "lantern tune" in line


def test_a_cache_that_cannot_be_read_has_no_profile(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + 300 * "a")  # as that of another user, too long for a name
    assert reported(model)[0] == "gumbel-jacobi None"
    write(model, batch=4)
    assert reported(model)[0] == "gumbel-jacobi None"


def test_engines_of_different_speed_have_different_names(model: Model) -> None:
    eager = [EagerEngine(), EagerEngine(weights="int4"), EagerEngine(weights="int8")]
    engines = [*eager, WideEngine(), GraphEngine(), CpuEngine(), CpuEngine(weights="int8")]
    words = [replace(model, engine=engine).passes for engine in engines]
    assert len(set(words)) == len(words)


def test_without_memory_for_the_passes_of_a_batch_it_is_plain(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> dict[int, float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    said = list[str]()
    monkeypatch.setattr(choice, "pass_times", full)
    assert choose_method(model, "auto", batch=64, report=said.append).is_plain
    assert said[0] == "no times of passes: CUDA out of memory"
