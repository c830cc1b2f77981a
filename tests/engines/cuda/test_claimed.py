"""Whole generations with everything on a claimed CUDA device: no operation mixes devices, no captured round waits.

Targets of LlamaGen, and of transformers with passes of torch.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.core.weights import FixedPasses
from lantern.engines.cuda import graphs
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import EAGER, Engine, engine
from lantern.generation.generator import Decoder, build_decoder, generate
from lantern.methods import METHODS
from lantern.models.folder import load_model
from tests import tiny_transformers as tiny
from tests.engines.cuda.claimed import Claimed, Rehearsed, claim_module, claimed_cuda, held, launch, watching
from tests.tiny import tiny_eagle
from tests.tiny_decoder import small_method, tiny_decoder

WAITS: list[Callable[[Tensor], object]] = [
    *(lambda x: x.tolist(), lambda x: x.cpu(), lambda x: x.unique(), lambda x: x.unique_consecutive()),
    *(lambda x: x.sum().item(), lambda x: bool(x[0] > 1), lambda x: [0, 1, 2][x[0].long()]),
    *(lambda x: x[x > 1], lambda x: x.clone().__setitem__(x > 1, 1.0), lambda x: x.masked_select(x > 1)),
    *(lambda x: torch.where(x > 1), lambda x: torch.equal(x, x), lambda x: torch.allclose(x, x)),
    *(lambda x: x.unique(dim=0), lambda x: x.long().bincount(), lambda x: x.repeat_interleave(x.long())),
    lambda x: torch.tensor([1.0, 2.0], device="cuda"),
]


def test_the_claimed_device_refuses_what_a_gpu_refuses_and_records_waits() -> None:
    with claimed_cuda() as device:
        there = torch.arange(4.0, device="cuda")
        assert there.device.type == "cuda" and (there + 1).device.type == "cuda"
        assert torch.zeros(3).device.type == "cpu"
        for mixed in (lambda: there + torch.ones(4), lambda: there[torch.tensor([True, False, True, False])]):
            with pytest.raises(RuntimeError, match="on the CPU beside one on cuda"):
                mixed()
        assert device.waits == [] and (there * torch.tensor(2.0)).device.type == "cuda"
        assert there.repeat_interleave(there.long(), output_size=6).shape == (6,) and device.waits == []
        for wait in WAITS:
            wait(there)
        assert len(device.waits) == len(WAITS)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(pytest.param("fused", name, marks=pytest.mark.slow) for name in ("eagle1", "bounded")),
        ("fused", "lantern++"),
        ("llama", "plain"),
    ],
)
def test_captured_rounds_of_kernels_have_tensors_of_the_device_only_and_wait_for_nothing(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")
    from lantern.engines.cuda import target as module
    from lantern.engines.cuda import trial
    from lantern.engines.cuda.kernels import is_interpreted
    from tests.engines.cuda import kinds

    if not is_interpreted():
        pytest.skip("kernels are interpreted only where there is no GPU")

    run, calls = interpreter.GridExecutor.__call__, list[bool]()

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        calls.append(all(isinstance(x, Claimed) for x in tensors))
        launch(partial(run, self), *args, **kwargs)

    def tokens(engine: Engine) -> Tensor:
        target = kinds.target_of(kind, torch.float32)
        drafter = None if kind == "llama" else tiny_eagle(target)
        for part in filter(None, (target, drafter)) if engine.captures else ():
            claim_module(part)
        sampling = Sampling(guidance=3.0, top_k=10)
        if drafter is None:
            decoder = kinds.decoder_of(kind, name, target, sampling, engine)
        else:
            decoder = tiny_decoder(small_method(name), target, sampling, module=drafter, engine=engine)
        return kinds.generated(kind, decoder, callback=lambda step: step.index == 4).tokens

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(trial, "trial_of", lambda prepared, **_: trial.Trial(keeps_bits=True))
    monkeypatch.setattr(module, "is_quantized", lambda weight: False)  # other subclasses of Tensor are
    monkeypatch.setattr(graphs, "WARM_ROUNDS", graphs.SETTLING_ROUNDS)
    expected = tokens(EAGER)
    with claimed_cuda() as device:
        rounds = watching(device)
        monkeypatch.setattr(GraphEngine, "drive", lambda _, states: rounds(states[0]))
        made = tokens(GraphEngine())
    assert torch.equal(held(made), expected)
    assert calls and all(calls)
    assert rounds.waits == [] and rounds.captured == 1 and rounds.replayed == 2


OTHERS = ("lantern-emoji", "janus", "emu3", "emu3.5", "chameleon", "lumina", "liquid")


@pytest.mark.parametrize("name", ["toy", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_pictures_of_a_model_are_those_of_the_cpu(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.models import test_transformers as released

    source, size, prompts = str(folder) if name == "toy" else name, None, ["a red apple"]
    if name in released.CASES:
        source, size, prompts = str(released.folder(name, tmp_path)), tiny.SIZES.get(name), released.PROMPTS
    how: dict[str, Any] = {"method": "gumbel-jacobi", "sampling": Sampling(guidance=3.0), "seed": 3}
    # the claimed device lacks an operation that the others decode with
    how["with_pixels"] = name in ("toy", "lantern-emoji", "janus", "emu3")
    expected = list(generate(load_model(source, device="cpu", engine="eager", size=size), prompts, **how))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with claimed_cuda():
        model = load_model(source, device=torch.device("cuda"), dtype="fp32", engine="eager", size=size)
        made = list(generate(model, prompts, **how))
    for own, other in zip(made, expected, strict=True):
        assert torch.equal(held(own.tokens), other.tokens)
        assert (own.pixels is not None) == (other.pixels is not None) == how["with_pixels"]
        if own.pixels is not None and other.pixels is not None:
            assert torch.equal(held(own.pixels), other.pixels)


NEWLINES = ("emu3", "lumina")
FAMILIES = ("janus", "chameleon", *NEWLINES)
CASES = [(name, method) for method in ("plain", "sjd-pac", "gumbel-jacobi") for name in FAMILIES]
CASES = [pytest.param(*case, marks=() if i in (5, 10) else pytest.mark.slow) for i, case in enumerate(CASES)]


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine prepare targets as on a GPU, without kernels; a recording of each round is replayed."""
    monkeypatch.setattr(GraphEngine, "why_not", lambda *_, **__: None)
    monkeypatch.setattr(GraphEngine, "without_kernels", lambda *_: "not here")
    monkeypatch.setattr(GraphEngine, "drive", lambda _, states: Rehearsed(states[0]))


