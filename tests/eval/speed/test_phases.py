"""Bytes of a pass, and time of a step by phase."""

import pytest
from torch import nn

from lantern.eval.speed.contenders import Job, Stable, condition_of, line_up
from lantern.eval.speed.phases import NetworkClock, copy_bandwidth, networks, pass_bytes, roofline, time_phases
from lantern.models.folder import Model, load_model
from tests.eval.variants import CPU, EAGER
from tests.tiny import tiny_target
from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(save_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def test_a_pass_reads_all_weights_except_embedding_tables() -> None:
    target = tiny_target()
    layer = 4 * 32 * 32 + 3 * 32 * target.config.ffn_dim + 2 * 32
    cache = 2 * 2 * 2 * (16 + 3) * 32
    assert pass_bytes(target, rows=2, nodes=3) == 4 * (2 * layer + 32 + 24 * 32 + cache)


def test_a_cpu_caches_in_fp32_for_every_dtype() -> None:
    target = tiny_target()
    wide, narrow = (2 * 2 * 2 * (8 + 1) * 32 * 4, pass_bytes(target, rows=0))
    half = target.bfloat16()
    assert pass_bytes(half, rows=2, nodes=1, cached=8) == wide + narrow // 2


def test_the_roofline_is_the_time_to_read_weights_and_half_of_the_cache(model: Model) -> None:
    plain, drafted = line_up(Stable(model), ["eagle1"], EAGER, model.sampling()).contenders
    found = roofline(plain, rows=2, copy_gbps=1.0, step_seconds=0.5)
    seconds = pass_bytes(model.target, rows=2, nodes=1, cached=8) / 1e9
    assert list(found) == ["floor_ms", "roofline"]
    assert list(found.values()) == pytest.approx([1e3 * seconds, seconds / 0.5], rel=1e-4)
    assert roofline(drafted, rows=2, copy_gbps=1.0, step_seconds=0.5)["floor_ms"] > found["floor_ms"]


def test_copy_bandwidth_is_positive() -> None:
    assert copy_bandwidth(CPU, size=1 << 16) > 0


def test_nested_calls_are_counted_once() -> None:
    class Inner(nn.Module):
        def forward(self) -> str:
            return "done"

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self) -> str:
            return self.inner()

    outer, clock = Outer(), NetworkClock(CPU)
    with clock.watching({"outer": (outer, ("forward",)), "inner": (outer.inner, ("forward", "absent"))}):
        assert outer() == "done"
    outer()
    assert {name: len(of_one) for name, of_one in clock.calls.items()} == {"outer.forward": 1, "inner.forward": 1}
    assert clock.outer == clock.calls["outer.forward"][0] >= clock.calls["inner.forward"][0]
    assert "forward" not in vars(outer)


def test_networks_take_part_of_the_phases(model: Model) -> None:
    contender = line_up(Stable(model), ["eagle1"], EAGER, model.sampling()).contenders[1]
    timed = time_phases(contender, Job(condition_of(model, ["a red apple"], [0]), [(0, 0)]))
    assert {"propose", "score", "walk", "commit"} <= set(timed.phases) and "prefill" not in timed.phases
    assert 0 < timed.clock.outer < timed.total
    assert len(timed.clock.calls["target.forward"]) == timed.steps
    assert set(networks(contender.parts.target, None)) == {"target"}
    assert timed.host_share is not None and 0 < timed.host_share < 1
