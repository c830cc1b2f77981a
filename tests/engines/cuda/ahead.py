"""Compiles kernels ahead of time, without a GPU, and prints what ptxas reports as JSON.

With `orders` as argument it prints how fused kernels add, by number of inputs and device, number of nodes and kernel.
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
from lantern.core.types import DraftTree, TreeShape
from lantern.core.weights import quantized
from lantern.decoding.cache import StaticCache
from lantern.decoding.loop import LogitRows
from lantern.drafters.eagle.networks import Eagle, EagleConfig
from lantern.drafters.trees import grown, named
from lantern.engines.cuda import couple, kernels, relax, walk
from lantern.engines.cuda.fused_eagle import FusedEagle
from lantern.engines.cuda.target import FusedPass, KernelPass
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.verifiers.coupling import CouplingVerifier
from lantern.verifiers.rejection import RejectionVerifier
from lantern.verifiers.relaxations.acceptance import Grouped
from lantern.verifiers.relaxations.distributions import Bounded, Mixture
from lantern.verifiers.relaxations.neighbours import Lantern, LanternPP
from lantern.verifiers.relaxations.rule import UnderTest

META, WIDE, WHOLE = torch.device("meta"), torch.float32, torch.long
TOKENS, LINES = 16384, 2
RULES: dict[str, Any] = {
    "exact": None,
    "lantern": (Lantern, {"k": 100}),
    "lantern++": (LanternPP, {"k": 10}),
    "released lantern++": (LanternPP, {"k": 10, "residual": "released"}),
    "cool lantern++": (LanternPP, {"k": 10, "residual": "cool"}),
    "grouped": (Grouped, {}),
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


def target_of(dim: int, heads: int) -> Transformer:
    """Return a target of one layer, by default as LlamaGen-XL's at 512 pixels."""
    config = TransformerConfig.named("XL", model_type="t2i", block_size=1024, n_layer=1, dim=dim, n_head=heads)
    with META:
        return Transformer(config).to(torch.bfloat16)


def cache_of(target: Transformer, images: int, rows: int = LINES, prefix: int = 1, *, is_fp8: bool = False) -> Any:
    config = target.config
    sizes: dict[str, Any] = {"layers": 1, "heads": config.n_head, "head_dim": config.head_dim, "tokens": 1024}
    sizes |= {"images": images, "rows": rows, "prefix": prefix, "stage": 64, "dtype": torch.bfloat16}
    return StaticCache(**sizes, device=META, is_fp8=is_fp8)


@torch.no_grad()
def launch_pass(kind: Any, target: Any, images: int, nodes: int, *, is_fp8: bool = False) -> None:
    cache, lines = cache_of(target, images, is_fp8=is_fp8), images * LINES
    x, mask = empty(lines, nodes, target.config.dim), empty(lines, nodes, cache.slots)
    slots = empty(1, nodes, dtype=WHOLE).expand(lines, -1)
    kind(target)(x, empty(lines, nodes, dtype=WHOLE), mask, cache=cache, slots=slots)


@torch.no_grad()
def launch_draft(target: Transformer, images: int, pairs: int) -> None:
    """Launch a pass of an EAGLE-1 module."""
    with META:
        eagle = Eagle(EagleConfig.for_target(target.config)).to(torch.bfloat16)
    numbers, known = empty(images, pairs, dtype=WHOLE), empty(images, dtype=WHOLE)
    FusedEagle(eagle).draft(
        *(empty(images, 1, pairs, target.config.dim), numbers, numbers, lambda _, seen: seen),
        known=known,
        ancestors=empty(pairs, pairs, dtype=torch.bool),
        scales=empty(images, pairs, dtype=WIDE),
        cache=cache_of(target, images, rows=1, prefix=0),
        slots=known[:0].new_empty(pairs),
    )


def launch_match() -> None:
    shape = named("naive_extend_57").shape(META)
    nodes = empty(1, shape.num_nodes, dtype=WHOLE)
    walk.match(DraftTree(nodes, shape, "gumbel"), SimpleNamespace(sample=lambda: nodes))  # type: ignore[arg-type]


def launch_groups() -> None:
    p = empty(16, TOKENS, dtype=WIDE)
    walk.KernelGrouped(empty(TOKENS, 8, dtype=WIDE)).judge(UnderTest(p, p, empty(16, dtype=WHOLE), is_point=False))


def problem(mode: Any, shape: TreeShape, tokens: int = TOKENS) -> tuple[DraftTree, LogitRows]:
    """Return a tree and its rows, with tables of noise that are not made."""
    noise = Noise([(0, 0)], positions=1024, vocab_size=tokens, device=META)
    noise.gumbel_table = lambda purpose: empty(1, 1024, tokens, dtype=WIDE)  # type: ignore[method-assign]
    noise.uniform_table = lambda lanes: empty(1, 1024, lanes, dtype=torch.float64)  # type: ignore[method-assign]
    noise.step_table = lambda lanes, width: empty(1, 1024, width, lanes, dtype=torch.float64)  # type: ignore[method-assign]
    nodes, log_q = empty(1, shape.num_nodes, dtype=WHOLE), empty(1, shape.num_nodes, tokens, dtype=WIDE)
    logits = empty(1, LINES, shape.num_nodes, tokens, dtype=WIDE)
    tree = DraftTree(nodes, shape, mode, None if mode == "point" else log_q)
    return tree, LogitRows(Sampling(guidance=3.0, top_k=100), logits, nodes, noise)


