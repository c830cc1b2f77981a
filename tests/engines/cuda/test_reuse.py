"""Rounds are replayed: later generations of a decoder have their own prompts, seeds and noise in the same memory."""

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.engines.cuda import graphs
from lantern.engines.engine import EAGER
from lantern.generation.decoder import Decoder
from lantern.methods import METHODS
from lantern.models.llamagen.transformer import Transformer
from tests.engines.cuda.replay import Rehearsed, RehearsedEngine
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import small_method, tiny_decoder

SHORT = ("plain", "gumbel-jacobi", "eagle1", "eagle2", "lantern++", "sjd")
# Parallel rows and the inner rounds of specmquant-paper, which the host counts, are not captured.
CAPTURED = [name for name in METHODS if name not in ("auto", "zipar", "pjd", "specmquant-paper")]


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rehearsed, "replayed", 0)
    monkeypatch.setattr(Rehearsed, "captured", 0)


def decoder_of(name: str, target: Transformer, *, is_graphed: bool = True) -> Decoder:
    engine = RehearsedEngine() if is_graphed else EAGER
    return tiny_decoder(small_method(name), target, Sampling(guidance=3.0), engine=engine)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.slow]) for name in CAPTURED]
)
def test_a_replayed_round_gives_the_codes_of_other_prompts_and_seeds(name: str) -> None:
    target = tiny_target()
    eager, graphed = decoder_of(name, target, is_graphed=False), decoder_of(name, target)
    for number, (words, seed) in enumerate((((4, 2), 9), ((3, 5), 4))):
        condition = tiny_condition(words, seed=number)
        keys = [(seed, 0), (seed, 7)]
        expected, made = eager.generate(condition, keys=keys), graphed.generate(condition, keys=keys)
        assert torch.equal(made.codes, expected.codes) and torch.equal(made.passes, expected.passes)
        assert torch.equal(made.accepted, expected.accepted)
        assert torch.allclose(made.total_variation, expected.total_variation)
    assert Rehearsed.captured == 1 and Rehearsed.replayed > 1


def test_another_batch_is_captured_anew_and_codes_given_are_replayed() -> None:
    target, condition = tiny_target(), tiny_condition((4, 2))
    eager, graphed = decoder_of("eagle1", target, is_graphed=False), decoder_of("eagle1", target)
    given = torch.full((2, 16), -1)
    given[:, 3], given[0, 9] = 5, 7
    for images, forced in ((2, None), (1, None), (2, given), (2, given.roll(1, 1))):
        how = {"keys": [(3, image) for image in range(images)], "forced": forced}
        some = condition.select(list(range(images)))
        assert torch.equal(graphed.generate(some, **how).codes, eager.generate(some, **how).codes)  # type: ignore[arg-type]
    assert Rehearsed.captured == 3


def test_changed_weights_are_captured_anew() -> None:
    target, condition = tiny_target(), tiny_condition((4,))
    graphed = decoder_of("plain", target)
    graphed.generate(condition, keys=[(3, 0)])
    with torch.no_grad():
        target.output.weight.mul_(1.5)
    made = graphed.generate(condition, keys=[(3, 0)])
    expected = decoder_of("plain", target, is_graphed=False).generate(condition, keys=[(3, 0)])
    assert torch.equal(made.codes, expected.codes) and Rehearsed.captured == 2


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


def test_a_refused_capture_goes_on_round_by_round(caplog: pytest.LogCaptureFixture) -> None:
    class Refused(Rehearsed):
        def capture(self):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    target, condition = tiny_target(), tiny_condition((4, 2))
    refused = tiny_decoder("eagle1", target, Sampling(guidance=3.0), engine=RehearsedEngine(rounds=Refused))
    made = refused.generate(condition, keys=[(3, 0), (3, 1)])
    expected = decoder_of("eagle1", target, is_graphed=False).generate(condition, keys=[(3, 0), (3, 1)])
    assert torch.equal(made.codes, expected.codes)
    assert "no CUDA graph: operation not permitted when stream is capturing" in caplog.text
