"""Launches of a whole round, in Triton's interpreter: they are few, and a captured round has none of a new kernel.

On a GPU launches take most of the time of a small pass, and a kernel that loads during a capture would break it.
Launches are Triton kernels and operations of torch that are neither views nor allocations. An operation counts as one,
though a few (topk, sort) are several kernels.
"""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lantern.core.sampling import Sampling
from lantern.drafters.trees import named
from lantern.engines.cuda.graphs import GraphRounds
from lantern.methods import METHODS
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import tiny_decoder

pytest.importorskip("triton", reason="Triton is not installed")
from triton.runtime import interpreter

from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.cuda.kernels import is_interpreted
from tests.engines.cuda.kinds import decoder_of, generated, target_of

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="kernels are interpreted only where there is no GPU")
LAYERS = 36  # of LlamaGen-XL
FREE = ("empty", "detach", "lift", "alias", "resize", "_unsafe_view", "view", "expand", "slice", "new_empty", "set_")
MOST = {"plain": 225, "lantern++": 290, "gumbel-jacobi": 259, "sjd++": 266}
SLOW = {
    "eagle1": 288,
    "eagle1-rejection": 290,
    "lantern++ with top-p": 341,
    "lantern++-paper": 326,
    "lantern-paper": 402,
}
SLOW |= {
    "grouped": 290,
    "eagle2": 417,
    "bounded": 295,
    "bounded-window": 274,
    "scd": 266,
    "gsd": 351,
    "bounded-scd": 306,
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every launch of a kernel."""
    found, run = list[tuple[Any, ...]](), interpreter.InterpretedFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        found.append(kind_of(self.fn, args, kwargs))
        with _disable_current_modes():
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", launch)
    return found


def kind_of(function: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return what Triton compiles anew for: constants, types, and whether an address is a multiple of 16 bytes."""
    parameters = inspect.signature(function).parameters
    given = dict(zip(parameters, args, strict=False)) | kwargs
    kinds = []
    for name, value in given.items():
        is_constant = name in parameters and "constexpr" in str(parameters[name].annotation)
        if isinstance(value, Tensor):
            kinds.append((name, value.dtype, value.data_ptr() % 16 == 0))
        else:
            kinds.append((name, value if is_constant or name not in parameters else type(value)))
    return (function.__name__, *kinds)


class Reached(BaseException):
    """The first round that would be captured has run."""


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize(("kind", "name"), [("cublas", "gumbel-jacobi"), ("cublas", "eagle1"), ("llama", "plain")])
def test_a_captured_round_launches_known_kernels_only(
    kind: str, name: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set[Any]()

    class UpToCapture(GraphRounds):
        def capture(self) -> Any:
            before.update(launched)
            launched.clear()
            self.state.round()
            raise Reached

    changes = {} if kind == "llama" else {"block_size": 16}
    decoder = decoder_of(kind, name, target_of(kind, torch.float32, **changes), Sampling(guidance=3.0, top_k=10))
    monkeypatch.setattr(GraphEngine, "drive", lambda _, states: UpToCapture(states[0]))
    with pytest.raises(Reached):
        generated(kind, decoder)
    assert len(set(launched)) >= 8 and set(launched) <= before


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in function._schema.returns)
        self.count += not is_view and not function.overloadpacket.__name__.startswith(FREE)
        return made


@torch.no_grad()
@pytest.mark.parametrize(
    ("method", "most"), [*MOST.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW.items())]
)
def test_a_round_has_few_launches(method: str, most: int, launched: list[Any]) -> None:
    """Of one image under guidance. Each layer has as many: targets of one and two layers give those of any number."""
    name, _, top_p = method.partition(" ")
    sampling = Sampling(guidance=3.0, top_k=20, top_p=0.9 if top_p else 1.0)
    # a launch is for all nodes of a window, or of a depth of a tree
    tree, found = METHODS[name].tree, list[int]()
    settings: dict[str, Any] = {"tree": f"chain_{named(tree).depth}"} if tree else {}
    settings |= {"window": 3} if "window" in METHODS[name].options else {}
    for layers in (1, 2):
        target = tiny_target(block_size=16, dim=16, n_head=1, n_layer=layers, vocab_size=32)
        engine = GraphEngine(products="fused")
        decoder = tiny_decoder(name, target, sampling, engine=engine, **settings)
        state = decoder.begin(tiny_condition((4,)), keys=[(9, 0)])
        for _ in range(2):  # the second one allocates what later ones use again
            state.take()
        launched.clear()
        with Operations() as operations:
            state.round()
        found.append(operations.count + len(launched))
    assert found[0] + (found[1] - found[0]) * (LAYERS - 1) <= most