def tables(tokens: int) -> dict[str, Any]:
    return {"table": empty(tokens, 1024, dtype=torch.int32), "distances": empty(tokens, 1024, dtype=WIDE)}


def launch_walk(mode: Any, rule: str, tokens: int) -> None:
    near = {"codebook": empty(tokens, 8, dtype=WIDE)} if rule == "grouped" else tables(tokens)
    relaxation = None if RULES[rule] is None else RULES[rule][0](**near, **RULES[rule][1])
    walk.walk(RejectionVerifier(relaxation), *problem(mode, grown(8, 2).shape(META), tokens))


def launch_couple(redraw: Any, nodes: int) -> None:
    couple.couple(CouplingVerifier(redraw), *problem("jacobi", named(f"chain_{nodes - 1}").shape(META)))


def launch_relax(rule: str, tokens: int) -> None:
    relaxation: Any = Bounded(**tables(tokens)) if rule == "bounded" else Mixture()
    relax.KernelRows(relaxation, *problem("gumbel", grown(8, 2).shape(META), tokens))


def launch_samples() -> None:
    """Launch what ranks the children of four nodes and writes log q, and what commits a token of plain decoding."""
    noise, sampling = empty(1, 1024, TOKENS, dtype=WIDE), Sampling(guidance=3.0, top_k=1000)
    place, log_q = empty(1, 1, dtype=WHOLE), empty(1, 4, TOKENS, dtype=WIDE)
    for lines in (1, 2):
        logits = empty(1, lines, 4, TOKENS, dtype=WIDE)
        how: dict[str, Any] = {"log_q": log_q, "chances": empty(1, 4, 4, dtype=WIDE)}
        kernels.sample(logits, place.expand(1, 4), noise, sampling, width=4, **how)
    into: dict[str, Any] = {"grid": empty(1, 1024, dtype=WHOLE), "total": empty(1, dtype=WIDE)}
    kernels.sample(empty(1, 2, 1, TOKENS, dtype=WIDE), place, noise, sampling, **into)


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


NAMES = ("qkv", "out", "gate_up", "down", "head")


def orders(target: Transformer, nodes: int, architecture: int) -> dict[str, list[str]]:
    """Return how the sums and products of each fused kernel divide what they add among threads, by Triton's names.

    The order of a sum follows from it. `few parts` has a kernel with a fault of earlier times: 16 sums of squares.
    """
    found, eight_bits = {}, quantized(target, "int8")
    for name, of, changes in (
        ("", target, {}),
        (" int8", eight_bits, {}),
        (" of few parts", target, {"PARTS": 16, "PARTS_SIZE": 16}),
    ):
        with compiled_for(architecture, **changes) as made:
            launch_pass(FusedPass, of, 1, nodes)
        products = [one for one in made if one.metadata.name in ("pair_kernel", "single_kernel")]
        kernels_of = list(zip(NAMES, products, strict=True))[: 1 if changes else None]
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
RELAXED = (("bounded", TOKENS), ("mixture", TOKENS), ("bounded", 2048))
PASSES = ((1, 1), (1, 16), (1, 30), (1, 60), (8, 4), (16, 1), (64, 4))  # images, and nodes of each


def launch_all() -> None:
    target = target_of(1280, 20)
    eight_bits = quantized(target, "int8")
    for kind in (FusedPass, KernelPass):
        for size in PASSES:
            launch_pass(kind, target, *size)
        for nodes in (1, 30):
            launch_pass(kind, eight_bits, 1, nodes, is_fp8=True)
    for case in WALKS:
        launch_walk(*case)
    for size in ((1, 1), (1, 5), (8, 5)):
        launch_draft(target, *size)
    for case in RELAXED:
        launch_relax(*case)
    for redraw in ("coupled", "independent", "reuse"):
        launch_couple(redraw, 64)
    launch_samples()
    launch_match()
    launch_groups()


def main() -> dict[str, Any]:
    found = {}
    if "orders" in sys.argv:
        for dim, heads in ((1280, 20), (256, 4)):
            for architecture in (80, 90):
                by_nodes = {nodes: orders(target_of(dim, heads), nodes, architecture) for nodes in (1, 12, 30)}
                found[f"{dim} sm_{architecture}"] = by_nodes
        return found
    for architecture in (80, 90, 100):
        with compiled_for(architecture) as made:
            launch_all()
        each = {id(one): one for one in made}.values()  # a kernel is launched many times
        found |= {f"{one.metadata.name} {i} sm_{architecture}": report(one) for i, one in enumerate(each)}
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
