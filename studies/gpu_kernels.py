"""`python -m studies.gpu_kernels`: what the GPU engine's kernels need, found without a GPU.

Backs the tables of the GPU engine in docs/engines.md (eval/results/gpu_kernels.json). Passes run on the meta device,
where nothing is computed; each kernel launch is recorded. The first table compiles the recorded kernels ahead of time
and gives the registers, spilled bytes and shared memory that ptxas reports. The second counts launches and bytes of a
pass. Nothing here is measured on a GPU.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lantern.cli.command import DONE, Command, one_of, run_command
from lantern.core.config import build_config
from lantern.core.io import embedded_model, read_config, write_json
from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.decoding.cache import StaticCache
from lantern.eval.speed.surroundings import surroundings
from lantern.models.llamagen.transformer import Transformer, TransformerConfig

RESULTS = Path(__file__).resolve().parents[1] / "eval" / "results" / "gpu_kernels.json"
# width, inner width, layers, heads of Janus-Pro
JANUS = {"Janus-1B": (2048, 5632, 24, 16), "Janus-7B": (4096, 11008, 30, 32)}
SHAPES = ("embedded", "B", "L", "XL", "XXL", "3B", *JANUS)
ARCHITECTURES = (80, 90)
NODES = (1, 16, 29)
LINES = 2  # guidance rows of one image
PROMPT = 64  # tokens of a prompt with keys of its own
BANDWIDTH = 3.35e12  # bytes a second of an H100's memory, from its data sheet
GAP = 1e-6  # seconds between two kernels of a graph: an assumption
META = torch.device("meta")
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
}
# operations of torch that return a view, and allocations without a kernel
FREE = (
    *("view", "_unsafe_view", "t", "transpose", "permute", "unbind", "split", "split_with_sizes", "slice", "select"),
    *("expand", "unsqueeze", "squeeze", "reshape", "detach", "alias", "as_strided", "lift_fresh"),
    *("empty", "new_empty", "empty_like"),
)


@dataclass(frozen=True)
class Launch:
    """A launch of a Triton kernel: its arguments by name and its options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.fn.__name__.removesuffix("_kernel")

    def source(self) -> Any:
        """Return what Triton compiles, with the hints that it derives from such arguments."""
        from triton.compiler import ASTSource

        signature, constants, hints = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            is_aligned = isinstance(value, torch.Tensor)
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[(i,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = TYPES[value.dtype]
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                signature[parameter.name] = "i32"
                is_aligned = not parameter.do_not_specialize and value % 16 == 0
            if is_aligned:
                hints[(i,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, hints)


class Recorder(TorchDispatchMode):
    """Records launches of Triton kernels, which it does not run, and counts torch's operations that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.operations: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation."""
        name = function.overloadpacket.__name__
        if name not in FREE:
            self.operations[name] = self.operations.get(name, 0) + 1
        return function(*args, **(kwargs or {}))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs in the context."""
        from triton.runtime.jit import JITFunction

        def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
            names = [parameter.name for parameter in kernel.params]
            arguments = dict(zip(names, given, strict=False)) | {name: named[name] for name in named if name in names}
            options = {name: value for name, value in named.items() if name not in names}
            self.launches.append(Launch(kernel, arguments, options))

        kept, JITFunction.run = JITFunction.run, run  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            JITFunction.run = kept  # type: ignore[method-assign]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--shapes", nargs="+", type=one_of(SHAPES), default=list(SHAPES), help="(default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the results")


def run(args: argparse.Namespace) -> int:
    """Print both tables and write them; ValueError if Triton's interpreter is on."""
    from lantern.engines.cuda.kernels import is_interpreted

    if is_interpreted():
        raise ValueError("TRITON_INTERPRET is set, with which nothing is compiled: unset it")
    modules = {shape: module_of(shape) for shape in args.shapes}
    recorded = {shape: {nodes: record(module, nodes) for nodes in NODES} for shape, module in modules.items()}
    passes = [
        figures(shape, modules[shape], nodes, made) for shape in args.shapes for nodes, made in recorded[shape].items()
    ]
    compiled = [
        {"shape": shape} | compile_ahead(launch, architecture)
        for shape in args.shapes
        for launch in distinct(recorded[shape][NODES[-1]].launches + int8_launches(modules[shape]))
        for architecture in ARCHITECTURES
    ]
    print(kernel_table(compiled))
    print()
    print(pass_table(passes))
    setup = {"lines": LINES, "bandwidth": BANDWIDTH, "gap": GAP, "torch": torch.__version__, "triton": _triton()}
    found = {"measured_on_a_gpu": False, "setup": setup, "surroundings": surroundings(torch.device("cpu"))}
    write_json(args.out, found | {"kernels": compiled, "passes": passes})
    return DONE


def module_of(shape: str) -> Any:
    """Return the embedded model, a released size with captions and 1,024 codes, or a Janus-Pro, without weights."""
    with META:
        if shape in JANUS:
            return janus(*JANUS[shape])
        if shape == "embedded":
            folder = embedded_model()
            config = build_config(TransformerConfig, read_config(folder / "transformer"), source=folder)
        else:
            config = TransformerConfig.named(shape, model_type="t2i", cls_token_num=120, block_size=1024)
        return Transformer(config).to(torch.bfloat16)


def janus(width: int, inner: int, layers: int, heads: int) -> Any:
    """Return the target of a Janus-Pro."""
    from transformers import (
        JanusConfig,
        JanusForConditionalGeneration,
        JanusVisionConfig,
        JanusVQVAEConfig,
        LlamaConfig,
    )

    from lantern.models.transformers.janus import assemble

    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 16384}
    config = JanusConfig(
        text_config=LlamaConfig(vocab_size=102400, **sizes),
        vision_config=JanusVisionConfig(projection_dim=width),
        vq_config=JanusVQVAEConfig(projection_dim=width, image_token_embed_dim=width),
    )
    model: Any = JanusForConditionalGeneration(config)
    return assemble(model.to(torch.bfloat16), None).target


@torch.no_grad()
def record(module: Any, nodes: int) -> Recorder:
    """Record a bf16 pass over a tree of `nodes`, and its sampling, after half of the image."""
    from lantern.engines.cuda.llama import LlamaTarget
    from lantern.engines.cuda.target import KernelTarget

    config = module.config
    with META:
        target = (KernelTarget if module.config.family == "llamagen" else LlamaTarget)(module)
        cache = StaticCache(
            **{"layers": config.n_layer, "images": 1, "rows": LINES, "heads": config.n_head},
            **{"prefix": 2 if module.config.family == "llamagen" else PROMPT, "head_dim": config.head_dim},
            **{"codes": config.block_size, "stage": nodes},
            dtype=torch.bfloat16,
            device=META,
        )
        mask = torch.empty(LINES, nodes, cache.slots, dtype=torch.bfloat16)
        inputs = torch.empty(LINES, nodes, config.dim, dtype=torch.bfloat16)
        positions = torch.empty(LINES, nodes, dtype=torch.long)
        noise = Noise([(0, 0)], positions=config.block_size, vocab_size=config.vocab_size, device=META)
        sample = target.sampler(Sampling(guidance=7.5, top_k=min(1000, config.vocab_size // 2)), noise)
        assert sample is not None
        for made in (Recorder(), Recorder()):  # the first pass allocates
            with made.recording():
                scores = target(inputs, positions, mask, cache=cache, slots=positions)
                sample(scores.logits.unflatten(0, (1, LINES)), positions[:1])
    return made


def int8_launches(module: Any) -> list[Launch]:
    """Record the products of a pass with int8 weights, which LlamaGen's layers can have."""
    if module.config.family != "llamagen":
        return []
    from lantern.engines.cuda import kernels
    from lantern.engines.cuda.rows import rows_of

    made, count, config = Recorder(), LINES * rows_of(LINES, 1), module.config
    dim, hidden = config.dim, config.ffn_dim
    with META, made.recording():
        shapes = ((3 * dim, dim), (dim, dim), (2 * hidden, dim), (dim, hidden), (config.vocab_size, dim))
        for outputs, inputs in shapes:
            x, out = (torch.empty(count, width, dtype=torch.bfloat16) for width in (inputs, outputs))
            weight = torch.empty(outputs, inputs, dtype=torch.int8)
            kernels.linear8(x, weight, torch.empty(outputs, dtype=torch.bfloat16), out)
    return made.launches


def distinct(launches: Sequence[Launch]) -> list[Launch]:
    """Return one launch of each kernel and set of constants."""
    found = {}
    for launch in launches:
        constants = {p.name: launch.arguments[p.name] for p in launch.kernel.params if p.is_constexpr}
        found.setdefault((launch.name, str(constants)), launch)
    return list(found.values())


def compile_ahead(launch: Launch, architecture: int) -> dict[str, Any]:
    """Compile a kernel for an architecture, and return what ptxas reports. CalledProcessError if ptxas refuses it."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    made = triton.compile(launch.source(), target=GPUTarget("cuda", architecture, 32), options=launch.options)
    text = made.asm["ptx"]
    found = re.search(r"^\.target (\w+)", text, re.MULTILINE)
    assert found is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(text)
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={found[1]}", str(path), "-o", f"{path}.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = {
        "registers": r"Used (\d+) registers",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
    }
    used = {name: int(match[1]) for name, pattern in numbers.items() if (match := re.search(pattern, report))}
    head = {"kernel": launch.name, "architecture": architecture, "warps": made.metadata.num_warps}
    return head | used | {"shared": made.metadata.shared}


def figures(shape: str, module: Any, nodes: int, made: Recorder) -> dict[str, Any]:
    """Return launches and bytes of a pass with half of the codes committed.

    The floor is the weights and the cache, read once. Predicted bytes add activations, logits and partial results,
    written and read once, and the blocks that attention reads again for each row of a tree; many of those are in the
    L2 cache.
    """
    from lantern.engines.cuda.kernels import BLOCK, TILE
    from lantern.engines.cuda.rows import rows_of

    config, half = module.config, module.config.block_size // 2
    prompt = 0 if module.config.family == "llamagen" else PROMPT
    read = ((module if module.config.family == "llamagen" else module.body).layers, module.norm, module.output)
    dim, hidden, layers, codes = config.dim, config.ffn_dim, config.n_layer, config.vocab_size
    rows, live = LINES * rows_of(LINES, nodes), LINES * nodes
    weights = 2 * sum(weight.numel() for part in read for weight in part.parameters())
    kept = 2 * 2 * LINES * layers * dim * (half + prompt)
    # after half of the codes a tree stands within one more block
    whole, tail = half // BLOCK + prompt // BLOCK, 1
    again = 2 * 2 * layers * dim * BLOCK * (LINES * whole * (-(-nodes // TILE) - 1) + live * tail)
    partial = 2 * 4 * layers * live * (whole + tail) * (dim + 2 * config.n_head)
    per_row = rows * (dim + 3 * dim + dim + dim + dim + 2 * hidden + hidden + dim)
    per_live = live * (4 * dim + 6 * dim + dim + dim + 4 * dim + 3 * hidden)
    activations = 2 * layers * (per_row + per_live) + 2 * rows * (dim + codes) + 4 * 3 * live * codes
    products = made.operations.get("mm", 0) + made.operations.get("addmm", 0)
    others = sum(made.operations.values()) - products
    launches = {"kernels": len(made.launches), "products": products, "other": others}
    floor, total = weights + kept, weights + kept + again + partial + activations
    return {
        "shape": shape,
        "nodes": nodes,
        "rows": rows,
        "launches": launches,
        "operations": made.operations,
        "weight_bytes": weights,
        "cache_bytes": kept,
        "predicted_bytes": total,
        "over_floor": round(total / floor, 3),
        "floor_ms": round(1e3 * floor / BANDWIDTH, 4),
        "predicted_ms": round(1e3 * (total / BANDWIDTH + GAP * sum(launches.values())), 4),
    }


def kernel_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the largest figures of each kernel over all shapes, per architecture."""
    lines = [f"{'kernel':<12}{'arch':>6}{'programs':>10}{'registers':>11}{'spilled':>9}{'shared':>9}{'warps':>7}"]
    for name in dict.fromkeys(row["kernel"] for row in rows):
        for architecture in ARCHITECTURES:
            own = [row for row in rows if (row["kernel"], row["architecture"]) == (name, architecture)]
            spilled = max(row["spill_stores"] + row["spill_loads"] for row in own)
            most = (max(row[key] for row in own) for key in ("registers", "shared", "warps"))
            registers, shared, warps = most
            head = f"{name:<12}{f'sm_{architecture}':>6}{len(own):>10}{registers:>11}"
            lines.append(f"{head}{spilled:>9}{shared:>9}{warps:>7}")
    return "\n".join(lines)


def pass_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of passes."""
    columns = ("shape", "nodes", "rows", "launches", "MB floor", "MB predicted", "ratio", "ms floor", "ms predicted")
    lines = ["".join(f"{name:>13}" for name in columns)]
    for row in rows:
        floor = (row["weight_bytes"] + row["cache_bytes"]) / 1e6
        sizes = (f"{floor:.1f}", f"{row['predicted_bytes'] / 1e6:.1f}", row["over_floor"])
        values = (row["shape"], row["nodes"], row["rows"], sum(row["launches"].values()), *sizes)
        lines.append("".join(f"{value!s:>13}" for value in (*values, row["floor_ms"], row["predicted_ms"])))
    return "\n".join(lines)


def _triton() -> str:
    import triton

    return triton.__version__


COMMAND = Command(
    "gpu_kernels", "Compile the GPU kernels without a GPU, and count what a pass needs.", add_arguments, run
)

if __name__ == "__main__":
    sys.exit(run_command(COMMAND, prog="python -m studies.gpu_kernels"))
