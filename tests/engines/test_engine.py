"""Engines run the same steps: none changes the tokens. What they promise, what `auto` chooses, and why."""

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import register_parametrization

from lantern.cli.doctor import predicted
from lantern.cli.measure import VARIANT
from lantern.core.sampling import Sampling
from lantern.core.weights import weights_of
from lantern.decoding.cache import FP32_ROWS
from lantern.engines.cpu import build as library
from lantern.engines.cpu.engine import CpuEngine
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import ENGINES, MOST_WIDE, AutoEngine, EagerEngine, Engine, WideEngine, engine
from lantern.generation.generator import Decoder, build_decoder, generate
from lantern.generation.images import Statistics, totals
from lantern.methods import METHODS, Method
from lantern.models.folder import Model, load_model
from lantern.models.llamagen.text import TextEncoder
from tests.refusals import refused
from tests.tiny import tiny_eagle, tiny_target, wide_target
from tests.tiny_decoder import CONDITION, KEYS, plain_tokens, tiny_decoder
from tests.tiny_folder import save_tiny_model

# of targets that the C++ engine runs, and does not
SIZES = {"wide": {"dim": 64, "vocab_size": 32, "model_type": "t2i"}, "narrow": {"vocab_size": 24}}
EXACT = [name for name, method in METHODS.items() if method.is_identical]


def narrow(method: Method) -> Method:
    """The method with passes of no more tokens than the wide engine can score."""
    small = {"tree": "chain_3", "window": 6, "nodes": 12, "length": 4}
    needs = {} if "window" in method.settings or "nodes" in method.settings or method.tree == "chain_40" else {"tree"}
    return method.with_options(**{name: small[name] for name in method.options if name in small and name not in needs})


@cache
def wide_bf16(name: str, seed: int, guidance: float) -> Tensor:
    target, sampling = tiny_target(seed, dim=64).bfloat16(), Sampling(guidance=guidance)
    decoder = tiny_decoder(narrow(METHODS[name]), target, sampling, engine=WideEngine())
    return decoder.generate(CONDITION, keys=KEYS).tokens


# By default a method runs with or without guidance, and its neighbours in the catalogue the other way.
CASES = [
    pytest.param(name, seed, guidance, marks=[pytest.mark.slow] if (i + seed) % 2 else [])
    for i, name in enumerate(EXACT)
    for seed, guidance in enumerate((1.0, 3.0))
]


@pytest.mark.parametrize(("name", "seed", "guidance"), CASES)
def test_wide_bf16_gives_the_tokens_of_plain_decoding(name: str, seed: int, guidance: float) -> None:
    assert torch.equal(wide_bf16(name, seed, guidance), wide_bf16("plain", seed, guidance))


def test_wide_fp32_pads_small_passes_and_scores_the_same() -> None:
    target, sampling = tiny_target(dim=64), Sampling(guidance=7.5)
    plain = plain_tokens(target, sampling)
    seen: list[int] = []
    hook = target.norm.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[0] * inputs[0].shape[1]))
    padded = tiny_decoder("plain", target, sampling, engine=WideEngine()).generate(CONDITION, keys=KEYS)
    hook.remove()
    of_tokens = seen[len(KEYS) :]  # after one pass per prompt
    assert torch.equal(padded.tokens, plain) and min(of_tokens) >= FP32_ROWS > 2 * len(KEYS)


def test_wide_refuses_large_trees_and_graph_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="17 tokens in a pass, the wide engine at most 16"):
        tiny_decoder("gumbel-jacobi", tiny_target(block_size=36), engine=WideEngine(), window=MOST_WIDE + 1)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="CUDA graphs need a CUDA device, the model is on cpu"):
        tiny_decoder("plain", tiny_target(), engine=GraphEngine())


