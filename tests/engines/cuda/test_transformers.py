"""The graph engine with targets of transformers: captured steps of torch's passes, replayed on a CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.decoding.loop import Programs
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.engine import engine
from lantern.methods.registry import METHODS, build_decoder
from tests import tiny_transformers as tiny
from tests.engines.cuda.replay import Rehearsed

REHEARSED = Programs(wrap=Rehearsed, may_look=False)
MODELS = {"janus": tiny.tiny_janus, "chameleon": tiny.tiny_chameleon}


@pytest.mark.parametrize("method", ["plain", "gumbel-jacobi", "row-pool"])
@pytest.mark.parametrize("name", MODELS)
def test_a_replayed_step_gives_the_codes_of_the_eager_one(name: str, method: str) -> None:
    target = tiny.assemble(name, MODELS[name](), None).target
    settings = {} if method == "plain" else {"window": 4}
    decoder = build_decoder(METHODS[method].with_options(**settings), target, sampling=Sampling(guidance=3.0))
    before = Rehearsed.captured, Rehearsed.joined
    for seed in (3, 8):
        tokens = torch.tensor([[[0, 1, 9 + seed, 4], [0, 0, 1, 4]], [[1, 9, 10, 4], [0, 0, 1, 4]]])
        condition = Condition(tokens=tokens, mask=tokens > 0)
        keys = [(seed, 0), (seed, 1)]
        expected = decoder.generate(condition, keys=keys)
        made = decoder.generate(condition, keys=keys, programs=REHEARSED)
        assert torch.equal(made.codes, expected.codes) and torch.equal(made.passes, expected.passes)
    assert (Rehearsed.captured - before[0], Rehearsed.joined - before[1]) == (1, 1)


class OnCuda:
    """A target of which engines see no more than that it is on a GPU."""

    def __init__(self, target: Any) -> None:
        self.config, self.is_llamagen, self.processes = target.config, target.is_llamagen, target.processes
        self.tok_embeddings = SimpleNamespace(weight=SimpleNamespace(device=SimpleNamespace(type="cuda")))


def test_a_gpu_takes_targets_without_newlines_and_auto_does_not_choose_it() -> None:
    janus: Any = OnCuda(tiny.assemble("janus", tiny.tiny_janus(), None).target)
    emu3: Any = OnCuda(tiny.assemble("emu3", tiny.tiny_emu3(), None, (24, 32)).target)
    graph = GraphEngine()
    assert graph.available(janus) is None
    assert "passes run through torch" in (graph.remark(janus) or "")
    assert not graph.keeps_codes(janus, nodes=1, lines=2)
    assert "newline tokens, which the host counts" in (graph.available(emu3) or "")
    assert "quantized weights" in (GraphEngine(weights="int8").available(janus) or "")
    assert "runs LlamaGen's layers" in (engine("compile").available(janus) or "")
    chosen = engine("auto").resolve(janus)
    assert chosen.name == "eager" and "has not run models of transformers" in chosen.reason
