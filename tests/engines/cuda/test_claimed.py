"""Whole generations with everything on a claimed CUDA device: no operation mixes devices, no captured round waits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Generation
from lantern.engines.engine import EAGER, Engine
from lantern.generation.generator import Decoder, generate
from lantern.methods import METHODS
from lantern.models.folder import load_model
from tests.engines.cuda.claimed import Claimed, claim_module, claimed_cuda, held
from tests.engines.cuda.replay import RehearsedEngine, watching
from tests.tiny import tiny_condition, tiny_eagle, tiny_target
from tests.tiny_decoder import small_method, tiny_decoder

SHORT = ("gumbel-jacobi",)  # tests/proof/test_readbacks.py runs every method on the claimed device
# Parallel rows and the inner rounds of specmquant-paper, which the host counts, are not captured.
UNCAPTURED = ("auto", "zipar", "pjd", "specmquant-paper")


def decoder_of(name: str, device: str, engine: Engine = EAGER) -> Decoder:
    return tiny_decoder(small_method(name), tiny_target(block_size=9).to(device), engine=engine)


def generated(decoder: Decoder) -> list[Generation]:
    """Return two generations with prompts, seeds and noise of their own."""
    return [
        decoder.generate(tiny_condition(words, seed=number), keys=[(seed, 0), (seed, 7)])
        for number, (words, seed) in enumerate((((4, 2), 9), ((3, 5), 4)))
    ]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.slow]) for n in METHODS])
def test_generations_are_those_of_the_cpu_and_a_captured_round_waits_for_nothing(name: str) -> None:
    expected = generated(decoder_of(name, "cpu"))
    with claimed_cuda() as device:
        rounds = watching(device)
        engine = EAGER if name in UNCAPTURED else RehearsedEngine(rounds=rounds)
        made = generated(decoder_of(name, "cuda", engine))
    for own, other in zip(made, expected, strict=True):
        for each in ("tokens", "steps", "accepted"):
            assert torch.equal(held(getattr(own, each)), getattr(other, each)), each
        # that of row fronts is measured in passes of other sizes, and is rounding here
        atol = 1e-5 if name in ("zipar", "pjd") else 1e-8
        assert torch.allclose(held(own.total_variation), other.total_variation, atol=atol)
    if name not in UNCAPTURED:
        assert rounds.waits == [] and rounds.captured == 1 and rounds.replayed > 1


WAITS: list[Callable[[Tensor], object]] = [
    lambda x: x.sum().item(),
    lambda x: bool(x[0] > 1),
    lambda x: [0, 1, 2][x[0].long()],
    lambda x: x.tolist(),
    lambda x: x.cpu(),
    lambda x: torch.tensor([1.0, 2.0], device="cuda"),
    lambda x: x[x > 1],
    lambda x: x.clone().__setitem__(x > 1, 1.0),
    lambda x: torch.where(x > 1),
    lambda x: torch.equal(x, x),
    lambda x: torch.allclose(x, x),
    lambda x: x.masked_select(x > 1),
    lambda x: x.unique(),
    lambda x: x.unique(dim=0),
    lambda x: x.unique_consecutive(),
    lambda x: x.long().bincount(),
    lambda x: x.repeat_interleave(x.long()),
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
@pytest.mark.parametrize(("kind", "name"), [("fused", "eagle1"), ("llama", "plain")])
def test_kernels_get_tensors_of_the_device_only(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")
    from lantern.engines.cuda import target as module
    from lantern.engines.cuda import trial
    from lantern.engines.cuda.kernels import is_interpreted
    from tests.engines.cuda import kinds

    if not is_interpreted():
        pytest.skip("kernels are interpreted only where there is no GPU")

    run, calls = interpreter.GridExecutor.__call__, list[bool]()

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        calls.append(all(isinstance(x, Claimed) for x in tensors))
        return run(self, *held(args), **held(kwargs))

    def tokens(is_claimed: bool) -> Tensor:
        target = kinds.target_of(kind, torch.float32, **{"side": 2} if kind == "llama" else {"block_size": 4})
        drafter = None if kind == "llama" else tiny_eagle(target)
        for part in (target, drafter) if is_claimed else ():
            _ = part is None or claim_module(part)
        engine = None if is_claimed else EAGER
        decoder = kinds.decoder_of(kind, name, target, Sampling(guidance=3.0, top_k=10), engine, drafter)
        return kinds.generated(kind, decoder).tokens

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    monkeypatch.setattr(trial, "trial_of", lambda prepared, **_: trial.Trial(keeps_bits=True))
    monkeypatch.setattr(module, "is_quantized", lambda weight: False)  # other subclasses of Tensor are
    expected = tokens(is_claimed=False)
    with claimed_cuda():
        made = tokens(is_claimed=True)
    assert torch.equal(held(made), expected)
    assert calls and all(calls)


OTHERS = ("lantern-emoji", "janus", "emu3", "chameleon", "lumina", "liquid")


@pytest.mark.parametrize("name", ["toy", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_pictures_of_a_model_are_those_of_the_cpu(name: str, folder: Path, tmp_path: Path) -> None:
    from tests.models import test_transformers as released

    source, size, prompts = str(folder) if name == "toy" else name, None, ["a red apple"]
    if name in released.CASES:
        source, size, prompts = str(released.folder(name, tmp_path)), released.CASES[name].size, released.PROMPTS
    how: dict[str, Any] = {"method": "gumbel-jacobi", "sampling": Sampling(guidance=3.0), "seed": 3}
    # the claimed device lacks an operation that the others decode with
    how["with_pixels"] = name in ("toy", "lantern-emoji", "janus", "emu3")
    expected = list(generate(load_model(source, device="cpu", engine="eager", size=size), prompts, **how))
    with claimed_cuda():
        model = load_model(source, device=torch.device("cuda"), dtype="fp32", engine="eager", size=size)
        made = list(generate(model, prompts, **how))
    for own, other in zip(made, expected, strict=True):
        assert torch.equal(held(own.tokens), other.tokens)
        assert (own.pixels is not None) == (other.pixels is not None) == how["with_pixels"]
        if own.pixels is not None and other.pixels is not None:
            assert torch.equal(held(own.pixels), other.pixels)
