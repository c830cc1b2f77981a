"""Whole generations with everything on a claimed CUDA device: no operation mixes devices, no captured round waits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Step
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import EAGER, Engine
from lantern.generation.decoder import Decoder, build_decoder
from lantern.generation.generator import generate
from lantern.generation.requests import Request
from lantern.methods import METHODS
from lantern.models.folder import load_model
from tests.engines.cuda.claimed import Claimed, ClaimedDevice, claim, claim_module, claimed_cuda, held
from tests.engines.cuda.replay import Rehearsed, RehearsedEngine
from tests.engines.cuda.test_reuse import CAPTURED, SHORT
from tests.tiny import tiny_condition, tiny_eagle, tiny_target
from tests.tiny_decoder import small_method, tiny_codebook, tiny_neighbours
from tests.tiny_parts import tiny_parts

CONDITION = tiny_condition((4, 2))
SEEDS = (9, 4)


def decoder_of(name: str, *, is_claimed: bool, engine: Engine = EAGER) -> Decoder:
    """Return a decoder whose target, drafter, add-ons and tables are on the claimed device."""
    target = tiny_target()
    parts: dict[str, Any] = {"drafter_module": tiny_eagle(target), **tiny_parts(target)}
    tables: dict[str, Any] = {"neighbours": tiny_neighbours(), "codebook": tiny_codebook()}
    if is_claimed:
        for module in (target, *parts.values()):
            claim_module(module)
        tables = claim(tables)
    drafter = parts.pop("drafter_module")
    given: dict[str, Any] = {"drafter_module": drafter, "add_ons": parts, "sampling": Sampling(guidance=3.0)}
    method = small_method(name)
    method = method.with_options(k=10) if "k" in method.settings else method
    return build_decoder(method, target, engine=engine, **given, **tables)


def tokens_of(decoder: Decoder, seed: int) -> Tensor:
    return decoder.generate(CONDITION, keys=[(seed, 0), (seed, 7)]).tokens


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.slow]) for n in METHODS])
def test_a_generation_has_all_tensors_on_the_device(name: str) -> None:
    expected = tokens_of(decoder_of(name, is_claimed=False), 9)
    with claimed_cuda():
        made = tokens_of(decoder_of(name, is_claimed=True), 9)
    assert torch.equal(held(made), expected)


def watching(device: ClaimedDevice) -> Any:
    """Return a class of rounds whose `waits` are those of the captured one."""

    class Watched(Rehearsed):
        waits: list[str] | None = None

        def held_round(self) -> Step:
            before = len(device.waits)
            step = super().held_round()
            type(self).waits = device.waits[before:]
            return step

    return Watched


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.slow]) for n in CAPTURED])
def test_a_captured_round_waits_for_nothing_and_copies_nothing_from_the_host(name: str) -> None:
    plain = decoder_of(name, is_claimed=False)
    expected = [tokens_of(plain, seed) for seed in SEEDS]
    with claimed_cuda() as device:
        watched = watching(device)
        decoder = decoder_of(name, is_claimed=True, engine=RehearsedEngine(rounds=watched))
        made = [tokens_of(decoder, seed) for seed in SEEDS]
    assert watched.waits == []
    assert all(torch.equal(held(a), b) for a, b in zip(made, expected, strict=True))


@pytest.mark.parametrize("method", ["plain", "gumbel-jacobi"])
def test_a_captured_round_with_newlines_waits_for_nothing(method: str) -> None:
    from tests.engines.cuda import test_transformers as others

    tokens = torch.tensor([[[0, 1, 9, 4], [0, 0, 1, 4]]])
    condition = Condition(tokens=tokens, mask=tokens > 0)
    expected = others.decoder_of(method, others.target_of("emu3"), EAGER).generate(condition, keys=[(3, 0)]).tokens
    with claimed_cuda() as device:
        target, watched = claim_module(others.target_of("emu3")), watching(device)
        made = others.decoder_of(method, target, others.Torch(taken=watched)).generate(condition, keys=[(3, 0)])
        assert torch.equal(held(made.tokens), expected) and watched.waits == []
        with pytest.raises(AssertionError, match="read a value on the host"):
            others.decoder_of(method, target, RehearsedEngine(rounds=watched)).generate(condition, keys=[(3, 0)])


def test_a_picture_of_the_embedded_model_has_the_tokens_of_the_cpu() -> None:
    request = Request("a red apple", seed=1)
    how: dict[str, Any] = {"method": "gumbel-jacobi"}
    expected = next(iter(generate(load_model("lantern-emoji", device="cpu", engine="eager"), [request], **how)))
    with claimed_cuda():
        model = load_model("lantern-emoji", device=torch.device("cuda"), dtype="fp32", engine="eager")
        made = next(iter(generate(model, [request], **how)))
    assert torch.equal(held(made.tokens), expected.tokens)
    assert made.pixels is not None and expected.pixels is not None
    assert torch.equal(held(made.pixels), expected.pixels)


def test_the_claimed_device_refuses_what_a_gpu_refuses_and_records_waits() -> None:
    with claimed_cuda() as device:
        there = torch.arange(4.0, device="cuda")
        assert there.device.type == "cuda" and (there + 1).device.type == "cuda"
        assert torch.zeros(3).device.type == "cpu"
        for mixed in (lambda: there + torch.ones(4), lambda: there[torch.tensor([True, False, True, False])]):
            with pytest.raises(RuntimeError, match="on the CPU beside one on cuda"):
                mixed()
        assert device.waits == [] and (there * torch.tensor(2.0)).device.type == "cuda"
        for wait in (
            lambda: there.sum().item(),
            lambda: there.cpu(),
            lambda: there[there > 1],
            lambda: there.nonzero(),
        ):
            wait()
        assert len(device.waits) == 4
    assert isinstance(device, ClaimedDevice)


@pytest.mark.parametrize("name", ["plain", "eagle1", "llama"])
def test_kernels_get_tensors_of_the_device_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")
    from lantern.engines.cuda import target as module
    from lantern.engines.cuda import trial
    from lantern.engines.cuda.kernels import is_interpreted
    from tests.engines.cuda import test_llama, test_target

    if not is_interpreted():
        pytest.skip("kernels are interpreted only where there is no GPU")

    run, calls = interpreter.GridExecutor.__call__, list[bool]()

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        calls.append(all(isinstance(x, Claimed) for x in tensors))
        return run(self, *held(args), **held(kwargs))

    def tokens(is_claimed: bool) -> Tensor:
        if name == "llama":
            llama = test_llama.target_in(torch.float32)
            made = test_llama.decoder_of("plain", claim_module(llama) if is_claimed else llama, Sampling(guidance=3.0))
            return made.generate(test_llama.CONDITION, keys=test_llama.KEYS).tokens
        target = test_target.target_in(torch.float32)
        drafter = None if name == "plain" else tiny_eagle(target)
        for part in (target, drafter) if is_claimed else ():
            _ = part is None or claim_module(part)
        method = METHODS[name].with_options(**test_target.SMALL.get(name, {}))
        given: dict[str, Any] = {"sampling": Sampling(guidance=3.0, top_k=10), "engine": GraphEngine(rows=16)}
        decoder = build_decoder(method, target, drafter_module=drafter, **given)
        return decoder.generate(test_target.CONDITION, keys=test_target.KEYS).tokens

    prepared = module.KernelTarget.__init__
    monkeypatch.setattr(module.KernelTarget, "__init__", lambda self, target, rows: prepared(self, target, rows, 4))
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    monkeypatch.setattr(trial, "trial_of", lambda prepared: trial.Trial(keeps_bits=True))
    monkeypatch.setattr(module, "is_quantized", lambda weight: False)  # other subclasses of Tensor are
    expected = tokens(is_claimed=False)
    calls.clear()
    with claimed_cuda():
        made = tokens(is_claimed=True)
    assert torch.equal(held(made), expected)
    assert calls and all(calls)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["janus", "emu3", "chameleon", "lumina", "liquid"])
def test_models_of_transformers_have_all_tensors_on_the_device(name: str, tmp_path: Path) -> None:
    from tests.models import test_transformers as released

    folder, size = released.folder(name, tmp_path), released.CASES[name].size
    how: dict[str, Any] = {"method": "gumbel-jacobi", "sampling": Sampling(guidance=3.0), "seed": 3}
    how["with_pixels"] = name in ("janus", "emu3")  # the claimed device lacks an operation that the others decode with
    expected = list(generate(load_model(folder, device="cpu", engine="eager", size=size), released.PROMPTS, **how))
    with claimed_cuda():
        model = load_model(folder, device=torch.device("cuda"), dtype="fp32", engine="eager", size=size)
        made = list(generate(model, released.PROMPTS, **how))
    for own, other in zip(made, expected, strict=True):
        assert torch.equal(held(own.tokens), other.tokens)
        if own.pixels is not None and other.pixels is not None:
            assert torch.equal(held(own.pixels), other.pixels)
