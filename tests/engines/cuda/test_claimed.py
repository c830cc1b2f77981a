"""Whole generations with everything on a claimed CUDA device: no operation mixes devices, no captured step waits."""

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.decoding.loop import Programs
from lantern.generation.generator import generate
from lantern.generation.requests import Request
from lantern.methods.registry import METHODS, Decoder, build_decoder
from lantern.models.folder import load_model
from lantern.verifiers.relaxations.neighbours import proximity_table
from tests.engines.cuda.claimed import ClaimedDevice, claim, claim_module, claimed_cuda, held
from tests.engines.cuda.replay import Rehearsed
from tests.engines.cuda.test_reuse import CAPTURED, CODEBOOK, SHORT, small_method
from tests.tiny import tiny_condition, tiny_eagle, tiny_target
from tests.tiny_parts import tiny_parts

CONDITION = tiny_condition((4, 2))
SEEDS = (9, 4)


def decoder_of(name: str, *, is_claimed: bool) -> Decoder:
    """Return a decoder whose target, drafter, add-ons and tables are on the claimed device."""
    target = tiny_target()
    parts = {"drafter_module": tiny_eagle(target), **tiny_parts(target)}
    tables = {"neighbours": proximity_table(CODEBOOK, 23), "codebook": CODEBOOK}
    if is_claimed:
        for module in (target, *parts.values()):
            claim_module(module)
        tables = claim(tables)
    drafter = parts.pop("drafter_module")
    given = {"drafter_module": drafter, "add_ons": parts, "sampling": Sampling(guidance=3.0)}
    return build_decoder(small_method(name), target, **given, **tables)


def codes_of(decoder: Decoder, seed: int, programs: Programs | None = None) -> Tensor:
    return decoder.generate(CONDITION, keys=[(seed, 0), (seed, 7)], programs=programs).codes


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.slow]) for n in METHODS])
def test_a_generation_has_all_tensors_on_the_device(name: str) -> None:
    expected = codes_of(decoder_of(name, is_claimed=False), 9)
    with claimed_cuda():
        made = codes_of(decoder_of(name, is_claimed=True), 9)
    assert torch.equal(held(made), expected)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.slow]) for n in CAPTURED])
def test_a_captured_step_waits_for_nothing_and_copies_nothing_from_the_host(name: str) -> None:
    plain = decoder_of(name, is_claimed=False)
    expected = [codes_of(plain, seed) for seed in SEEDS]
    with claimed_cuda() as device:

        class Watched(Rehearsed):
            waits: list[str] | None = None

            def held_work(self) -> Step:
                before = len(device.waits)
                step = super().held_work()
                type(self).waits = device.waits[before:]
                return step

        decoder = decoder_of(name, is_claimed=True)
        made = [codes_of(decoder, seed, Programs(wrap=Watched, may_look=False)) for seed in SEEDS]
    assert Watched.waits == []
    assert all(torch.equal(held(a), b) for a, b in zip(made, expected, strict=True))


def test_a_picture_of_the_embedded_model_has_the_codes_of_the_cpu() -> None:
    request, how = Request("a red apple", seed=1), {"method": "gumbel-jacobi"}
    expected = next(iter(generate(load_model("lantern-emoji", device="cpu", engine="eager"), [request], **how)))
    with claimed_cuda():
        model = load_model("lantern-emoji", device=torch.device("cuda"), dtype="fp32", engine="eager")
        made = next(iter(generate(model, [request], **how)))
    assert torch.equal(held(made.codes), expected.codes)
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
        for wait in (lambda: there.sum().item(), lambda: there.cpu(), lambda: there[there > 1], lambda: there.nonzero()):
            wait()
        assert len(device.waits) == 4
    assert isinstance(device, ClaimedDevice)