CHANGES: dict[str, Callable[[Any], object]] = {
    "in-place": lambda target: target.layers[1].attention.wqkv.weight.add_(1.0),
    "load_state_dict": lambda target: target.load_state_dict(tiny_target(1).state_dict()),
    "data": lambda target: target.layers[1].attention.wqkv.weight.data.add_(1.0),  # as adapters are merged
    "to": lambda target: target.to(torch.bfloat16),
    "parameter": lambda target: setattr(target.output, "weight", torch.nn.Parameter(target.output.weight.clone())),
    "same-memory": lambda target: setattr(target.output, "weight", torch.nn.Parameter(target.output.weight.data)),
    "buffer": lambda target: target.cls_embedding.uncond_embedding.mul_(2),
    "submodule": lambda target: target.layers.register_module("1", tiny_target(1).layers[1]),
    "added": lambda target: target.add_module("extra", torch.nn.Linear(2, 2)),
    "hook": lambda target: target.output.register_forward_hook(lambda *_: None),
    "forward": lambda target: setattr(target.output, "forward", torch.tanh),
    "parametrized": lambda target: register_parametrization(target.output, "weight", torch.nn.Tanh()),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_weights_is_noticed(change: str) -> None:
    target = tiny_target()
    target.output.weight = torch.nn.Parameter(target.output.weight.data)  # of version 0
    before = weights_of(target)
    assert weights_of(target) == before
    assert sum(isinstance(state, tuple) for state in before) == len(list(target.parameters())) + 1  # and a buffer
    CHANGES[change](target)
    assert weights_of(target) != before
    # what hooks do may change without weights
    assert (weights_of(target) != weights_of(target)) == (change in ("hook", "forward"))


def test_weights_whose_memory_was_freed_are_not_read() -> None:
    linear = torch.nn.Linear(2, 4)
    linear.weight = torch.nn.Parameter(torch.zeros(6, 2)[2:])
    before = weights_of(linear)
    linear.weight.untyped_storage().resize_(0)
    assert weights_of(linear) != before


def test_weights_that_processes_share_are_known(tmp_path: Path) -> None:
    processes.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        linear, mesh = nn.Linear(4, 4), init_device_mesh("cpu", (1,))
        linear.weight = nn.Parameter(distribute_tensor(torch.zeros(8, 4)[4:], mesh))  # in the memory of another one
        before = weights_of(linear)
        assert weights_of(linear) == before
        linear.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh))
        assert weights_of(linear) != before
    finally:
        processes.destroy_process_group()


@pytest.mark.parametrize("is_global", [False, True])
def test_a_model_that_got_a_hook_runs_through_torch_if_its_engine_was_chosen(embedded: Model, is_global: bool) -> None:
    assert embedded.engine.reason
    made: dict[str, Any] = {"method": "auto", "with_pixels": False, "callback": lambda step: step.index > 1}
    expected = [picture.tokens for picture in generate(embedded, ["a cat"], **made)]
    seen: list[int] = []
    layers: Any = embedded.target.layers
    hook_on = register_module_forward_hook if is_global else layers[0].register_forward_hook
    hook = hook_on(lambda *_: seen.append(1))
    try:
        list(generate(embedded, ["a cat"], **made))
        refused(generate, replace(embedded, engine=CpuEngine()), ["a cat"], match="has a forward hook")
    finally:
        hook.remove()
    assert seen and torch.equal(*expected, *(picture.tokens for picture in generate(embedded, ["a cat"], **made)))


def test_auto_takes_the_cpu_engine_if_its_library_is_built_else_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "missing", lambda: None)
    found = AutoEngine(weights="int8").resolve(wide_target())
    assert found == CpuEngine(weights="int8", amx=False) and "is built" in found.reason
    monkeypatch.setattr(library, "missing", lambda: "the C++ library is not built")
    monkeypatch.setattr(library, "find_compiler", lambda: "g++")
    found = AutoEngine().resolve(wide_target())
    assert found == EagerEngine() and "lantern doctor --build" in found.reason
    assert Model("toy", wide_target(), engine=AutoEngine()).engine == EagerEngine()
    assert CpuEngine().why_not(wide_target()) is None  # chosen by name, it is built


def test_the_default_dtype_on_a_cpu_is_bf16_where_the_cpp_engine_runs_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dtype(folder: Path, chosen: str | Engine = "auto") -> torch.dtype:
        return load_model(folder, device="cpu", engine=chosen, parts=()).dtype

    wide, narrow = (save_tiny_model(tmp_path / name, **sizes) for name, sizes in SIZES.items())
    monkeypatch.setattr(library, "missing", lambda: None)
    assert [dtype(wide), dtype(wide, "cpu"), dtype(wide, AutoEngine("int8"))] == [torch.bfloat16] * 3
    assert dtype(narrow) == dtype(wide, "eager") == torch.float32
    assert dtype(wide, AutoEngine(kv_cache="fp8")) == torch.float32
    texts = [load_model(wide, device="cpu", dtype=kind, parts=("text",)).text for kind in ("auto", "bf16")]
    assert [one.model.dtype for one in texts if isinstance(one, TextEncoder)] == [torch.float32] * 2
    assert any("memory in bfloat16" in one.text for one in predicted(str(wide), None, 1, "cpu", "auto"))
    monkeypatch.setattr(library, "missing", lambda: "the C++ library is not built")
    monkeypatch.setattr(library, "find_compiler", lambda: "g++")
    assert (dtype(wide), dtype(wide, "cpu")) == (torch.float32, torch.bfloat16)
    monkeypatch.setattr(library, "features", lambda: frozenset())
    assert dtype(wide, "cpu") == (torch.float32 if library.of_machine() == library.X86_64 else torch.bfloat16)


