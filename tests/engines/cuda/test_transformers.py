"""The graph engine with targets of transformers: captured rounds of torch's passes, replayed on a CPU."""

from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.core.weights import FixedPasses
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import EAGER, Engine, engine
from lantern.generation.generator import Decoder, build_decoder
from lantern.methods import METHODS
from tests import tiny_transformers as tiny
from tests.engines.cuda.claimed import claim_module, claimed_cuda, held
from tests.engines.cuda.replay import Rehearsed, watching

SIZES = {"janus": None, "chameleon": None, "emu3": (24, 32), "lumina": (12, 8)}
NEWLINES = ("emu3", "lumina")
CASES = [(name, method) for method in ("plain", "sjd-pac", "gumbel-jacobi") for name in SIZES]
CASES = [pytest.param(*case, marks=() if i in (5, 10) else pytest.mark.slow) for i, case in enumerate(CASES)]


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine prepare targets as on a GPU, without kernels; a recording of each round is replayed."""
    monkeypatch.setattr(GraphEngine, "why_not", lambda *_, **__: None)
    monkeypatch.setattr(GraphEngine, "without_kernels", lambda *_: "not here")
    monkeypatch.setattr(GraphEngine, "drive", lambda _, states: Rehearsed(states[0]))


def target_of(name: str) -> Any:
    return tiny.assemble(name, size=SIZES[name]).target


def decoder_of(method: str, target: Any, engine: Engine) -> Decoder:
    settings = {} if method == "plain" else {"window": 4}
    chosen = METHODS[method].with_options(**settings)
    return build_decoder(chosen, target, sampling=Sampling(guidance=3.0), engine=engine)


def condition_of(word: int, images: int = 2) -> Condition:
    tokens = torch.tensor([[[0, 1, word, 4], [0, 0, 1, 4]], [[1, 9, 10, 4], [0, 0, 1, 4]]])[:images]
    return Condition(tokens=tokens, mask=tokens > 0)


@pytest.mark.parametrize(("name", "method"), CASES)
def test_a_replayed_round_gives_the_tokens_of_the_eager_one_and_waits_for_nothing(
    name: str, method: str, rehearsed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [(condition_of(9 + seed), [(seed, 0), (seed, 1)]) for seed in (3, 8)]
    eager = decoder_of(method, target_of(name), EAGER)
    expected = [eager.generate(condition, keys=keys) for condition, keys in given]
    with claimed_cuda() as device:
        target, watched = claim_module(target_of(name)), watching(device)
        monkeypatch.setattr(GraphEngine, "drive", lambda _, states: watched(states[0]))
        graph = decoder_of(method, target, GraphEngine())
        assert isinstance(graph.target, FixedPasses) == (name in NEWLINES)
        made = [graph.generate(condition, keys=keys) for condition, keys in given]
        assert watched.captured == 1 and watched.replayed > 1 and watched.waits == []

    for own, other in zip(made, expected, strict=True):
        assert torch.equal(held(own.tokens), other.tokens) and torch.equal(held(own.steps), other.steps)


def test_a_smaller_model_with_newlines_drafts_in_a_captured_round(rehearsed: None) -> None:
    target = target_of("emu3")
    small = tiny.assemble("emu3", tiny.make("emu3", 1), size=SIZES["emu3"]).target
    how: dict[str, Any] = {"sampling": Sampling(guidance=3.0), "add_ons": {"small": small}}
    eager, graph = (build_decoder("self-cascade", target, engine=each, **how) for each in (EAGER, GraphEngine()))
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
