"""Compiles the fused kernels ahead of time, without a GPU, and prints what ptxas reports as JSON."""

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

from lantern.engines.cuda import fused

META = torch.device("meta")
DIM, HIDDEN, HEADS, TOKENS, LINES, SLOTS = 1280, 3456, 20, 16384, 2, 1056  # of LlamaGen-XL at 512 pixels
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64"}


def source(kernel: Any, arguments: dict[str, Any]) -> Any:
    """Return what Triton compiles for such arguments, with the hints that it derives from them."""
    signature, constants, hints = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        is_aligned = isinstance(value, torch.Tensor)
        if parameter.is_constexpr:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            is_aligned = not isinstance(value, float) and not parameter.do_not_specialize and value % 16 == 0
        if is_aligned:
            hints[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, hints)


def launches(nodes: int, pdl: bool) -> list[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """Return name, kernel, arguments and options of the launches of a layer and the head, over `nodes` nodes."""
    found, name = list[Any](), ""

    def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        arguments = dict(zip(names, given, strict=False)) | {key: named[key] for key in named if key in names}
        found.append((name, kernel, arguments, {key: named[key] for key in named if key not in names}))

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=META)

    rows = 32
    x, squares = empty(LINES * rows, DIM), empty(LINES * rows, DIM // 16, dtype=torch.float32)
    how: Any = {"rows": rows, "pdl": pdl}
    kept, JITFunction.run = JITFunction.run, run  # type: ignore[method-assign]
    try:
        name = "enter"
        fused.enter(empty(LINES, nodes, DIM), x, squares, **how)
        name = "qkv"
        fused.qkv(
            *(x, empty(3 * DIM, DIM), empty(DIM), squares, empty(LINES * rows, 3 * DIM)),
            empty(2048, DIM // HEADS // 2, 2, dtype=torch.float32),
            *(empty(LINES, nodes, dtype=torch.long), empty(nodes, dtype=torch.long)),
            empty(2, LINES, HEADS, SLOTS, DIM // HEADS),
            eps=1e-5,
            **how,
        )
        name = "gate_up"
        hidden = empty(LINES * rows, HIDDEN)
        fused.gate_up(x, empty(2 * HIDDEN, DIM), empty(DIM), squares, hidden, eps=1e-5, live=nodes, **how)
        name = "out"
        fused.single(x, empty(DIM, DIM), x, squares, live=nodes, **how)
        name = "down"
        fused.single(hidden, empty(DIM, HIDDEN), x, squares, live=nodes, **how)
        name = "head"
        logits = empty(LINES * nodes, TOKENS, dtype=torch.float32)
        fused.single(x, empty(TOKENS, DIM), logits, None, live=nodes, **how)
    finally:
        JITFunction.run = kept  # type: ignore[method-assign]
    return found


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


CASES = ((80, 1, False), (80, 30, False), (90, 1, False), (90, 30, False), (90, 1, True))

if __name__ == "__main__":
    made = {
        f"{name} {nodes}{' pdl' if pdl else ''} sm_{architecture}": report(kernel, arguments, options, architecture)
        for architecture, nodes, pdl in (
            (80, 1, False),
            (80, 30, False),
            (90, 1, False),
            (90, 30, False),
            (90, 1, True),
        )
        for name, kernel, arguments, options in launches(nodes, pdl)
    }
    print(json.dumps(made))
