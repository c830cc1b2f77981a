"""Compiles the fused kernels and the walk ahead of time, without a GPU, and prints what ptxas reports as JSON."""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import DraftTree
from lantern.decoding.rows import LogitRows
from lantern.drafters.trees.static import grown
from lantern.engines.cuda import fused, walk
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.lantern import Lantern
from lantern.verifiers.relaxations.lantern_pp import LanternPP

META = torch.device("meta")
DIM, HIDDEN, HEADS, TOKENS, LINES, SLOTS = 1280, 3456, 20, 16384, 2, 1056  # of LlamaGen-XL at 512 pixels
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}
TYPES |= {torch.int64: "*i64", torch.int32: "*i32"}
RULES: dict[str, Any] = {
    "exact": None,
    "lantern": (Lantern, {"k": 100}),
    "lantern++": (LanternPP, {"k": 10}),
    "released lantern++": (LanternPP, {"k": 10, "residual": "released"}),
}


def source(kernel: Any, arguments: dict[str, Any]) -> Any:
    """Return what Triton compiles for such arguments, with the hints that it derives from them."""
    signature, constants, hints = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        is_aligned = isinstance(value, torch.Tensor)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            is_aligned = not isinstance(value, float) and not parameter.do_not_specialize and value % 16 == 0
        if is_aligned:
            hints[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, hints)


def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device=META)


class Recorded:
    """Records launches as kernel, arguments and options instead of running them."""

    def __enter__(self) -> "Recorded":
        self.launches: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        self._run = JITFunction.run

        def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
            names = [parameter.name for parameter in kernel.params]
            arguments = dict(zip(names, given, strict=False)) | {key: named[key] for key in named if key in names}
            self.launches.append((kernel, arguments, {key: named[key] for key in named if key not in names}))

        JITFunction.run = run  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        JITFunction.run = self._run  # type: ignore[method-assign]


def launches(nodes: int) -> list[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """Return name, kernel, arguments and options of the launches of a layer and the head, over `nodes` nodes."""
    rows = 32
    x, squares = empty(LINES * rows, DIM), empty(LINES * rows, DIM // 16, dtype=torch.float32)
    how: Any = {"rows": rows}
    hidden, logits = empty(LINES * rows, HIDDEN), empty(LINES * nodes, TOKENS, dtype=torch.float32)
    with Recorded() as recorded:
        fused.enter(empty(LINES, nodes, DIM), x, squares, **how)
        fused.qkv(
            *(x, empty(3 * DIM, DIM), empty(DIM), squares, empty(LINES * rows, 3 * DIM)),
            empty(2048, DIM // HEADS // 2, 2, dtype=torch.float32),
            *(empty(LINES, nodes, dtype=torch.long), empty(nodes, dtype=torch.long)),
            empty(2, LINES, HEADS, SLOTS, DIM // HEADS),
            eps=1e-5,
            **how,
        )
        fused.gate_up(x, empty(2 * HIDDEN, DIM), empty(DIM), squares, hidden, eps=1e-5, live=nodes, **how)
        fused.single(x, empty(DIM, DIM), x, squares, live=nodes, **how)
        fused.single(hidden, empty(DIM, HIDDEN), x, squares, live=nodes, **how)
        fused.single(x, empty(TOKENS, DIM), logits, None, live=nodes, **how)
    names = ("enter", "qkv", "gate_up", "out", "down", "head")
    return [(name, *launch) for name, launch in zip(names, recorded.launches, strict=True)]


def walks(mode: Any, rule: str, tokens: int) -> list[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """Return the same of the walk of a tree, under guidance and top-k."""
    shape, wide = grown(8, 2).shape(META), torch.float32
    nodes = shape.num_nodes
    noise = Noise([(0, 0)], positions=1024, vocab_size=tokens, device=META)
    noise.uniform_table = lambda lanes: empty(1, 1024, lanes, dtype=torch.float64)  # type: ignore[method-assign]
    noise.gumbel_table = lambda purpose: empty(1, 1024, tokens, dtype=wide)  # type: ignore[method-assign]
    log_q = None if mode == "point" else empty(1, nodes, tokens, dtype=wide)
    tree = DraftTree(empty(1, nodes, dtype=torch.long), shape, mode, log_q)
    logits, places = empty(1, LINES, nodes, tokens, dtype=wide), empty(1, nodes, dtype=torch.long)
    near = {"table": empty(tokens, 1024, dtype=torch.int32), "distances": empty(tokens, 1024, dtype=wide)}
    relaxation = None if RULES[rule] is None else RULES[rule][0](**near, **RULES[rule][1])
    rows = LogitRows(Sampling(guidance=3.0, top_k=100), logits, places, noise)
    with Recorded() as recorded:
        walk.walk(RejectionVerifier(relaxation), tree, rows)
    named = zip(("summary", "walk"), recorded.launches, strict=True)
    return [(f"{name} {mode} {rule} {tokens}", *launch) for name, launch in named]


def report(kernel: Any, arguments: dict[str, Any], options: dict[str, Any], architecture: int) -> dict[str, int]:
    """Compile a kernel; return registers, spilled bytes and shared memory. CalledProcessError if ptxas refuses it."""
    made = triton.compile(source(kernel, arguments), target=GPUTarget("cuda", architecture, 32), options=options)
    found = re.search(r"^\.target (\w+)", made.asm["ptx"], re.MULTILINE)
    assert found is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(made.asm["ptx"])
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={found[1]}", str(path), "-o", f"{path}.cubin"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = {"registers": r"Used (\d+) registers", "stores": r"(\d+) bytes spill stores"}
    numbers |= {"loads": r"(\d+) bytes spill loads"}
    used = {key: int(match[1]) for key, pattern in numbers.items() if (match := re.search(pattern, text))}
    return used | {"shared": made.metadata.shared}


CASES = ((80, 1), (80, 30), (90, 1), (90, 30))

WALKS = (("sampled", "exact", 16384), ("sampled", "lantern", 16384), ("sampled", "lantern++", 16384))
WALKS += (("sampled", "released lantern++", 16384), ("point", "lantern++", 16384), ("sampled", "lantern++", 2048))

if __name__ == "__main__":
    made = {
        f"{name} {nodes} sm_{architecture}": report(*launch, architecture)  # pyright: ignore[reportCallIssue]
        for architecture, nodes in CASES
        for name, *launch in launches(nodes)
    }
    made |= {
        f"{name} sm_{architecture}": report(*launch, architecture)  # pyright: ignore[reportCallIssue]
        for architecture in (80, 90)
        for case in WALKS
        for name, *launch in walks(*case)
    }
    print(json.dumps(made))
