"""The engine `auto`: what it chooses, and why."""

import argparse

import pytest
import torch

from lantern.cli.command import VARIANT
from lantern.core.sampling import Sampling
from lantern.engines.cpu import build as library
from lantern.engines.cpu.engine import CpuEngine
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import (
    ENGINES,
    AutoEngine,
    EagerEngine,
    Engine,
    engine,
    engine_from_dict,
    engine_of_variant,
)
from lantern.generation.decoder import build_decoder
from lantern.methods import METHODS
from lantern.models.folder import Model
from lantern.models.llamagen.transformer import Transformer
from tests.tiny import tiny_eagle, tiny_target


def target_in(dtype: torch.dtype = torch.float32, vocab_size: int = 32) -> Transformer:
    return tiny_target(block_size=64, dim=64, n_head=2, vocab_size=vocab_size).to(dtype)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "missing", lambda: None)


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "missing", lambda: "the C++ library is not built")
    monkeypatch.setattr(library, "find_compiler", lambda: "g++")


def test_the_cpu_engine_is_chosen_if_its_library_is_built(built: None) -> None:
    found = AutoEngine(weights="int8", reproducible=True).resolve(target_in())
    assert found == CpuEngine(weights="int8", reproducible=True) and "is built" in found.reason


def test_eager_is_chosen_if_a_build_would_be_needed(unbuilt: None) -> None:
    found = AutoEngine().resolve(target_in())
    assert found == EagerEngine() and "lantern doctor --build" in found.reason
    assert CpuEngine().available(target_in()) is None  # chosen by name, it is built


@pytest.mark.parametrize(
    ("target", "weights", "reason"),
    [
        (target_in(torch.float16), "full", "fp32 or bf16"),
        (target_in(vocab_size=24), "full", "vocab_size is 24"),
        (target_in(), "int4", "int4 was given"),
    ],
)
def test_eager_is_chosen_for_what_the_cpu_engine_does_not_support(
    target: Transformer, weights: str, reason: str, built: None
) -> None:
    found = AutoEngine(weights=weights).resolve(target)  # type: ignore[arg-type]
    assert found == EagerEngine(weights=weights) and reason in found.reason  # type: ignore[arg-type]


def test_a_model_resolves_its_engine(unbuilt: None) -> None:
    assert Model("toy", target_in(), engine=AutoEngine()).engine == EagerEngine()


def test_a_drafter_that_the_chosen_engine_refuses_is_run_by_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_in()
    chosen = GraphEngine(reason="chosen")
    monkeypatch.setattr(GraphEngine, "available", lambda *_, **__: None)
    monkeypatch.setattr(AutoEngine, "resolve", lambda *_: chosen)
    how = {"sampling": Sampling(), "drafter_module": tiny_eagle(target)}
    made = build_decoder(METHODS["ddd"], target, engine=AutoEngine(), **how)  # type: ignore[arg-type]
    assert made.engine == EagerEngine() and "change size from step to step" in made.engine.reason
    with pytest.raises(ValueError, match="change size from step to step"):
        build_decoder(METHODS["ddd"], target, engine=GraphEngine(), **how)  # type: ignore[arg-type]


def test_engine_survives_a_round_trip_through_a_dict() -> None:
    for name in ENGINES:
        made = engine(name, weights="int8", reason="because")
        assert engine_from_dict(made.as_dict()) == made


def test_unknown_names_and_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="engine is 'gpu', expected one of auto, eager"):
        engine("gpu")
    with pytest.raises(ValueError, match="weights is 'int2', expected one of full"):
        engine("eager", weights="int2")


def test_layer_by_layer_keeps_weights_and_reproducibility() -> None:
    made: Engine = CpuEngine(weights="int8", reproducible=True)
    assert made.layer_by_layer() == EagerEngine(weights="int8")
    assert EagerEngine(reproducible=True).layer_by_layer() == EagerEngine(reproducible=True)


@pytest.mark.parametrize("name", ["cpu+compile+int8", "eager+int8", "compile+int8", "graph"])
def test_variants_have_one_name_and_an_engine(name: str) -> None:
    assert VARIANT(name) == name
    made = engine_of_variant(name)
    assert made.name == name.split("+")[0] and made.weights == ("int8" if "int8" in name else "full")
    assert made.compiles_steps == ("compile" in name)


@pytest.mark.parametrize("text", ["graph+int4", "cpu+int9", "", "cpu+graph"])
def test_unknown_variants_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="wanted one of eager, compile, cpu"):
        VARIANT(text)
