"""What passes of a prepared target gave on this very device, before anything relies on them.

A trial compares a pass over a chain of nodes, on a GPU as a replay of a graph, with torch's own, and the bits of a node
in it with those that it has in shorter chains and alone after the same tokens.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.core.config import one_line
from lantern.core.types import Scores
from lantern.core.weights import FixedPasses, PreparedTarget, on_device, original
from lantern.engines.cuda import ROWS
from lantern.engines.cuda.graphs import capture
from lantern.engines.cuda.target import KernelTarget
from lantern.engines.pass_times import Chain, waves

LOG = logging.getLogger("lantern")
# Most norm of the difference from torch's numbers, as a share of their norm. Of logits the mean over the vocabulary,
# which changes no probability, is left out.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.08}


@dataclasses.dataclass(frozen=True)
class Trial:
    """`fault` is why passes cannot be used, None if they can; `difference` that of the logits, as in TOLERANCE.

    `keeps_bits` is whether nodes had the same bits in chains of other lengths and alone.
    """

    fault: str | None = None
    difference: float = 0.0
    keeps_bits: bool = False

    @property
    def found(self) -> str:
        """What was found, in words."""
        if self.fault is not None:
            return self.fault
        bits = "bits of a node do not depend on the others" if self.keeps_bits else "bits depend on the number of nodes"
        return f"on this device its logits differ from torch's by {100 * self.difference:.2g} %, {bits}"


_TRIALS: WeakKeyDictionary[Any, dict[Any, Trial]] = WeakKeyDictionary()


def trial_of(prepared: Any, *, is_fp8: bool = False) -> Trial:
    """Return the trial of a prepared target, made once for each kind of passes, KV cache, dtype and device.

    Only a GPU is tried: Triton's interpreter computes row by row, and is there for tests.
    """
    weight = prepared.tok_embeddings.weight
    if weight.device.type != "cuda":
        return Trial(keeps_bits=isinstance(prepared, KernelTarget))
    kept = _TRIALS.setdefault(original(prepared), {})
    key = (type(prepared), is_fp8, weight.dtype, weight.device)
    if key not in kept:
        kept[key] = tried(prepared, is_fp8=is_fp8)
        if kept[key].fault:
            LOG.warning("passes of %s are not used: %s", type(prepared).__name__, kept[key].fault)
    return kept[key]


def failed_kernels(target: Any, kind: type, *, is_fp8: bool = False) -> str | None:
    """Return why kernels of a kind do not run a target's present weights here, as a trial found; None if none did."""
    weight, found = target.tok_embeddings.weight, _TRIALS.get(target, {})
    trial = found.get((kind, is_fp8, weight.dtype, weight.device))
    return None if trial is None else trial.fault


@torch.no_grad()
def tried(prepared: Any, *, is_fp8: bool = False) -> Trial:
    """Run passes of a prepared target beside torch's. Only memory that runs out is raised."""
    module, name = original(prepared), type(prepared).__name__
    if any(weight.is_meta for weight in module.parameters()):
        return Trial()  # without values there is nothing to try
    dtype, device = module.tok_embeddings.weight.dtype, module.tok_embeddings.weight.device
    try:
        with on_device(device):
            nodes = min(ROWS, module.config.block_size // 2)
            chain, own = (Chain(module, 2, nodes, is_random=True, is_fp8=is_fp8) for _ in range(2))
            expected = chain.run(FixedPasses(module) if isinstance(prepared, FixedPasses) else module).logits
            made = replay(lambda: own.run(prepared).logits) if device.type == "cuda" else own.run(prepared).logits
            difference, most = apart(made, expected), TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])
            if not difference <= most:
                return Trial(f"logits of {name} differ from torch's by {difference:.3g} of their norm, over {most:g}")
            keeps = isinstance(prepared, KernelTarget) and keeps_bits(prepared, own)
            return Trial(difference=difference, keeps_bits=keeps)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton, its compilers and drivers raise errors of any kind
        return Trial(f"a pass of {name} failed: {type(error).__name__}: {one_line(error)[:200]}")


def apart(made: Float[Tensor, "r n v"], expected: Float[Tensor, "r n v"]) -> float:
    """Return the norm of the difference of logits as a share of that of `expected`, both without their means."""
    made, expected = (logits.float() - logits.float().mean(-1, keepdim=True) for logits in (made, expected))
    return float((made - expected).norm() / expected.norm())


def keeps_bits(prepared: PreparedTarget, chain: Chain) -> bool:
    """Return whether nodes of a chain have the bits that they have in shorter chains, and alone after the same tokens.

    Compared are logits, features, and the keys and values of all layers. Inputs range over 2^16, so that sums of
    their squares in another order have other bits.
    """
    chain.inputs = chain.inputs * waves(chain.inputs.shape[-1], device=chain.inputs.device).mul(8).exp2()
    cache, count = chain.cache, chain.nodes

    def made(scores: Scores) -> list[Tensor]:
        staged = cache.buffer[..., cache.first_stage_slot :, :].clone()
        return [scores.logits.clone(), scores.features.clone(), staged]

    together = made(chain.run(prepared))
    for nodes in {1, 2, 4, 8, 16} & set(range(count)):
        shorter = made(chain.run(prepared, nodes))
        if not all(torch.equal(a[..., :nodes, :], b[..., :nodes, :]) for a, b in zip(shorter, together, strict=True)):
            return False
    chain.run(prepared)  # stages all nodes
    for node in sorted({1, count // 2, count - 1}):  # each commits those before it
        alone = made(chain.run_alone(prepared, node))
        if not all(torch.equal(a[..., 0, :], b[..., node, :]) for a, b in zip(alone, together, strict=True)):
            return False
        chain.run(prepared)
    return True


def replay(run: Callable[[], Tensor]) -> Tensor:
    """Return what a run gives as a replay of a CUDA graph."""
    run()
    graph, made = capture(run)
    graph.replay()
    return made.clone()
