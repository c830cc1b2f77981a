"""`python -m lantern.eval.rounding`: how far the laws move when a target's weights are rounded.

Along pictures of plain decoding every code's law is computed by the target as it is and by what rounding makes of it;
the total variation between the two is what a code costs that is drawn from rounded weights, as relaxed methods tell it.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern.catalog import METHODS
from lantern.cli.command import DONE, Command, run_command
from lantern.cli.measuring import add_law, law_of
from lantern.cli.values import integer

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from lantern.models.llamagen.transformer import Transformer
    from lantern.sampling import Sampling
    from lantern.types import Condition

RESULTS = Path(__file__).resolve().parent / "results" / "rounding.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure."""
    return run_command(COMMAND, argv, prog="python -m lantern.eval.rounding")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("--model", default="lantern-emoji", help="name, folder or hub id of a model that takes prompts")
    parser.add_argument("--pictures", type=integer(1, 10**5), default=16, help="of plain decoding (default 16)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the results")
    add_law(parser)


def run(args: argparse.Namespace) -> int:
    """Tell the total variation a code of every rounding, and write it."""
    from lantern.eval.contenders import PROMPTS
    from lantern.eval.surroundings import surroundings
    from lantern.generate import Decoder
    from lantern.io import write_json
    from lantern.model_folder import load_model
    from lantern.requests import Request

    model = load_model(args.model, device=args.device, dtype="fp32", parts=("text",))
    if not model.takes_prompts:
        raise ValueError(f"model {model.name} draws classes, wanted one that takes prompts")
    sampling = model.sampling(**law_of(args))
    asked = [Request(prompt=PROMPTS[i % len(PROMPTS)], seed=i) for i in range(args.pictures)]
    decoder = Decoder(model, METHODS["plain"], sampling)
    codes = decoder.decode(decoder.condition(asked), asked).codes
    conditions = [decoder.condition([one]) for one in asked]
    target: Any = model.target
    rows = []
    for name, rounding in ROUNDINGS.items():
        spent = total_variations(target, rounding(target), conditions, codes, sampling)
        rows.append({"weights": name, "mean": _short(spent.mean()), "p99": _short(spent.quantile(0.99))})
        rows[-1]["max"] = _short(spent.max())
        print(f"{name}: total variation a code {rows[-1]['mean']}, at most {rows[-1]['max']}")
    law = {name: getattr(sampling, name) for name in ("guidance", "temperature", "top_k", "top_p")}
    found = {"model": model.name, "fingerprint": model.fingerprint, "pictures": args.pictures, "sampling": law}
    write_json(args.out, found | {"codes": codes.numel(), "surroundings": surroundings(model.device), "rows": rows})
    return DONE


def total_variations(
    target: "Transformer",
    other: "Transformer",
    conditions: "Sequence[Condition]",
    codes: "Int[Tensor, 'b n']",
    law: "Sampling",
) -> "Float[Tensor, ' b*n']":
    """Between the laws of two targets at every code of some pictures, after the same codes."""
    import torch

    from lantern.eval.likelihood import taught_logits

    places = torch.arange(codes.shape[1], device=codes.device)
    found = []
    for i, condition in enumerate(conditions):
        both = []
        for one in (target, other):
            captions = (True, False)[: law.rows]
            logits = [taught_logits(one, condition, codes[i : i + 1], has_caption=caption) for caption in captions]
            both.append(law.log_probs(torch.stack(logits, 1), places[None]).exp())
        found.append((both[0] - both[1]).abs().sum(-1).flatten() / 2)
    return torch.cat(found).double()


def in_bf16(target: "Transformer") -> "Transformer":
    """The target with weights in bf16, computed in fp32."""
    return copy.deepcopy(target).bfloat16().float()


def in_bits(bits: int) -> "Callable[[Transformer], Transformer]":
    """Gives the target with weights in 8 or 4 bits, as fp32 has them."""

    def rounding(target: "Transformer") -> "Transformer":
        import torch
        from torch import nn

        from lantern.decoding.quantized import quantized

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
COMMAND = Command("rounding", "How far rounded weights move the laws of codes.", add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
