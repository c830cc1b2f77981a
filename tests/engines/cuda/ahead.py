"""Compiles kernels ahead of time, without a GPU, and prints what ptxas reports as JSON.

With `orders` as argument it prints how fused kernels add, by number of inputs, device, number of nodes and kernel.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lantern.core.sampling import Noise, Sampling
from lantern.core.types import DraftTree
from lantern.decoding.cache import StaticCache
from lantern.decoding.loop import LogitRows
from lantern.drafters.eagle.networks import Eagle, EagleConfig
from lantern.drafters.trees import grown, named
from lantern.engines.cuda import fused, kernels, walk
from lantern.engines.cuda.fused_eagle import FusedEagle
from lantern.engines.cuda.target import FusedPass, KernelPass
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.neighbours import Lantern, LanternPP

META = torch.device("meta")
DIM, HIDDEN, HEADS, TOKENS, LINES, SLOTS = 1280, 3456, 20, 16384, 2, 1056  # of LlamaGen-XL at 512 pixels
RULES: dict[str, Any] = {
    "exact": None,
    "lantern": (Lantern, {"k": 100}),
    "lantern++": (LanternPP, {"k": 10}),
    "released lantern++": (LanternPP, {"k": 10, "residual": "released"}),
    "cool lantern++": (LanternPP, {"k": 10, "residual": "cool"}),
}


def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device=META)


@contextmanager
def compiled_for(architecture: int, **changes: Any) -> Iterator[list[Any]]:
    """Compile what is launched for a GPU, instead of running it; yields the compiled kernels.

    `changes` are other values of constants, of the kernels that have them.
    """
    made, run = list[Any](), JITFunction.run
    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
        get_current_device=lambda: architecture,
        get_current_stream=lambda device: 0,
    )
    driver.set_active(gpu)  # type: ignore[arg-type]

    def compile_only(kernel: Any, *given: Any, **how: Any) -> None:
        how |= {"warmup": True} | {name: value for name, value in changes.items() if name in how}
        made.append(run(kernel, *given, **how))

    with patch.object(JITFunction, "run", compile_only):
        yield made


NAMES = ("enter", "qkv", "gate_up", "out", "down", "head")


def launch_layer(nodes: int, weights: torch.dtype = torch.bfloat16) -> None:
    """Launch the kernels of a layer and of the head, over `nodes` nodes."""
    rows = 32
    x, squares = empty(LINES * rows, DIM), empty(LINES * rows, DIM // 16, dtype=torch.float32)
    hidden, logits = empty(LINES * rows, HIDDEN), empty(LINES * nodes, TOKENS, dtype=torch.float32)

    def weight(outputs: int, inputs: int = DIM) -> torch.Tensor:
        return empty(outputs, inputs, dtype=weights)

    scale = empty(TOKENS, dtype=torch.float32) if weights == torch.int8 else None
    how: Any = {"rows": rows, "scale": scale}
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


CACHES = {"": torch.bfloat16, " fp8": torch.uint8}


def launch_attention(nodes: int, kept: torch.dtype) -> None:
    """Launch the kernels that read and write the KV cache, over `nodes` nodes."""
    rows, width, cache = 32, DIM // HEADS, empty(2, LINES, HEADS, SLOTS, DIM // HEADS, dtype=kept)
    positions, slots = empty(LINES, nodes, dtype=torch.long), empty(nodes, dtype=torch.long)
    qkv, rope = empty(LINES * rows, 3 * DIM), empty(2048, width // 2, 2, dtype=torch.float32)
    kernels.rotate_and_store(qkv, rope, positions, slots, cache, rows=rows)
    x, squares = empty(LINES * rows, DIM), empty(LINES * rows, DIM // 16, dtype=torch.float32)
    given = (x, empty(3 * DIM, DIM), empty(DIM), squares, qkv, rope, positions, slots, cache)
    fused.qkv(*given, eps=1e-5, rows=rows)
    plan = kernels.Plan(images=1, guided=LINES, rows=rows, tokens=1024, device=META)
    plan.live = nodes
    attention = kernels.BlockAttention(plan, heads=HEADS, width=width, device=META)
    attention(qkv, cache, empty(LINES, nodes, SLOTS), x, prefix=1)


PASSES = ((1, 1), (1, 16), (1, 60), (8, 4), (16, 1), (64, 4))  # images, and nodes of each


@torch.no_grad()
def launch_passes() -> None:
    """Launch whole passes: over tokens and trees in batches, of an EAGLE-1 module, and what matches a tree."""
    config, whole = TransformerConfig.named("XL", model_type="t2i", block_size=1024, n_layer=1), torch.long
    with META:
        target = Transformer(config).to(torch.bfloat16)
        eagle = Eagle(EagleConfig.for_target(config)).to(torch.bfloat16)
    sizes: dict[str, Any] = {"layers": 1, "heads": HEADS, "head_dim": DIM // HEADS, "tokens": 1024, "stage": 64}
    sizes |= {"dtype": torch.bfloat16, "device": META}
    for images, nodes in PASSES:
        cache, lines = StaticCache(**sizes, images=images, rows=LINES, prefix=1), images * LINES
        x, mask = empty(lines, nodes, DIM), empty(lines, nodes, cache.slots)
        slots = empty(1, nodes, dtype=whole).expand(lines, -1)
        for kind in (FusedPass, KernelPass):
            kind(target)(x, empty(lines, nodes, dtype=whole), mask, cache=cache, slots=slots)
    kernels.linear8(empty(256, DIM), empty(DIM, DIM, dtype=torch.int8), empty(DIM), empty(256, DIM))
    for images, pairs in ((1, 1), (1, 5), (8, 5)):
        numbers, known = empty(images, pairs, dtype=whole), empty(images, dtype=whole)
        FusedEagle(eagle).draft(
            *(empty(images, 1, pairs, DIM), numbers, numbers, lambda _, seen: seen),
            known=known,
            ancestors=empty(pairs, pairs, dtype=torch.bool),
            scales=empty(images, pairs, dtype=torch.float32),
            cache=StaticCache(**sizes, images=images, rows=1, prefix=0),
            slots=known[:0].new_empty(pairs),
        )
    shape = named("naive_extend_57").shape(META)
    nodes = empty(1, shape.num_nodes, dtype=whole)
    walk.match(DraftTree(nodes, shape, "gumbel"), SimpleNamespace(sample=lambda: nodes))  # type: ignore[arg-type]


def launch_walk(mode: Any, rule: str, tokens: int) -> None:
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
    walk.walk(RejectionVerifier(relaxation), tree, rows)


def launch_children(lines: int) -> None:
    """Launch what ranks the children of four nodes and writes log q."""
    wide, places = torch.float32, empty(1, 1, dtype=torch.long).expand(1, 4)
    kernels.sample(
        *(empty(1, lines, 4, TOKENS, dtype=wide), places, empty(1, 1024, TOKENS, dtype=wide)),
        Sampling(guidance=3.0, top_k=1000),
        width=4,
        log_q=empty(1, 4, TOKENS, dtype=wide),
    )


def launch_sample() -> None:
    """Launch what samples a token of plain decoding, and commits it."""
    wide, whole = torch.float32, torch.long
    kernels.sample(
        *(empty(1, 2, 1, TOKENS, dtype=wide), empty(1, 1, dtype=whole), empty(1, 1024, TOKENS, dtype=wide)),
        Sampling(guidance=3.0, top_k=1000),
        grid=empty(1, 1024, dtype=whole),
        total=empty(1, dtype=wide),
    )


def report(made: Any) -> dict[str, int]:
    """Return registers, spilled bytes and shared memory of a kernel. CalledProcessError if ptxas refuses it."""
    found = re.search(r"^\.target (\w+)", made.asm["ptx"], re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(made.asm["ptx"])
        of_target = knobs.nvidia.ptxas_blackwell if found[1].startswith("sm_10") else knobs.nvidia.ptxas
        command = [of_target.path, "-v", f"--gpu-name={found[1]}", str(path), "-o", f"{path}.cubin"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = {"registers": r"Used (\d+) registers", "stores": r"(\d+) bytes spill stores"}
    numbers |= {"loads": r"(\d+) bytes spill loads"}
    used = {key: int(match[1]) for key, pattern in numbers.items() if (match := re.search(pattern, text))}
    return used | {"shared": made.metadata.shared}


def orders(nodes: int, architecture: int) -> dict[str, list[str]]:
    """Return how the sums and products of each fused kernel divide what they add among threads, by Triton's names.

    The order of a sum follows from it. `few parts` has a kernel with a fault of earlier times: 16 sums of squares.
    """
    found = {}
    for name, weights, changes in (
        ("", torch.bfloat16, {}),
        (" int8", torch.int8, {}),
        (" of few parts", torch.bfloat16, {"PARTS": 16, "PARTS_SIZE": 16}),
    ):
        with compiled_for(architecture, **changes) as made:
            launch_layer(nodes, weights)
        kernels_of = list(zip(NAMES, made, strict=True))[1 : 2 if changes else None]
        found |= {f"{kernel}{name}": divided(one) for kernel, one in kernels_of}
    return found


def divided(made: Any) -> list[str]:
    """Return the layouts of the sums and products of a compiled kernel, sums with their axis."""
    ir = made.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ir, re.MULTILINE))
    found = re.findall(r'"tt.reduce".*?axis = (\d) : i32.*?\}\) : \(tensor<[\dx]+x\w+, (.*?)>\)', ir, re.DOTALL)
    found += re.findall(r"tt.(dot) .*-> tensor<[\dx]+x\w+, (.*?)>", ir)
    return [f"{what} {resolved(layout, layouts)}" for what, layout in found]


def resolved(layout: str, layouts: dict[str, str]) -> str:
    return re.sub(r"#\w+(?![\w.])", lambda name: layouts.get(name[0], name[0]), layout)


WALKS = (*(("sampled", rule, TOKENS) for rule in RULES), ("point", "lantern++", TOKENS), ("sampled", "lantern++", 2048))


def main() -> dict[str, Any]:
    global DIM, HIDDEN, HEADS
    if "orders" in sys.argv:
        found = {}
        for size in ((DIM, HIDDEN, HEADS), (256, 768, 4)):
            DIM, HIDDEN, HEADS = size
            for architecture in (80, 90):
                found[f"{DIM} sm_{architecture}"] = {nodes: orders(nodes, architecture) for nodes in (1, 12, 30)}
        return found
    found = {}
    for architecture in (80, 90, 100):
        with compiled_for(architecture) as made:
            names = list[str]()
            for nodes in (1, 30):
                launch_layer(nodes)
                launch_layer(nodes, torch.int8)
                names += [f"{name} {kind}{nodes}" for kind in ("", "int8 ") for name in NAMES]
                for kind, kept in CACHES.items():
                    launch_attention(nodes, kept)
                    names += [f"{name}{kind} {nodes}" for name in ("rotary", "stored qkv", "partials", "combine")]
            for case in WALKS:
                launch_walk(*case)
                names += [f"{kernel} {' '.join(map(str, case))}" for kernel in ("summary", "walk")]
            for lines in (1, 2):
                launch_children(lines)
                names.append(f"children {lines}")
            launch_sample()
            names.append("sample")
            launch_passes()
            of_passes = {id(one): one for one in made[len(names) :]}.values()  # each is launched many times
            made[len(names) :] = of_passes
            names += [f"{one.metadata.name} {number} of passes" for number, one in enumerate(of_passes)]
        found |= {f"{name} sm_{architecture}": report(one) for name, one in zip(names, made, strict=True)}
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