def test_a_drafter_that_the_chosen_engine_refuses_is_run_by_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    target = wide_target()
    chosen = GraphEngine(reason="chosen")
    monkeypatch.setattr(GraphEngine, "without_kernels", lambda *_: None)  # no device is missed
    monkeypatch.setattr(GraphEngine, "_prepare", lambda _, target: target)
    monkeypatch.setattr(AutoEngine, "resolve", lambda *_: chosen)
    how = {"sampling": Sampling(), "add_ons": {"eagle1": tiny_eagle(target)}}
    made = build_decoder(METHODS["ddd"], target, engine=AutoEngine(), **how)  # type: ignore[arg-type]
    assert made.engine == EagerEngine() and "change size from step to step" in made.engine.reason
    refused(build_decoder, METHODS["ddd"], target, engine=GraphEngine(), **how, match="change size from step to step")


def test_engines_are_named_and_other_names_refused() -> None:
    for name in ENGINES:
        made = engine(name, weights="int8", reason="because")
        assert engine(**made.as_dict()) == made
    refused(engine, "gpu", match="engine is 'gpu', expected one of auto, eager")
    refused(engine, "eager", weights="int2", match="weights is 'int2', expected one of full")
    refused(engine, "eager", kv_cache="fp4", match="kv_cache is 'fp4', expected one of full, fp8")
    for name in ("wide", "cpu"):
        assert "KV cache in fp8 was given" in (engine(name, kv_cache="fp8").why_not(tiny_target()) or "")
    assert AutoEngine(kv_cache="fp8").resolve(tiny_target()) == EagerEngine(kv_cache="fp8")


def test_variants_are_engines_with_weights() -> None:
    for name in ("cpu+int8", "eager+int8", "graph"):
        assert VARIANT(name) == name
    for text in ("graph+int4", "cpu+int9", "", "cpu+graph", "auto", "wide"):
        refused(VARIANT, text, error=argparse.ArgumentTypeError, match="wanted one of eager, cpu, cpu\\+int8, graph")


def decoder_of(name: str, engine: Engine, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    method = METHODS[name].with_options(tree="chain_2") if METHODS[name].tree else METHODS[name]
    return tiny_decoder(method, tiny_target().to(dtype), engine=engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("engine", "expected"), [(EagerEngine(), "distribution"), (WideEngine(), "tokens"), (GraphEngine(), "tokens")]
)
def test_a_promise_is_the_least_of_method_and_engine(engine: Engine, expected: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    promised = {"plain": "tokens", "eagle1": expected, "eagle1-rejection": "distribution", "cool": "relaxed"}
    assert {name: decoder_of(name, engine, dtype).promise(1) for name in promised} == promised


def test_graphs_promise_tokens_by_kernels_while_the_tree_fits_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    made = decoder_of("gumbel-jacobi", GraphEngine())
    assert made.drafter is not None and made.drafter.max_nodes == 16
    # 16 rows per line in a batch of 8, eight in a batch of 16
    assert [made.promise(images) for images in (1, 8, 16)] == ["tokens", "tokens", "distribution"]
    made = decoder_of("eagle1", EagerEngine())
    monkeypatch.setattr(GraphEngine, "without_kernels", lambda *_: "the model is another")
    assert dataclasses.replace(made, engine=GraphEngine()).promise(1) == "distribution"


def test_totals_promise_what_every_picture_promises() -> None:
    one = Statistics("eagle1", True, 16, 8, (), (), 0.0, 0.0, 0.0, None, {}, promise="tokens")
    other = dataclasses.replace(one, promise="distribution")
    assert one.as_dict()["promise"] == totals([one, one])["promise"] == "tokens"
    assert totals([one, other])["promise"] == "distribution"
