"""`lantern bench`: measures the speedup of methods over the fastest plain decoding on this machine."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from json import dumps
from pathlib import Path
from typing import Any

from lantern.cli.command import DONE, FAILED, Group, OneOf, check_file, command, complain, flag, opt
from lantern.cli.options import DTYPES, MAX_SEED, MODEL, MODEL_HELP, VARIANT, Distribution, Machine

SHAPES = ("B", "L", "XL", "XXL", "XXXL", "1B", "3B", "7B")
METHODS_HELP = 'such as eagle1 "lantern++:k=5,lambda_=1.5"; default: auto and the model\'s default'
DRAFTER_HELP = 'methods to measure, such as eagle1 (default), parallelspec or "lantern++:drafts=parallelspec"'
VARIANTS_HELP = "eager, cpu or graph, alone or with +int8, +int4 or +fp8 (default: those of --baseline, else all)"
BASELINE_HELP = "how plain decoding runs beside --variants; the fastest is the baseline (default: in all ways)"


class OfModel(Group):
    """A model (the default)."""

    model: str = opt(MODEL, MODEL_HELP)
    methods: list[str] | None = opt(None, METHODS_HELP, metavar="METHOD")
    prompts_file: str | None = opt(None, "prompts, one per line (or .json, .jsonl, .tsv)", metavar="FILE")


class OfShape(Group):
    """A size of LlamaGen with random weights and simulated acceptance."""

    shape: list[str] | None = opt(None, f"of {', '.join(SHAPES)}", type=OneOf(SHAPES), metavar="SIZE")
    tau: list[float] | None = opt(None, "tokens per step to simulate (default 2 3 3.5 4)", 1, 64)
    tokens: int | None = opt(None, "tokens of the canvas to decode (default 48)", 1, 65535)
    tree: str | None = opt(None, "draft tree (default grown_15_4)")
    drafter: list[str] | None = opt(None, DRAFTER_HELP, metavar="METHOD")


def bench(
    images: int = opt(10, "images of each contender", 1, 10**5),
    batch: list[int] = opt([1], "images at a time", 1, 4096),
    dtype: list[str] | None = opt(None, "fp32, bf16, fp16 (default fp32 bf16; sizes: bf16)", type=OneOf(DTYPES)),
    variants: list[str] | None = opt(None, VARIANTS_HELP, type=VARIANT),
    baseline: list[str] | None = opt(None, BASELINE_HELP, type=VARIANT),
    seed: int = opt(0, "seed of the noise (default 0)", 0, MAX_SEED),
    rounding: bool = opt(False, "also measure how far each variant moves the distributions of tokens from the first's"),
    json: bool = opt(False, "one JSON line on stdout, the table on stderr"),
    out: Path | None = opt(None, "write the JSON line to a file as well", metavar="FILE"),
    *,
    of_model: OfModel,
    distribution: Distribution,
    of_shape: OfShape,
    machine: Machine,
) -> int:
    """Measure the speedup of methods over the fastest plain decoding.

    After a signal the table and the JSON line are those of the whole rounds before.
    """
    is_shape, model_only = bool(of_shape.shape), {"methods": of_model.methods, "prompts_file": of_model.prompts_file}
    model_only |= {"rounding": rounding or None}
    for name, value in {**model_only, **vars(distribution)}.items() if is_shape else vars(of_shape).items():
        if value is not None:
            other = "a model, not of --shape" if is_shape else "--shape, which is missing"
            raise ValueError(f"{flag(name)} is an option of {other}")
    check_file("--out", out)
    from lantern.eval.speed import shapes
    from lantern.eval.speed.bench import BenchOptions, measure
    from lantern.eval.speed.contenders import kinds_of
    from lantern.eval.speed.race import CutShort
    from lantern.generation.requests import read_prompts
    from lantern.models.folder import pick_device

    machine.set_threads()
    # plain decoding runs in every way unless --baseline restricts it
    baselines = baseline or kinds_of(pick_device(machine.device))
    chosen: dict[str, Any] = {"dtypes": dtype, "kinds": variants or baseline, "baselines": baselines}
    if is_shape:
        chosen |= {"taus": of_shape.tau, "tokens": of_shape.tokens, "tree": of_shape.tree, "drafters": of_shape.drafter}
    else:
        prompts = None if of_model.prompts_file is None else read_prompts(of_model.prompts_file)
        chosen |= {"model": of_model.model, "methods": of_model.methods, "prompts": prompts, "batches": batch}
        chosen |= {"sampling": distribution.given(), "seed": seed, "rounding": rounding}
    given = {name: value for name, value in chosen.items() if value}  # others have the defaults of the measurement
    given |= {"images": images, "device": machine.device, "is_quiet": machine.quiet}
    runs: list[Callable[[], dict[str, Any]]] = [
        partial(shapes.measure, shapes.ShapeOptions(shape=shape, batch=size, **given))
        for shape, size in product(of_shape.shape or (), batch)
    ] or [partial(measure, BenchOptions(**given))]
    found: list[dict[str, Any]] = []
    try:
        for run in runs:
            found.append(run())
    except KeyboardInterrupt as stop:
        if found := [*found, *([stop.found] if isinstance(stop, CutShort) else [])]:
            _report(found, out, is_json=json)
        raise (stop.__cause__ or stop) from None
    return _report(found, out, is_json=json)


def _report(found: Sequence[dict[str, Any]], out: Path | None, *, is_json: bool) -> int:
    """Print and write the figures; return 1 if an exact method did not give plain decoding's tokens."""
    from lantern.eval.speed.bench import render

    print("\n\n".join(map(render, found)), file=sys.stderr if is_json else sys.stdout)
    result = found[0] if len(found) == 1 else {"what": "shapes", "shapes": found}
    line = dumps(result, ensure_ascii=False, allow_nan=False)
    if is_json:
        print(line)
    if out is not None:
        from lantern.core.io import write_text

        write_text(out, f"{line}\n")
    broken = [text for one in found for text in one.get("failures", ())]
    if broken:
        complain("; ".join(broken))
    return FAILED if broken else DONE


COMMAND = command(bench)