def target_of(name: str) -> Any:
    return tiny.assemble(name, size=(12, 8) if name == "lumina" else None).target


def built(method: str, target: Any, engine: Engine, **how: Any) -> Decoder:
    settings = {"window": 4} if "window" in METHODS[method].settings else {}
    chosen = METHODS[method].with_options(**settings)
    return build_decoder(chosen, target, sampling=Sampling(guidance=3.0), engine=engine, **how)


def condition_of(word: int, images: int = 2) -> Condition:
    tokens = torch.tensor([[[0, 1, word, 4], [0, 0, 1, 4]], [[1, 9, 10, 4], [0, 0, 1, 4]]])[:images]
    return Condition(tokens=tokens, mask=tokens > 0)


@pytest.mark.parametrize(("name", "method"), CASES)
def test_a_replayed_round_gives_the_tokens_of_the_eager_one_and_waits_for_nothing(
    name: str, method: str, rehearsed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [(condition_of(9 + seed), [(seed, 0), (seed, 1)]) for seed in (3, 8)]
    eager = built(method, target_of(name), EAGER)
    expected = [eager.generate(condition, keys=keys) for condition, keys in given]
    with claimed_cuda() as device:
        target, watched = claim_module(target_of(name)), watching(device)
        monkeypatch.setattr(GraphEngine, "drive", lambda _, states: watched(states[0]))
        graph = built(method, target, GraphEngine())
        assert isinstance(graph.target, FixedPasses) == (name in NEWLINES)
        made = [graph.generate(condition, keys=keys) for condition, keys in given]
        assert watched.captured == 1 and watched.replayed > 1 and watched.waits == []

    for own, other in zip(made, expected, strict=True):
        assert torch.equal(held(own.tokens), other.tokens) and torch.equal(held(own.steps), other.steps)


def test_a_smaller_model_with_newlines_drafts_in_a_captured_round(rehearsed: None) -> None:
    target = target_of("emu3")
    parts = {"small": tiny.assemble("emu3", tiny.make("emu3", 1)).target}
    eager, graph = (built("self-cascade", target, each, add_ons=parts) for each in (EAGER, GraphEngine()))
    before = Rehearsed.captured
    for length in (3, 2):  # the smaller model's cache is as long as the prompt
        given = condition_of(9, images=1)
        given = Condition(tokens=given.tokens[..., -length:], mask=given.mask[..., -length:])  # type: ignore[index]
        expected, made = (one.generate(given, keys=[(3, 0)]) for one in (eager, graph))
        assert torch.equal(made.tokens, expected.tokens)
    assert Rehearsed.captured == before + 2


def test_a_gpu_takes_targets() -> None:
    graph = GraphEngine()
    with claimed_cuda():
        janus, emu3 = (claim_module(target_of(name)) for name in ("janus", "emu3"))
        assert graph.why_not(janus) is None and graph.why_not(emu3) is None
        assert "passes run through torch" in (graph.remark(emu3) or "")
        assert not graph.keeps_bits(emu3, nodes=1, lines=2)
        assert "quantized weights" in (GraphEngine(weights="int8").why_not(janus) or "")
        assert "runs LlamaGen's layers" in (engine("wide").why_not(janus) or "")
