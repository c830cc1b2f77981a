"""The choice of "auto" without a profile, by a scripted T(n)."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lantern.cli.main import main
from lantern.core.sampling import Sampling
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import Engine
from lantern.generation import choice
from lantern.generation.choice import FLAT, GAIN, choose, choose_method
from lantern.methods.method import find
from lantern.models.folder import Model
from tests.cli.calls import Capture

NODES = (1, 2, 4, 8, 16)
Curve = Callable[[int], float]


def flat(n: int) -> float:
    return 0.004


def linear(n: int) -> float:
    return 0.004 * n


def bent(n: int) -> float:
    """Flat up to four tokens, as passes that wait for weights are."""
    return 0.004 * max(1.0, n / 4)


def script(monkeypatch: pytest.MonkeyPatch, seconds: Curve) -> list[int]:
    """Let passes over n tokens take `seconds(n)`; return the list of the rows that T(n) is read for."""
    rows_read: list[int] = []

    def times(engine: Engine, target: object, *, rows: int) -> dict[int, float]:
        rows_read.append(rows)
        return {n: seconds(n) for n in NODES}

    monkeypatch.setattr(choice, "pass_times", times)
    return rows_read


@pytest.mark.parametrize(("batch", "window"), [(1, 16), (8, 16), (16, 8), (64, 2)])
def test_windows_shrink_with_the_batch(model: Model, monkeypatch: pytest.MonkeyPatch, batch: int, window: int) -> None:
    script(monkeypatch, flat)
    graphed = replace(model, engine=GraphEngine())
    found = choose_method(graphed, "auto", sampling=Sampling(), batch=batch, report=lambda _: None)
    assert found.name == "gumbel-jacobi" and found.settings["window"] == window


@pytest.mark.parametrize(
    ("seconds", "spec"), [(flat, "gumbel-jacobi"), (linear, "plain"), (bent, "gumbel-jacobi:window=4")]
)
def test_the_longest_free_window_is_chosen(
    model: Model, monkeypatch: pytest.MonkeyPatch, seconds: Curve, spec: str
) -> None:
    script(monkeypatch, seconds)
    lines: list[str] = []
    method = choose_method(model, "auto", report=lines.append)
    assert method.spec == spec and find(spec).settings == method.settings and method.exact
    [line] = lines
    assert line.startswith(f"method auto is {spec}: ") and "`lantern tune`" in line and method.reason in line


@pytest.mark.parametrize("acceptance", [1.0, 1.5, 2.5, 3.5])
@pytest.mark.parametrize("slope", [0.0, 0.006, 0.01, 0.05, 0.3, 1.0])
def test_the_choice_is_never_slower_than_plain_by_more_than_its_bound(slope: float, acceptance: float) -> None:
    times = {n: 0.01 * (1 + slope * (n - 1)) for n in NODES}
    method = choose(times)
    window = method.settings.get("window", 1)
    assert times[window] / min(acceptance, window) <= FLAT * times[1]
    assert window == {0.0: 16, 0.006: 16, 0.01: 8, 0.05: 2, 0.3: 1, 1.0: 1}[slope]


TOKENS = {2: 1.5, 4: 2.4, 8: 3.6, 16: 5.5}


@pytest.mark.parametrize(("slope", "window"), [(0.0, 16), (0.1, 16), (0.3, 4), (0.4, 1), (1.0, 1)])
def test_known_tokens_per_pass_give_the_window_of_most_tokens_per_second(slope: float, window: int) -> None:
    times = {n: 0.01 * (1 + slope * (n - 1)) for n in NODES}
    method = choose(times, TOKENS | {64: 9.0})
    assert method.settings.get("window", 1) == window
    speed = {n: (TOKENS | {1: 1.0})[n] * times[1] / times[n] for n in NODES}
    assert speed[window] == max(speed.values()) or (method.is_plain and max(speed.values()) < GAIN)
    # a picture for which such a window is slower than plain decoding gives it up
    assert method.settings.get("least", 0.0) == pytest.approx(
        0.0 if slope == 0.0 or window == 1 else GAIN * times[window] / times[1], abs=0.005
    )
    assert choose(times, TOKENS, can_shrink=False).settings.get("least", 0.0) == 0.0
    shown = max(TOKENS, key=lambda n: speed[n])
    assert f"a step over {shown} tokens" in method.reason and f"commits {TOKENS[shown]:.2f} tokens" in method.reason


def test_windows_without_known_tokens_per_pass_must_be_nearly_free() -> None:
    assert choose({n: 0.01 * (1 + 0.1 * (n - 1)) for n in NODES}, {32: 6.0}).settings["window"] == 2


def test_times_of_a_busy_machine_are_not_trusted() -> None:
    for times in ({1: 17.4, 2: 2.0, 4: 1.4}, {1: 1.1, 2: 489.0, 4: 499.0}):
        method = choose(times)
        assert method.is_plain and "other programs" in method.reason


def test_batches_and_guidance_count_as_rows(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = script(monkeypatch, flat)
    for batch, guidance in ((1, 3.0), (4, 3.0), (4, 1.0)):
        choose_method(model, "auto", batch=batch, sampling=Sampling(guidance=guidance), report=lambda line: None)
    assert rows == [2, 8, 4]


def test_the_log_warns_once(model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    script(monkeypatch, lambda n: 0.01234)
    for _ in range(2):
        choose_method(model, "auto")
    assert caplog.text.count("`lantern tune` measures all methods") == 1


def test_the_command_gives_the_reason(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    script(monkeypatch, linear)
    words = ["--prompt", "a cat", "--tokens", str(tmp_path / "t.json"), "--json", "--method", "auto"]
    assert main(["generate", "--model", str(model.folder), *words]) == 0
    seen = capsys.readouterr()
    found = json.loads(seen.out)
    assert found["method"] == "plain" and "2.00 times" in found["method_reason"] and "lantern tune" in seen.err


def test_doctor_reports_the_choice_with_its_reason(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    script(monkeypatch, bent)
    main(["doctor"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "method auto" in line]
    assert "gumbel-jacobi" in line and "times a step over one" in line and "lantern tune" in line
