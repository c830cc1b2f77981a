"""Who takes part in a race: methods by their specs, and how each can be run."""

import dataclasses

import pytest
import torch

from lantern.catalog import Engine
from lantern.eval import contenders, variants
from lantern.eval.bandwidth import stored_bytes
from lantern.eval.contenders import Contender, Job, Lineup, condition_of, line_up, method_of, warm_up
from lantern.eval.variants import Stable, Variant
from lantern.model_folder import Model, load_model
from tests.eval.racing import CPU, EAGER
from tests.tiny import tiny_target
from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(save_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


# variants


def test_a_variant_that_cannot_be_made_is_listed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(target: object, bits: int) -> object:
        raise ImportError("no torchao here")

    monkeypatch.setattr(variants, "quantized", fail)
    names = contenders.variants(("eager", "int8"), ("fp32",))
    lineup = line_up(Stable(model), ["eagle1"], names, model.sampling())
    assert [str(one.variant) for one in lineup.contenders] == ["eager fp32", "eager fp32"]
    assert lineup.failed == [{"method": "plain", "variant": "int8 fp32", "reason": "ImportError: no torchao here"}]


def test_a_variant_that_fails_when_run_is_listed(model: Model) -> None:
    lineup = line_up(Stable(model), ["eagle1"], EAGER, model.sampling())
    plain, method = lineup.contenders
    lineup.contenders[1] = dataclasses.replace(method, variant=Variant("compile", "fp32"))

    def run(contender: Contender) -> None:
        if not contender.is_plain:
            raise RuntimeError("no such kernel\nat all")

    warm_up(lineup, run)
    assert lineup.contenders == [plain]
    reason = "RuntimeError: no such kernel at all"
    assert lineup.failed == [{"method": "eagle1", "variant": "compile fp32", "reason": reason}]


def test_what_fails_as_it_is_is_an_error(model: Model) -> None:
    def run(contender: Contender) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        warm_up(line_up(Stable(model), ["eagle1"], EAGER, model.sampling()), run)


def test_without_any_plain_decoding_there_is_no_bench() -> None:
    with pytest.raises(RuntimeError, match="no variant"):
        warm_up(Lineup(), lambda contender: None)


def test_methods_run_on_int8_weights_only_compiled_or_fused() -> None:
    names = contenders.variants(variants.PLAIN_KINDS, ("fp32", "bf16"))
    assert {one.kind for one in names["plain"]} - {one.kind for one in names["others"]} == {"int8"}
    assert len(names["plain"]) == len(names["others"]) + 2 == 2 * len(variants.PLAIN_KINDS)


def test_a_dtype_is_made_of_a_copy(model: Model) -> None:
    stable = Stable(model)
    half = stable.model(Variant("eager", "bf16"))
    assert half.dtype == torch.bfloat16 and model.dtype == torch.float32
    assert half.target.rope.dtype == torch.float32
    assert half.drafter is not None and half.drafter.fc.weight.dtype == torch.bfloat16
    assert stable.model(Variant("eager", "bf16")) is half
    assert stable.model(Variant("eager", "fp32")).target is model.target


def test_int8_weights_are_a_quarter_and_nearly_the_same() -> None:
    pytest.importorskip("torchao")
    target = tiny_target()
    small = variants.prepared(target, Variant("int8", "fp32"))
    assert variants.prepared(small, Variant("int8", "fp32")) is small
    name = "layers.0.attention.wo.weight"
    assert stored_bytes(small.get_parameter(name)) < stored_bytes(target.get_parameter(name)) / 3
    x = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact, near = target.head(x), small.head(x)
    assert 0 < float((exact - near).abs().max()) < 0.05 * float(exact.abs().max())


def test_a_compiled_target_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    target = tiny_target()
    twin = variants.compiled(target)
    assert "forward" in vars(twin) and "forward" not in vars(target)
    assert twin.output.weight.data_ptr() != target.output.weight.data_ptr()


def test_graphs_are_for_gpus_and_for_plain_decoding_too() -> None:
    assert not any("graph" in kind for kind in variants.kinds_of(CPU))
    named = contenders.variants(variants.kinds_of(torch.device("cuda")), ("bf16",))
    assert all(Variant(kind, "bf16") in named[name] for name in named for kind in ("graph", "graph+compile"))
    assert Variant("graph+compile", "fp32").engine() == Engine(compile=True, graphs=True)
    assert Variant("int8", "bf16").engine() == Engine(int8=True)


def test_every_picture_pays_for_its_prompt(model: Model) -> None:
    contender = line_up(Stable(model), [], EAGER, model.sampling()).contenders[0]
    before = len(model.prompts)
    contender.decode(Job(condition_of(model, ["two cats"], [0]), [(0, 0)]))
    assert len(model.prompts) == before


# specs


def test_settings_of_a_method_are_read_from_its_spec(model: Model) -> None:
    method = method_of(model, "lantern++:k=3,lambda_=1.5,tree=chain_2")
    assert dict(method.settings) == {"k": 3, "lambda_": 1.5, "residual": "paper"} and method.tree == "chain_2"
    assert method_of(model, "eagle1").tree == contenders.METHODS["eagle1"].tree


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("eagel1", 'did you mean "eagle1"'),
        ("lantern++:k", "wanted NAME=VALUE"),
        ("lantern++:k=x", "'x' is no number"),
        ("eagle1:k=3", "has no setting k"),
    ],
)
def test_a_wrong_spec_is_refused(model: Model, spec: str, wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        method_of(model, spec)


def test_the_class_conditional_are_asked_for_classes_in_turn() -> None:
    bare = Model(name="classes", target=tiny_target(model_type="c2i", cls_token_num=1, num_classes=3))
    labels = condition_of(bare, [], [2, 3, 4]).labels
    assert labels is not None and labels.tolist() == [2, 0, 1]
