"""Graphs are kept: later generations of the same form replay them, with their own prompts, seeds and noise."""

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.decoding.loop import Programs
from lantern.engines.cuda import graphs
from lantern.generation.decoder import Decoder
from lantern.methods import METHODS
from lantern.models.llamagen.transformer import Transformer
from tests.engines.cuda.replay import Rehearsed
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import small_method, tiny_decoder

SHORT = ("plain", "gumbel-jacobi", "eagle1", "eagle2", "lantern++")
REHEARSED = Programs(wrap=Rehearsed, may_look=False)


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rehearsed, "joined", 0)
    monkeypatch.setattr(Rehearsed, "captured", 0)


def decoder_of(name: str, target: Transformer, guidance: float = 3.0) -> Decoder:
    return tiny_decoder(small_method(name), target, Sampling(guidance=guidance))


# Parallel rows and the inner rounds of specmquant-paper, which the host counts, are not captured.
CAPTURED = [name for name in METHODS if name not in ("zipar", "pjd", "specmquant-paper")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.slow]) for name in CAPTURED]
)
def test_a_kept_graph_gives_the_codes_of_other_prompts_and_seeds(name: str) -> None:
    decoder = decoder_of(name, tiny_target())
    for number, (words, seed) in enumerate((((4, 2), 9), ((3, 5), 4))):
        condition = tiny_condition(words, seed=number)
        keys = [(seed, 0), (seed, 7)]
        expected = decoder.generate(condition, keys=keys)
        made = decoder.generate(condition, keys=keys, programs=REHEARSED)
        assert torch.equal(made.codes, expected.codes) and torch.equal(made.passes, expected.passes)
        assert torch.equal(made.accepted, expected.accepted)
    assert (Rehearsed.captured, Rehearsed.joined) == (1, 1)


def test_graphs_are_not_shared_between_settings_batches_and_drafters() -> None:
    target, condition = tiny_target(), tiny_condition((4, 2))
    for decoder in (decoder_of("plain", target), decoder_of("plain", target, 2.0), decoder_of("eagle1", target)):
        for batch in (1, 2):
            keys = [(3, image) for image in range(batch)]
            some = condition.select(list(range(batch)))
            assert torch.equal(
                decoder.generate(some, keys=keys, programs=REHEARSED).codes, decoder.generate(some, keys=keys).codes
            )
    assert (Rehearsed.captured, Rehearsed.joined) == (6, 0)
    again = decoder_of("plain", target).generate(condition, keys=[(3, 0), (3, 1)], programs=REHEARSED)
    assert Rehearsed.joined == 1  # plain decoding has no drafter: any decoder of the target replays its graph
    kept = again.codes.clone()
    decoder_of("plain", target).generate(condition, keys=[(5, 0), (5, 1)], programs=REHEARSED)
    assert torch.equal(again.codes, kept)


def test_only_the_latest_graphs_are_kept() -> None:
    target, condition = tiny_target(), tiny_condition((4,))
    for step in range(graphs.MOST_GRAPHS + 2):
        decoder_of("plain", target, 2.0 + step).generate(condition, keys=[(3, 0)], programs=REHEARSED)
    assert Rehearsed.captured == graphs.MOST_GRAPHS + 2
    assert len(graphs._GRAPHS[target]) == graphs.MOST_GRAPHS
