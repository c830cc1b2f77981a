"""`python -m studies.rounding`: total variation (TV) per code caused by rounding a target's weights.

Backs the figures for bf16, int8 and int4 in docs/exactness.md and docs/methods/specmquant.md
(eval/results/rounding.json). Along images of plain decoding, the distribution of every code is computed by the target
and by the target with rounded weights; the TV between the two is comparable with that of relaxed methods.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.cli.command import DONE, Command, add_distribution, distribution_of, integer, run_command
from lantern.methods.registry import METHODS

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from lantern.core.sampling import Sampling
    from lantern.core.types import Condition
    from lantern.models.llamagen.transformer import Transformer

RESULTS = Path(__file__).resolve().parents[1] / "eval" / "results" / "rounding.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return run_command(COMMAND, argv, prog="python -m studies.rounding")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model", default="lantern-emoji", help="name, folder or hub id of a model that takes prompts")
    parser.add_argument("--pictures", type=integer(1, 10**5), default=16, help="number of images (default 16)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the results")
    add_distribution(parser)


def run(args: argparse.Namespace) -> int:
    """Print the TV per code of every rounding and write it; ValueError for a model of classes."""
    from lantern.core.io import write_json
    from lantern.eval.speed.contenders import PROMPTS
    from lantern.eval.speed.surroundings import about
    from lantern.generation.generator import Generator
    from lantern.generation.requests import Request
    from lantern.models.folder import load_model

    model = load_model(args.model, device=args.device, dtype="fp32", parts=("text",), engine="eager")
    if not model.takes_prompts:
        raise ValueError(f"model {model.name} takes classes, expected a model that takes prompts")
    sampling = model.sampling(**distribution_of(args))
    requested = [Request(prompt=PROMPTS[i % len(PROMPTS)], seed=i) for i in range(args.pictures)]
    decoder = Generator(model, METHODS["plain"], sampling)
    codes = decoder.decode(decoder.condition(requested), requested).codes
    conditions = [decoder.condition([one]) for one in requested]
    target: Any = model.target
    rows = []
    for name, rounding in ROUNDINGS.items():
        spent = total_variations(target, rounding(target), conditions, codes, sampling)
        rows.append({"weights": name, "mean": _short(spent.mean()), "p99": _short(spent.quantile(0.99))})
        rows[-1]["max"] = _short(spent.max())
        print(f"{name}: TV per code {rows[-1]['mean']}, at most {rows[-1]['max']}")
    settings = {name: getattr(sampling, name) for name in ("guidance", "temperature", "top_k", "top_p")}
    found = about(model) | {"pictures": args.pictures, "sampling": settings}
    write_json(args.out, found | {"codes": codes.numel(), "rows": rows})
    return DONE


def total_variations(
    target: "Transformer",
    other: "Transformer",
    conditions: "Sequence[Condition]",
    codes: "Int[Tensor, 'b n']",
    sampling: "Sampling",
) -> "Float[Tensor, ' b*n']":
    """Return the TV between the distributions of two targets at every code of images, given the same codes."""
    import torch

    from lantern.eval.metrics.likelihood import teacher_forced_logits

    places = torch.arange(codes.shape[1], device=codes.device)
    found = []
    for i, condition in enumerate(conditions):
        both = []
        for one in (target, other):
            captions = (True, False)[: sampling.rows]
            logits = [
                teacher_forced_logits(one, condition, codes[i : i + 1], has_caption=caption) for caption in captions
            ]
            both.append(sampling.log_probs(torch.stack(logits, 1), places[None]).exp())
        found.append((both[0] - both[1]).abs().sum(-1).flatten() / 2)
    return torch.cat(found).double()


def in_bf16(target: "Transformer") -> "Transformer":
    """Return the target with weights rounded to bf16, computed in fp32."""
    return copy.deepcopy(target).bfloat16().float()


def in_bits(bits: int) -> "Callable[[Transformer], Transformer]":
    """Return a function that rounds a target's weights to 8 or 4 bits, computed in fp32."""

    def rounding(target: "Transformer") -> "Transformer":
        import torch
        from torch import nn

        from lantern.engines.prepared import quantized

        made = copy.deepcopy(quantized(target, bits))
        for module in made.modules():
            if isinstance(module, nn.Linear) and type(module.weight.data) is not torch.Tensor:
                module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
        return made  # type: ignore[return-value]

    return rounding


def _short(value: "Tensor") -> float:
    return float(f"{float(value):.3g}")


ROUNDINGS: "dict[str, Callable[[Transformer], Transformer]]" = {
    "bf16": in_bf16,
    "int8": in_bits(8),
    "int4": in_bits(4),
}
COMMAND = Command("rounding", "Measure how far rounded weights change the distributions of codes.", add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
