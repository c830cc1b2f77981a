"""A round is captured only after all of its kernels have run: a kernel that loads during a capture would break it."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.engines.cuda.graphs import GraphRounds

pytest.importorskip("triton", reason="Triton is not installed")
from triton.runtime import interpreter

from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.cuda.kernels import is_interpreted
from tests.engines.cuda.kinds import decoder_of, generated, target_of

pytestmark = [
    pytest.mark.usefixtures("short_blocks"),
    pytest.mark.skipif(not is_interpreted(), reason="kernels are interpreted only where there is no GPU"),
]


class Reached(Exception):
    """The first round that would be captured has run."""


class UpToCapture(GraphRounds):
    """Ends at the round that would be captured; `before` are the kernels that ran until then, `within` those of it."""

    launched: set[Any]
    before: set[Any]
    within: set[Any]

    def capture(self) -> tuple[Any, Step]:
        cls = type(self)
        cls.before, cls.launched = cls.launched, set()
        self.state.round()
        cls.within = cls.launched
        raise Reached


def token_of(function: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
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


@pytest.mark.parametrize(("kind", "name"), [("cublas", "gumbel-jacobi"), ("cublas", "eagle1"), ("llama", "plain")])
def test_a_captured_round_launches_known_kernels_only(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    UpToCapture.launched, run = set(), interpreter.InterpretedFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        UpToCapture.launched.add(token_of(self.fn, args, kwargs))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", launch)
    changes = {} if kind == "llama" else {"block_size": 16}
    decoder = decoder_of(kind, name, target_of(kind, torch.float32, **changes), Sampling(guidance=3.0, top_k=10))
    monkeypatch.setattr(GraphEngine, "drive", lambda _, states: UpToCapture(states[0]))
    with pytest.raises(Reached):
        generated(kind, decoder)
    assert len(UpToCapture.within) >= 8 and UpToCapture.within <= UpToCapture.before
