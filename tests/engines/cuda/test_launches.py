"""Launches of a whole round at the size of LlamaGen-XL are few: on a GPU they take most of the time of a small pass.

Launches are Triton kernels and operations of torch that are neither views nor allocations. An operation counts as one,
though a few (topk, sort) are several kernels. Each layer has the same number of launches, so targets of one and of two
layers give that of any number.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lantern.core.sampling import Sampling
from lantern.drafters.trees.static import named
from lantern.methods import METHODS
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import tiny_decoder

pytest.importorskip("triton", reason="Triton is not installed")
from triton.runtime import interpreter

from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.cuda.kernels import is_interpreted

LAYERS = 36  # of LlamaGen-XL
FREE = ("empty", "detach", "lift", "alias", "resize", "_unsafe_view", "view", "expand", "slice", "new_empty", "set_")
SLOW = pytest.mark.slow


class Launches(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in function._schema.returns)
        self.count += not is_view and not function.overloadpacket.__name__.startswith(FREE)
        return made


@torch.no_grad()
def launches_of(method: str, layers: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the launches of one round, of one image under guidance."""
    target = tiny_target(block_size=16, dim=16, n_head=1, n_layer=layers, vocab_size=32)
    sampling = Sampling(guidance=3.0, top_k=20)
    decoder = tiny_decoder(method, target, sampling, engine=GraphEngine(products="fused"), **settings)
    state = decoder.begin(tiny_condition((4,)), keys=[(9, 0)])
    for _ in range(2):  # the second one allocates what later ones use again
        state.take()
    launches, run = Launches(), interpreter.GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        launches.count += 1
        with torch.utils._python_dispatch._disable_current_modes():  # pyright: ignore[reportAttributeAccessIssue]
            return run(executor, *args, **kwargs)

    with monkeypatch.context() as patch, launches:
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        state.round()
    return launches.count


@pytest.mark.skipif(not is_interpreted(), reason="launches are counted in Triton's interpreter")
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("plain", 236),
        pytest.param("eagle1", 295, marks=SLOW),
        pytest.param("eagle1-rejection", 297, marks=SLOW),
        ("lantern++", 297),
        pytest.param("lantern++-paper", 333, marks=SLOW),
        ("gumbel-jacobi", 265),
    ],
)
def test_a_round_has_few_launches(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # a launch is for all nodes of a window, or of a depth of a tree
    tree = METHODS[name].tree
    settings: dict[str, Any] = {"tree": f"chain_{named(tree).depth}"} if tree else {}
    settings |= {"window": 3} if name == "gumbel-jacobi" else {}
    one, two = (launches_of(name, layers, settings, monkeypatch) for layers in (1, 2))
    assert one + (two - one) * (LAYERS - 1) <= most
