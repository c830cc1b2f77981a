"""The engine `auto`: what it chooses, and why."""

import argparse

import pytest

from lantern.cli.command import VARIANT
from lantern.core.sampling import Sampling
from lantern.engines.cpu import build as library
from lantern.engines.cpu.engine import CpuEngine
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import ENGINES, AutoEngine, EagerEngine, engine
from lantern.generation.generator import build_decoder
from lantern.methods import METHODS
from lantern.models.folder import Model
from lantern.models.llamagen.transformer import Transformer
from tests.tiny import tiny_eagle, tiny_target


def target_in() -> Transformer:
    return tiny_target(block_size=64, dim=64, n_head=2, vocab_size=32)


def test_the_cpu_engine_is_chosen_if_its_library_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "missing", lambda: None)
    found = AutoEngine(weights="int8").resolve(target_in())
    assert found == CpuEngine(weights="int8") and "is built" in found.reason


def test_eager_is_chosen_if_a_build_would_be_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "missing", lambda: "the C++ library is not built")
    monkeypatch.setattr(library, "find_compiler", lambda: "g++")
    found = AutoEngine().resolve(target_in())
    assert found == EagerEngine() and "lantern doctor --build" in found.reason
    assert Model("toy", target_in(), engine=AutoEngine()).engine == EagerEngine()
    assert CpuEngine().why_not(target_in()) is None  # chosen by name, it is built


def test_a_drafter_that_the_chosen_engine_refuses_is_run_by_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_in()
    chosen = GraphEngine(reason="chosen")
    monkeypatch.setattr(GraphEngine, "without_kernels", lambda *_: None)  # no device is missed
    monkeypatch.setattr(GraphEngine, "_prepare", lambda _, target: target)
    monkeypatch.setattr(AutoEngine, "resolve", lambda *_: chosen)
    how = {"sampling": Sampling(), "drafter_module": tiny_eagle(target)}
    made = build_decoder(METHODS["ddd"], target, engine=AutoEngine(), **how)  # type: ignore[arg-type]
    assert made.engine == EagerEngine() and "change size from step to step" in made.engine.reason
    with pytest.raises(ValueError, match="change size from step to step"):
        build_decoder(METHODS["ddd"], target, engine=GraphEngine(), **how)  # type: ignore[arg-type]


def test_engine_survives_a_round_trip_through_a_dict() -> None:
    for name in ENGINES:
        made = engine(name, weights="int8", reason="because")
        assert engine(**made.as_dict()) == made


def test_unknown_names_and_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="engine is 'gpu', expected one of auto, eager"):
        engine("gpu")
    with pytest.raises(ValueError, match="weights is 'int2', expected one of full"):
        engine("eager", weights="int2")


def test_variants_are_engines_with_weights() -> None:
    for name in ("cpu+int8", "eager+int8", "wide", "graph"):
        assert VARIANT(name) == name
    for text in ("graph+int4", "cpu+int9", "", "cpu+graph", "auto"):
        with pytest.raises(argparse.ArgumentTypeError, match="wanted one of eager, eager\\+int8, wide"):
            VARIANT(text)
