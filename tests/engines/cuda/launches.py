"""Counts launches of a whole round on a GPU, without one (TRITON_INTERPRET=1 python -m tests.engines.cuda.launches).

Launches are Triton kernels and operations of torch that are neither views nor allocations. An operation counts as one,
though a few (topk, sort) are several kernels. Each layer has the same number of launches, so targets of one and of two
layers give that of any number.
"""

import json
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from lantern.core.sampling import Sampling
from lantern.engines.cuda.engine import GraphEngine
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import tiny_decoder

LAYERS = 36  # of LlamaGen-XL
TOKENS, PLACES = 32, 16
FREE = ("empty", "detach", "lift", "alias", "resize", "_unsafe_view", "view", "expand", "slice", "new_empty", "set_")
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "EAGLE-1": ("eagle1", {}),
    "EAGLE-1, 15 nodes": ("eagle1", {"tree": "grown_15_4"}),
    "EAGLE-1, rejection": ("eagle1-rejection", {}),
    "LANTERN++": ("lantern++", {}),
    "LANTERN++, published tree": ("lantern++-paper", {}),
    "bounded": ("bounded", {}),
    "window of 16": ("gumbel-jacobi", {"window": 16}),
}


class Launches(TorchDispatchMode):
    """Counts launches by name while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in function._schema.returns)
        if not is_view and not name.startswith(FREE):
            self.counts[name] += 1
        return made

    def __enter__(self) -> "Launches":
        self._run = run = interpreter.GridExecutor.__call__

        def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts[f"kernel {executor.fn.__name__}"] += 1
            with torch.utils._python_dispatch._disable_current_modes():  # pyright: ignore[reportAttributeAccessIssue]
                return run(executor, *args, **kwargs)

        interpreter.GridExecutor.__call__ = launch  # type: ignore[method-assign]
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[arg-type]
        interpreter.GridExecutor.__call__ = self._run  # type: ignore[method-assign]


@torch.no_grad()
def round_of(
    method: str, layers: int, settings: dict[str, Any], *, products: str = "fused", **how: Any
) -> Counter[str]:
    """Return the launches of one round, of one image under guidance."""
    target = tiny_target(block_size=PLACES, dim=16, n_head=1, n_layer=layers, vocab_size=TOKENS)
    sampling = Sampling(guidance=3.0, **{"top_k": 20, **how})
    decoder = tiny_decoder(method, target, sampling, engine=GraphEngine(products=products), **settings)
    state = decoder.begin(tiny_condition((4,)), keys=[(9, 0)])
    for _ in range(2):  # the second one allocates what later ones use again
        state.take()
    with Launches() as launches:
        state.round()
    return launches.counts


def launches_of(method: str, layers: int = LAYERS, settings: dict[str, Any] | None = None, **how: Any) -> Counter[str]:
    """Return the launches of one round of a target of so many layers."""
    one, two = (round_of(method, n, settings or {}, **how) for n in (1, 2))
    return Counter({name: one[name] + (two[name] - one[name]) * (layers - 1) for name in one | two})


if __name__ == "__main__":
    for label, (name, settings) in METHODS.items():
        counts = launches_of(name, settings=settings)
        kernels = {key.removeprefix("kernel "): n for key, n in counts.items() if key.startswith("kernel ")}
        others = {key: n for key, n in counts.most_common() if not key.startswith("kernel ")}
        shown = {"launches": counts.total(), "torch": sum(others.values()), "kernels": kernels, "operations": others}
        print(json.dumps({label: shown}), flush=True)
