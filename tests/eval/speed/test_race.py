"""The loop over rounds, and what seconds claim."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lantern.engines.engine import AutoEngine, engine
from lantern.eval.speed import contenders
from lantern.eval.speed.contenders import RoundImages, Stable, Variant, built, entries_of, line_up
from lantern.eval.speed.race import (
    COPY_BYTES,
    collect,
    compare,
    copy_bandwidth,
    pass_bytes,
    pass_products,
    race,
    roofline,
    spread,
)
from lantern.models.folder import Model
from tests.eval.workers import CPU, EAGER, Patch, eager
from tests.refusals import refused
from tests.tiny import tiny_target


def records(wants: Any = lambda one, number: True) -> Iterator[dict[str, Any]]:
    def take(one: Any, number: int, job: Any) -> dict[str, Any]:
        return {"contender": one, "round": number, "job": job}

    field: Any = "abc"
    jobs: Any = "wxyz"
    return race(field, jobs, take, wants=wants)


def test_contenders_run_in_rotated_order_in_rounds_that_want_them() -> None:
    found = list(records())
    assert "".join(one["contender"] for one in found) == "abcbcacababc"
    assert [one["round"] for one in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert "".join(one["job"] for one in found) == "wwwxxxyyyzzz"
    found = list(records(lambda one, number: number != 1 and (one, number) != ("a", 0)))
    assert "".join(one["contender"] for one in found) == "bccababc"


def test_a_signal_leaves_whole_rounds() -> None:
    def stopped(count: int) -> Iterator[dict[str, Any]]:
        for one, _ in zip(records(), range(count), strict=False):
            yield one
        raise KeyboardInterrupt("terminated")

    for number, left in ((3, 3), (7, 6), (11, 9)):
        found, stop = collect(stopped(number), 3)
        assert len(found) == left and str(stop) == "terminated"
    with pytest.raises(KeyboardInterrupt, match="terminated"):
        collect(stopped(2), 3)


def test_ratios_are_of_medians_and_percentiles_interpolated() -> None:
    assert spread([0.0, 10.0]) == {"median": 5.0, "p10": 1.0, "p90": 9.0}
    assert spread([7.0]) == {"median": 7.0, "p10": 7.0, "p90": 7.0}
    found = compare([1.0, 2.0, 3.0] * 4, [1.0, 1.0, 2.0] * 4)
    low, high = found["interval_95"]
    assert (found["ratio_of_medians"], found["median_of_ratios"]) == (2.0, 1.5) and 1.0 <= low <= 1.5 <= high <= 2.0


NOISY = [1.0] * 5 + [1.7] * 5


@pytest.mark.parametrize(
    ("baseline", "other", "refusal"),
    [
        ([2.0] * 10, [1.0] * 10, None),
        (NOISY, [1.0] * 10, "no claim: p90/p10 is 1.7 for the baseline"),
        ([2.0] * 10, NOISY, None),  # images that take other numbers of steps
        ([1.0] * 10, [0.5] * 8 + [1.1] * 2, "contains 1"),  # of ten the second largest is an end
        ([2.0] * 2 + [3.0] * 8, [1.0] * 10, None),  # a width at the bound
        ([1.0, 1.1, 0.95, 1.05] * 3, [1.0] * 12, "contains 1"),
        ([2.0] * 9, [1.0] * 9, "no claim: 9 rounds"),
    ],
)
def test_unsure_ratios_are_not_claimed(baseline: list[float], other: list[float], refusal: str | None) -> None:
    found = compare(baseline, other)
    assert (found["claim"] is None) == (found["refusal"] is not None) == (refusal is not None)
    assert found["claim"] in (None, found["median_of_ratios"]) and (refusal or "") in str(found["refusal"])


def test_auto_stands_for_the_engine_of_this_machine(model: Model, monkeypatch: Patch) -> None:
    assert Variant.of(engine("auto"), "fp32").resolved(Stable(model)) == Variant("eager", "fp32")
    monkeypatch.setattr(AutoEngine, "resolve", lambda self, target: engine("cpu", weights=self.weights))
    assert Variant.of(engine("auto", weights="int8"), "fp32").resolved(Stable(model)) == Variant("cpu+int8", "fp32")
    assert Variant("eager", "fp32").resolved(Stable(model)) == Variant("eager", "fp32")


def test_variants_have_the_weights_and_devices_that_run() -> None:
    for kind in contenders.VARIANTS:
        assert Variant.of(Variant(kind, "bf16").engine(), "bf16") == Variant(kind, "bf16")
    refused(Variant.of, engine("eager", weights="int4"), "fp32", match="give another engine")
    # rounded keys may change tokens
    assert [Variant(kind, "fp32").is_fp32 for kind in ("eager", "cpu+int8", "eager+fp8")] == [True, True, False]
    assert not Variant("eager", "bf16").is_fp32
    plain, methods = (entries_of([label], contenders.VARIANTS, ("fp32", "bf16")) for label in ("plain", "eagle1"))
    missing = {variant for _, variant in plain} - {variant for _, variant in methods}
    assert {variant.kind for variant in missing} == {"eager+int8"} and len(plain) == len(methods) + 2
    assert not any("graph" in kind for kind in contenders.kinds_of(CPU))
    assert {"graph", "graph+int8"} <= set(contenders.kinds_of(torch.device("cuda")))


def test_what_cannot_be_made_or_run_is_listed_unless_it_is_eager(model: Model, monkeypatch: Patch) -> None:
    def run(*_: object) -> None:
        raise RuntimeError("no such kernel\nat all")

    monkeypatch.setattr("lantern.core.weights.quantized", run)
    entries, failed = entries_of(["plain"], ("eager", "eager+int8"), ("fp32",)), list[dict[str, str]]()
    field = line_up(Stable(model), entries, built(model.sampling()), lambda one: None, failed)
    reason = "RuntimeError: no such kernel at all"
    assert [one.name for one in field] == ["plain | eager fp32"]
    assert failed == [{"method": "plain", "variant": "eager+int8 fp32", "reason": reason}]
    stable, cpu, failed = Stable(model), Variant("cpu", "fp32"), []
    stable._made[cpu] = model
    assert line_up(stable, [("eagle1", cpu)], built(model.sampling()), run, failed) == []
    assert failed == [{"method": "eagle1", "variant": "cpu fp32", "reason": reason}]
    for entry, message in (
        (("plain", cpu), "no variant of plain decoding runs on this machine: RuntimeError"),
        (("eagle1", EAGER), "no such kernel"),
    ):
        with pytest.raises(RuntimeError, match=message):
            line_up(stable, [entry], built(model.sampling()), run, failed)


def test_a_dtype_is_a_copy_of_the_model(model: Model) -> None:
    stable = Stable(model)
    half = stable.model(Variant("eager", "bf16"))
    assert half.dtype == torch.bfloat16 and model.dtype == torch.float32
    assert half.target.get_buffer("rotary.table").dtype == torch.float32
    assert half.drafter is not None and half.drafter.fc.weight.dtype == torch.bfloat16
    assert stable.model(Variant("eager", "bf16")) is half
    assert stable.model(Variant("eager", "fp32")).target is model.target


def test_every_picture_has_its_prefill_and_classes_come_in_order(model: Model) -> None:
    contender = eager(model)[0]
    before = len(model.prompts)
    contender.decode(RoundImages(contenders.condition_of(model, ["two cats"], [0]), [(0, 0)]))
    assert len(model.prompts) == before
    bare = Model(name="classes", target=tiny_target(model_type="c2i", cls_token_num=1, num_classes=3))
    labels = contenders.condition_of(bare, [], [2, 3, 4]).labels
    assert labels is not None and labels.tolist() == [2, 0, 1]


def test_a_pass_reads_weights_but_tables_and_a_cache_in_fp32() -> None:
    target = tiny_target()
    layer = 4 * 32 * 32 + 3 * 32 * target.config.ffn_dim + 2 * 32
    cache = 2 * 2 * 2 * (16 + 3) * 32
    small: Any = Variant("eager+int8", "fp32").engine().prepare(target)
    few, many = (one.get_parameter("layers.0.attention.wo.weight").nbytes for one in (small, target))
    assert few < many / 3
    assert pass_bytes(target, rows=2, nodes=3, cached=16) == 4 * (2 * layer + 32 + 24 * 32 + cache)
    linear = 2 * (layer - 2 * 32) + 24 * 32  # without norms
    assert pass_products(target, rows=2, nodes=3, cached=16) == 2 * 3 * (linear + 2 * 2 * (16 + 3) * 32)
    narrow, wide = pass_bytes(target, rows=0, cached=0), 2 * 2 * 2 * (8 + 1) * 32 * 4
    assert pass_bytes(target.bfloat16(), rows=2, nodes=1, cached=8) == wide + narrow // 2
    assert pass_bytes(target, rows=2, nodes=1, cached=8, kv_cache="fp8") == wide // 4 + narrow // 2


def test_the_roofline_is_the_time_to_read_weights_and_half_of_the_cache(model: Model, monkeypatch: Patch) -> None:
    plain, drafted = eager(model, "eagle1")
    monkeypatch.setattr("lantern.eval.speed.race.product_rate", lambda _: 4e9)
    found = roofline(plain, rows=2, copy_gbps=1.0, step_seconds=0.5)
    seconds = pass_bytes(model.target, rows=2, nodes=1, cached=8) / 1e9
    products = pass_products(model.target, rows=2, nodes=1, cached=8)
    assert list(found.values()) == pytest.approx([1e3 * seconds, seconds / 0.5, products / 4e9 / 0.5], rel=1e-4)
    assert roofline(drafted, rows=2, copy_gbps=1.0, step_seconds=0.5)["floor_ms"] > found["floor_ms"]
    monkeypatch.setitem(COPY_BYTES, "cpu", 1 << 16)
    assert copy_bandwidth(CPU) > 0
