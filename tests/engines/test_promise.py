"""What images have in common with plain decoding's: a property of the method, the engine and the dtype."""

import dataclasses

import pytest
import torch

from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import EagerEngine, Engine, WideEngine
from lantern.generation.generator import Decoder
from lantern.generation.images import Statistics, totals
from lantern.methods import METHODS
from tests.tiny import tiny_target
from tests.tiny_decoder import tiny_decoder


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
    assert decoder_of("gumbel-jacobi", GraphEngine(rows=16)).promise(1) == "tokens"
    made = decoder_of("eagle1", EagerEngine())
    monkeypatch.setattr(GraphEngine, "without_kernels", lambda *_: "the model is another")
    assert dataclasses.replace(made, engine=GraphEngine()).promise(1) == "distribution"


def test_totals_promise_what_every_picture_promises() -> None:
    one = Statistics("eagle1", True, 16, 8, (), (), 0.0, 0.0, 0.0, None, {}, promise="tokens")
    other = dataclasses.replace(one, promise="distribution")
    assert one.as_dict()["promise"] == totals([one, one])["promise"] == "tokens"
    assert totals([one, other])["promise"] == "distribution"
