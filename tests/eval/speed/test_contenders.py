from typing import Any

import pytest
import torch

from lantern.engines.engine import AutoEngine, engine
from lantern.eval.speed import contenders
from lantern.eval.speed.contenders import (
    VARIANTS,
    Contender,
    RoundImages,
    Stable,
    Variant,
    built,
    condition_of,
    entries_of,
    line_up,
)
from lantern.eval.speed.race import copy_bandwidth, pass_bytes, roofline, stored_bytes
from lantern.models.folder import Model
from tests.eval.variants import CPU, EAGER, eager
from tests.tiny import tiny_target

# variants


@pytest.mark.parametrize("kind", VARIANTS)
def test_the_variant_of_an_engine_has_that_engine(kind: str) -> None:
    variant = Variant(kind, "bf16")
    assert Variant.of(variant.engine(), "bf16") == variant


def test_auto_stands_for_the_engine_of_this_machine(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Variant.of(engine("auto"), "fp32").resolved(Stable(model)) == Variant("eager", "fp32")
    monkeypatch.setattr(AutoEngine, "resolve", lambda self, target: engine("cpu", weights=self.weights))
    assert Variant.of(engine("auto", weights="int8"), "fp32").resolved(Stable(model)) == Variant("cpu+int8", "fp32")
    assert Variant("eager", "fp32").resolved(Stable(model)) == Variant("eager", "fp32")


def test_4_bit_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="give another engine"):
        Variant.of(engine("eager", weights="int4"), "fp32")


def test_a_variant_that_cannot_be_made_is_listed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(target: object, bits: int) -> object:
        raise ImportError("no torchao here")

    monkeypatch.setattr("lantern.core.prepared.quantized", fail)
    entries, failed = entries_of(["plain"], ("eager", "eager+int8"), ("fp32",)), list[dict[str, str]]()
    field = line_up(Stable(model), entries, built(model.sampling()), lambda one: None, failed)
    assert [one.name for one in field] == ["plain | eager fp32"]
    reason = "ImportError: no torchao here"
    assert failed == [{"method": "plain", "variant": "eager+int8 fp32", "reason": reason}]


def test_what_fails_when_run_is_listed_unless_it_is_eager(model: Model) -> None:
    def run(contender: Contender) -> None:
        raise RuntimeError("no such kernel\nat all")

    stable, cpu, failed = Stable(model), Variant("cpu", "fp32"), list[dict[str, str]]()
    stable._made[cpu] = model
    assert line_up(stable, [("eagle1", cpu)], built(model.sampling()), run, failed) == []
    assert failed == [{"method": "eagle1", "variant": "cpu fp32", "reason": "RuntimeError: no such kernel at all"}]
    with pytest.raises(RuntimeError, match="no variant of plain decoding runs on this machine: RuntimeError"):
        line_up(stable, [("plain", cpu)], built(model.sampling()), run, failed)
    with pytest.raises(RuntimeError, match="no such kernel"):
        line_up(stable, [("eagle1", EAGER)], built(model.sampling()), run, failed)


def test_methods_do_not_run_on_int8_weights_eagerly() -> None:
    plain, methods = (entries_of([label], VARIANTS, ("fp32", "bf16")) for label in ("plain", "eagle1"))
    missing = {variant for _, variant in plain} - {variant for _, variant in methods}
    assert {variant.kind for variant in missing} == {"eager+int8"} and len(plain) == len(methods) + 2


def test_a_dtype_is_a_copy_of_the_model(model: Model) -> None:
    stable = Stable(model)
    half = stable.model(Variant("eager", "bf16"))
    assert half.dtype == torch.bfloat16 and model.dtype == torch.float32
    assert half.target.get_buffer("rotary.table").dtype == torch.float32
    assert half.drafter is not None and half.drafter.fc.weight.dtype == torch.bfloat16
    assert stable.model(Variant("eager", "bf16")) is half
    assert stable.model(Variant("eager", "fp32")).target is model.target


def test_int8_weights_are_less_than_a_third_of_the_bytes() -> None:
    target, name = tiny_target(), "layers.0.attention.wo.weight"
    small: Any = Variant("eager+int8", "fp32").engine().prepare(target)
    assert stored_bytes(small.get_parameter(name)) < stored_bytes(target.get_parameter(name)) / 3


def test_graphs_are_for_gpus() -> None:
    assert not any("graph" in kind for kind in contenders.kinds_of(CPU))
    assert {"graph", "graph+int8"} <= set(contenders.kinds_of(torch.device("cuda")))


def test_every_picture_includes_its_prefill(model: Model) -> None:
    contender = eager(model)[0]
    before = len(model.prompts)
    contender.decode(RoundImages(condition_of(model, ["two cats"], [0]), [(0, 0)]))
    assert len(model.prompts) == before


def test_class_conditional_models_get_classes_in_order() -> None:
    bare = Model(name="classes", target=tiny_target(model_type="c2i", cls_token_num=1, num_classes=3))
    labels = condition_of(bare, [], [2, 3, 4]).labels
    assert labels is not None and labels.tolist() == [2, 0, 1]


def test_a_pass_reads_all_weights_except_embedding_tables() -> None:
    target = tiny_target()
    layer = 4 * 32 * 32 + 3 * 32 * target.config.ffn_dim + 2 * 32
    cache = 2 * 2 * 2 * (16 + 3) * 32
    assert pass_bytes(target, rows=2, nodes=3, cached=16) == 4 * (2 * layer + 32 + 24 * 32 + cache)


def test_a_cpu_caches_in_fp32_for_every_dtype() -> None:
    target = tiny_target()
    wide, narrow = (2 * 2 * 2 * (8 + 1) * 32 * 4, pass_bytes(target, rows=0, cached=0))
    half = target.bfloat16()
    assert pass_bytes(half, rows=2, nodes=1, cached=8) == wide + narrow // 2


def test_the_roofline_is_the_time_to_read_weights_and_half_of_the_cache(model: Model) -> None:
    plain, drafted = eager(model, "eagle1")
    found = roofline(plain, rows=2, copy_gbps=1.0, step_seconds=0.5)
    seconds = pass_bytes(model.target, rows=2, nodes=1, cached=8) / 1e9
    assert list(found.values()) == pytest.approx([1e3 * seconds, seconds / 0.5], rel=1e-4)
    assert roofline(drafted, rows=2, copy_gbps=1.0, step_seconds=0.5)["floor_ms"] > found["floor_ms"]
    assert copy_bandwidth(CPU, size=1 << 16) > 0
