"""Replayed rounds: when they are captured anew, what of them is reported, and what a GPU may refuse."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lantern import LanternPipeline
from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Step
from lantern.core.weights import on_device
from lantern.decoding.rounds import Joint
from lantern.engines.cuda import graphs
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import EAGER, Engine
from lantern.generation.generator import Decoder, generate
from lantern.generation.requests import Request
from lantern.generation.serving.worker import Job, Worker
from lantern.methods import METHODS
from lantern.models.folder import load_model
from tests import tiny_transformers
from tests.engines.cuda.claimed import Rehearsed, RehearsedEngine
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import small_method, tiny_decoder

CONDITION, KEYS = tiny_condition((4, 2)), [(3, 0), (3, 1)]
# Parallel rows and the inner rounds of specmquant-paper, which the host counts, are not captured.
NAMES = [name for name in METHODS if name not in ("auto", "zipar", "pjd", "specmquant-paper")]
FEW = ("plain", "eagle1", "lantern++", "gumbel-jacobi", "medusa")


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rehearsed, "replayed", 0)
    monkeypatch.setattr(Rehearsed, "captured", 0)


def decoder_of(name: str, target: Any, engine: Engine | None = None) -> Decoder:
    return tiny_decoder(small_method(name), target, Sampling(guidance=3.0), engine=engine or RehearsedEngine())


def test_another_batch_and_changed_weights_are_captured_anew_and_tokens_given_are_replayed() -> None:
    target, given = tiny_target(), torch.full((2, 16), -1)
    eager, graphed = decoder_of("eagle1", target, EAGER), decoder_of("eagle1", target)
    given[:, 3], given[0, 9] = 5, 7
    for images, forced, captured in ((2, None, 1), (2, given, 2), (2, given.roll(1, 1), 2), (1, None, 3), (1, None, 4)):
        if captured == 4:
            torch.nn.init.normal_(target.output.weight)
        how: dict[str, Any] = {"keys": KEYS[:images], "forced": forced}
        some = CONDITION.select(range(images))
        assert torch.equal(graphed.generate(some, **how).tokens, eager.generate(some, **how).tokens)
        assert Rehearsed.captured == captured


@pytest.mark.parametrize("name", ["plain", "gumbel-jacobi"])
def test_prompts_of_tokens_of_another_length_are_replayed(name: str) -> None:
    target = tiny_transformers.llama(side=4)
    tokens = torch.randint(1, 32, (1, 2, 40), generator=torch.Generator().manual_seed(0))
    eager, graphed = (decoder_of(name, target, engine) for engine in (EAGER, None))
    for length, captured in ((6, 1), (9, 1), (32, 1), (33, 2), (40, 2)):
        some = tokens[..., :length]
        condition = Condition(tokens=some, mask=torch.ones_like(some, dtype=torch.bool))
        made = graphed.generate(condition, keys=KEYS[:1])
        assert torch.equal(made.tokens, eager.generate(condition, keys=KEYS[:1]).tokens)
        assert Rehearsed.captured == captured


def test_only_the_latest_graphs_are_kept_and_die_with_their_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs.forget_all()
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 3)
    target, condition = tiny_target(), tiny_condition((4,))
    decoders = [decoder_of("plain", target) for _ in range(5)]
    for decoder in decoders:
        decoder.generate(condition, keys=[(3, 0)])
    assert len(graphs._GRAPHS) == 3
    monkeypatch.setattr(graphs, "most_bytes", lambda: 1.0)
    decoders[0].generate(condition, keys=[(4, 0)])
    assert len(graphs._GRAPHS) == 1  # the latest stays, whatever its size
    decoders.clear()
    del decoder
    assert not graphs._GRAPHS


@pytest.mark.parametrize("name", ["plain", "eagle1", "gumbel-jacobi"])
def test_reported_steps_are_not_overwritten_by_the_next_replay_and_not_timed_inside(name: str) -> None:
    target = tiny_target()
    reported: tuple[list[Step], list[Step]] = [], []
    by_torch, made = (
        decoder_of(name, target, engine).generate(CONDITION, keys=KEYS, is_timed=True, callback=steps.append)
        for engine, steps in zip((EAGER, RehearsedEngine()), reported, strict=True)
    )
    assert Rehearsed.replayed > 1
    assert set(made.seconds) == set(by_torch.seconds) | {"capture", "replay"} and min(made.seconds.values()) >= 0
    for a, b in zip(*reported, strict=True):
        assert a.index == b.index
        for field in ("start", "counts", "tokens"):
            assert torch.equal(getattr(a, field), getattr(b, field)), field
        if a.tree is not None and b.tree is not None:
            assert torch.equal(a.tree.tokens, b.tree.tokens)


@pytest.mark.parametrize("name", ["plain", "eagle1"])
def test_nan_logits_in_a_replay_are_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    noise, score = torch.zeros(2), target.forward  # of each image

    def spoilt(*args: Any, **named: Any) -> Any:
        scores = score(*args, **named)
        scores.logits.add_(noise.repeat_interleave(len(scores.logits) // 2)[:, None, None])
        return scores

    def spoil(step: Step) -> None:
        noise[1] = torch.nan if step.index == 4 else 0.0

    monkeypatch.setattr(target, "forward", spoilt)
    made = decoder_of(name, target).generate(CONDITION, keys=KEYS, callback=spoil)
    assert Rehearsed.replayed > 1 and made.is_finite is not None and made.is_finite.tolist() == [True, False]


class Refused(Rehearsed):
    tried = 0

    def capture(self) -> tuple[Any, Step]:
        type(self).tried += 1
        super().capture()  # as a capture on a GPU, it runs nothing
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("name", ["plain", "eagle1"])
def test_rounds_go_on_without_a_graph_if_none_can_be_captured(name: str, caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_target()
    expected = decoder_of(name, target, EAGER).generate(CONDITION, keys=KEYS)
    Refused.tried = 0
    graphed = tiny_decoder(small_method(name), target, engine=RehearsedEngine(rounds=Refused))
    made = graphed.generate(CONDITION, keys=KEYS)
    assert Refused.tried == 1 and torch.equal(made.tokens, expected.tokens)
    assert torch.equal(made.accepted, expected.accepted) and torch.equal(made.steps, expected.steps)
    assert "no CUDA graph: operation not permitted when stream is capturing" in caplog.text


def test_a_capture_that_cannot_end_leaves_the_stream_as_it_was() -> None:
    streams = ["own"]

    @contextmanager
    def graph(graph: object, *, stream: str, capture_error_mode: str) -> Iterator[None]:
        streams.append(stream)
        yield
        raise RuntimeError("capture_end failed")

    with (
        patch.multiple(torch.cuda, CUDAGraph=object, graph=graph, Stream="capture on {}".format),
        patch.multiple(torch.cuda, current_device=lambda: 1, current_stream=lambda: streams[-1]),
        patch.object(torch.cuda, "set_stream", streams.append),
        pytest.raises(RuntimeError, match="capture_end failed"),
    ):
        graphs.capture(list)
    assert streams == ["own", "capture on 1", "own"]


def test_kernels_and_graphs_run_on_the_gpu_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(taken.append(device)))
    for device in ("cuda:1", "cuda:0", "cpu"):
        with on_device(torch.device(device)):
            pass
    assert taken == [torch.device("cuda", 1), torch.device("cuda", 0)]


@pytest.mark.parametrize(("name", "kind"), [("plain", "GraphRounds"), ("zipar", "TorchRounds"), ("pjd", "TorchRounds")])
def test_row_fronts_are_not_captured(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tiny_decoder(small_method(name), tiny_target(block_size=16)).begin(tiny_condition((4,)), keys=[(9, 0)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert type(GraphEngine().drive([state])).__name__ == kind


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in FEW)) for one in NAMES])
def test_images_of_a_server_that_follow_each_other_have_their_own_tokens(name: str) -> None:
    """The graph of the first image is replayed for the others, from their third round on, without a pause, whatever
    their samplings.
    """
    target, condition = tiny_target(), tiny_condition((4,))
    decoder = tiny_decoder(small_method(name), target, Sampling(top_k=17), engine=RehearsedEngine())
    joint = Joint(decoder.engine.group, decoder.engine.drive)
    for seed in range(4):
        how: dict[str, Any] = {"keys": [(seed, 0)]}
        sampling = Sampling(guidance=3.0 + seed, temperature=1.0 - seed / 5, top_k=20 + seed)
        by_torch = tiny_decoder(small_method(name), target, sampling)
        state = decoder.begin(condition, is_joined=True, sampling=sampling, **how)
        while not state.is_done():
            joint.take([state])
        made, expected = state.result(), by_torch.generate(condition, **how)
        for each in ("tokens", "steps", "accepted"):
            assert torch.equal(getattr(made, each), getattr(expected, each)), f"{each} of image {seed}"
        assert torch.allclose(made.total_variation, expected.total_variation, atol=1e-8)
    assert Rehearsed.captured == 1 and Rehearsed.replayed > 4


def test_a_server_captures_once_for_all_samplings_of_a_form(folder: Path) -> None:
    model, made = load_model(folder, device="cpu"), list[Any]()
    worker = Worker(replace(model, engine=RehearsedEngine()), batch=1)
    for i, captured in enumerate((1, 1, 2, 2)):
        sampling = Sampling(2.0 + i, 1.0 - i / 5, top_k=9 if i < 2 else 0)
        request = Request(prompt="a red apple", seed=i)
        worker.submit([Job(request, "eagle1", sampling, lambda kind, value, index: made.append(value))])
        while worker.queued or worker.running:
            worker.step()
        (expected,) = generate(model, [request], method="eagle1", sampling=sampling, with_pixels=False)
        assert torch.equal(made[i].tokens, expected.tokens) and Rehearsed.captured == captured


def test_calls_of_a_pipeline_replay_the_rounds_of_the_first(folder: Path) -> None:
    pipe: Any = LanternPipeline.from_pretrained(folder, engine=RehearsedEngine())
    by_torch: Any = LanternPipeline.from_pipe(pipe)
    by_torch.engine = "eager"
    inner, captured = list[torch.Tensor](), list[int]()

    def tokens(pipe: Any, seed: int, **how: Any) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        return pipe("a red apple", generator=seed, method="eagle1", output_type="latent", **how).tokens

    def within(pipe: Any, step: int, *_: object) -> None:
        if step == 4:
            inner.append(tokens(pipe, 9))

    cooler: dict[str, Any] = {"temperature": 0.5, "guidance_scale": 2.5}
    for how in ({}, cooler, {"top_k": 3}, {"top_k": 3, **cooler}, {}, {"callback_on_step_end": within}, {}):
        found = tokens(pipe, seed := len(captured), **how)
        captured.append(Rehearsed.captured)
        assert torch.equal(found, tokens(by_torch, seed, **{k: v for k, v in how.items() if k in (*cooler, "top_k")}))
    assert torch.equal(inner[0], tokens(by_torch, 9))
    assert captured == [1, 1, 2, 2, 3, 4, 4]  # that within the call of another has its own
    with torch.no_grad():
        pipe.transformer.output.weight.mul_(0.5)
    assert torch.equal(tokens(pipe, 7), tokens(by_torch, 7)) and Rehearsed.captured == 5
