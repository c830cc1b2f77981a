"""Compiles kernels ahead of time, without a GPU, and prints what ptxas reports as JSON.

With `orders` as argument it prints how fused kernels add, by number of inputs, device, number of nodes and kernel.
"""

import json
import re
import subprocess
import sys
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
from lantern.engines.cuda import fused, kernels, walk
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.lantern import Lantern
from lantern.verifiers.relaxations.lantern_pp import LanternPP

META = torch.device("meta")
DIM, HIDDEN, HEADS, TOKENS, LINES, SLOTS = 1280, 3456, 20, 16384, 2, 1056  # of LlamaGen-XL at 512 pixels
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}
TYPES |= {torch.int64: "*i64", torch.int32: "*i32", torch.int8: "*i8"}
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


def launches(
    nodes: int, weights: torch.dtype = torch.bfloat16
) -> list[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """Return name, kernel, arguments and options of the launches of a layer and the head, over `nodes` nodes."""
    rows = 32
    x, squares = empty(LINES * rows, DIM), empty(LINES * rows, DIM // 16, dtype=torch.float32)
    hidden, logits = empty(LINES * rows, HIDDEN), empty(LINES * nodes, TOKENS, dtype=torch.float32)

    def weight(outputs: int, inputs: int = DIM) -> torch.Tensor:
        return empty(outputs, inputs, dtype=weights)

    scale = empty(TOKENS, dtype=torch.float32) if weights == torch.int8 else None
    how: Any = {"rows": rows, "scale": scale}
    with Recorded() as recorded:
        fused.enter(empty(LINES, nodes, DIM), x, squares, rows=rows)
        fused.qkv(
            *(x, weight(3 * DIM), empty(DIM), squares, empty(LINES * rows, 3 * DIM)),
            empty(2048, DIM // HEADS // 2, 2, dtype=torch.float32),
            *(empty(LINES, nodes, dtype=torch.long), empty(nodes, dtype=torch.long)),
            empty(2, LINES, HEADS, SLOTS, DIM // HEADS),
            eps=1e-5,
            **how,
        )
        fused.gate_up(x, weight(2 * HIDDEN), empty(DIM), squares, hidden, eps=1e-5, live=nodes, **how)
        fused.single(x, weight(DIM), x, squares, live=nodes, **how)
        fused.single(hidden, weight(DIM, HIDDEN), x, squares, live=nodes, **how)
        fused.single(x, weight(TOKENS), logits, None, live=nodes, **how)
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


def children(lines: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return kernel, arguments and options of the launch that ranks the children of four nodes and writes log q."""
    wide, places = torch.float32, empty(1, 1, dtype=torch.long).expand(1, 4)
    how: dict[str, Any] = {"guidance": 3.0, "temperature": 1.0, "top_k": 1000, "interval": -1, "width": 4}
    with Recorded() as recorded:
        kernels.sample(
            *(empty(1, lines, 4, TOKENS, dtype=wide), places, empty(1, 1024, TOKENS, dtype=wide)),
            log_q=empty(1, 4, TOKENS, dtype=wide),
            **how,
        )
    return recorded.launches[0]


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


def orders(nodes: int, architecture: int) -> dict[str, list[str]]:
    """Return how the sums and products of each fused kernel divide what they add among threads, by Triton's names.

    The order of a sum follows from it. `few parts` has a kernel with a fault of earlier times: 16 sums of squares.
    """
    made = launches(nodes)[1:]
    name, kernel, arguments, options = made[0]
    made += [(f"{name} int8", *launch) for name, *launch in launches(nodes, torch.int8)[1:]]
    made.append((f"{name} of few parts", kernel, arguments | {"PARTS": 16, "PARTS_SIZE": 16}, options))
    return {
        name: divided(
            triton.compile(source(kernel, arguments), target=GPUTarget("cuda", architecture, 32), options=options)
        )
        for name, kernel, arguments, options in made
    }


def divided(made: Any) -> list[str]:
    """Return the layouts of the sums and products of a compiled kernel, sums with their axis."""
    ir = made.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ir, re.MULTILINE))
    found = re.findall(r'"tt.reduce".*?axis = (\d) : i32.*?\}\) : \(tensor<[\dx]+x\w+, (.*?)>\)', ir, re.DOTALL)
    found += re.findall(r"tt.(dot) .*-> tensor<[\dx]+x\w+, (.*?)>", ir)
    return [f"{what} {resolved(layout, layouts)}" for what, layout in found]


def resolved(layout: str, layouts: dict[str, str]) -> str:
    """Return a layout with the definitions of the names in it."""
    return re.sub(r"#\w+(?![\w.])", lambda name: layouts.get(name[0], name[0]), layout)


WALKS = (("sampled", "exact", 16384), ("sampled", "lantern", 16384), ("sampled", "lantern++", 16384))
WALKS += (("sampled", "released lantern++", 16384), ("point", "lantern++", 16384), ("sampled", "lantern++", 2048))


def main() -> dict[str, Any]:
    global DIM, HIDDEN, HEADS
    if "orders" in sys.argv:
        found = {}
        for size in ((DIM, HIDDEN, HEADS), (256, 768, 4)):
            DIM, HIDDEN, HEADS = size
            for architecture in (80, 90):
                found[f"{DIM} sm_{architecture}"] = {nodes: orders(nodes, architecture) for nodes in (1, 12, 30)}
        return found
    made = {}
    for architecture in (80, 90):
        named = [(f"{name} {nodes}", *launch) for nodes in (1, 30) for name, *launch in launches(nodes)]
        int8 = ((nodes, launches(nodes, torch.int8)[1:]) for nodes in (1, 30))
        named += [(f"{name} int8 {nodes}", *launch) for nodes, made_of in int8 for name, *launch in made_of]
        named += [launch for case in WALKS for launch in walks(*case)]
        named += [(f"children {lines}", *children(lines)) for lines in (1, 2)]
        made |= {f"{name} sm_{architecture}": report(*launch, architecture) for name, *launch in named}  # pyright: ignore[reportCallIssue]
    return made


if __name__ == "__main__":
    print(json.dumps(main()))
