"""A race: contenders make the same images in interleaved rounds, one record each; what their seconds claim, and the
least seconds that reading takes.

A record is a JSON object, a line of a leaderboard's file, with one line of figures for each image:

    {"round": 0, "contender": "eagle1 | cpu bf16", "temperature": 1.0, "seconds": 0.1, "images": [{"steps": 120, ...}]}
"""

import base64
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from lantern.core.config import KvCache
from lantern.core.types import Step
from lantern.core.weights import original
from lantern.decoding.loop import PATIENCE
from lantern.decoding.statistics import median_interval, now, run_times
from lantern.eval.json_lines import Line
from lantern.eval.speed.contenders import Contender, RoundImages
from lantern.eval.speed.surroundings import load_average

Report = Callable[[str], object]
WARM_UP_PASSES = 6
ENOUGH_ROUNDS = 10
STEADY = 1.5  # largest p90 / p10 of a valid claim; above it the machine was too busy
COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
REPEATS = 9
LINES = 256  # of a large product
TABLES = ("tok_embeddings.", "cls_embedding.")  # of which a pass reads only a few rows


class CutShort(KeyboardInterrupt):
    """Ends a measurement by a signal, its cause; `found` is what the whole rounds before it gave."""

    def __init__(self, found: Any) -> None:
        super().__init__("interrupted")
        self.found = found


def race(
    field: Sequence[Contender],
    jobs: Sequence[RoundImages],
    take: Callable[[Contender, int, RoundImages], Line],
    *,
    wants: Callable[[Contender, int], bool] = lambda contender, number: True,
    report: Report = lambda text: None,
) -> Iterator[Line]:
    """Yield what `take` returns for each contender, round by round; a round makes the images of one job.

    Interleaving spreads slow phases of the machine over all contenders, in rotated order. `wants` leaves some out.
    """
    began, whole = time.monotonic(), 0
    for number, job in enumerate(jobs):
        those = [one for one in field if wants(one, number)]
        for place in range(len(those)):
            yield take(those[(number + place) % len(those)], number, job)
        if those:
            whole += 1
            left = (time.monotonic() - began) / whole * (len(jobs) - number - 1)
            report(f"round {number + 1} of {len(jobs)}" + (f", {left / 60:.1f} minutes left" if left else ""))


def collect(records: Iterator[Line], contenders: int) -> tuple[list[Line], KeyboardInterrupt | None]:
    """Return all records, or after a signal those of the whole rounds and the signal; it is raised in the first."""
    found: list[Line] = []
    try:
        found.extend(records)
    except KeyboardInterrupt as stop:
        if len(found) < contenders:
            raise
        return found[: len(found) // contenders * contenders], stop
    return found, None


def take(contender: Contender, number: int, job: RoundImages, *, watches: bool = False) -> Line:
    """Decode a job and return its record; total variation and relaxed are sums over the tokens of an image.

    With `watches` nodes and tokens of steps are counted, in a second, untimed decoding where counting costs time.
    """
    steps, device = list[tuple[Tensor, Tensor, int]](), contender.device

    def watch(step: Step) -> None:
        nodes = 0 if step.tree is None else step.tree.shape.num_nodes - 1
        steps.append((step.start.clone(), step.counts.clone(), nodes))

    # an engine may take several rounds at once, so that watching single steps costs time
    drafter = contender.parts.drafter
    is_drafted = drafter is not None and (drafter.window is not None or drafter.plan is not None)
    has_rounds = contender.is_plain or is_drafted
    is_fused = contender.variant.kind.startswith("cpu") and has_rounds
    load, begin = load_average(), now(device)
    made = contender.decode(job, **({"callback": watch} if watches and not is_fused else {}))
    seconds = now(device) - begin
    if watches and is_fused and not contender.is_plain:
        contender.decode(job, callback=watch)
    return {
        "round": number,
        "contender": contender.name,
        "window": contender.parts.method.settings.get("window"),
        "temperature": contender.parts.sampling.temperature,
        "seconds": seconds,
        "images": [
            {
                "steps": int(made.steps[image]),
                "total_variation": float(made.total_variation[image]),
                "relaxed": float(made.relaxed[image]),
                "tokens": pack(made.tokens[image]),
                **runs_of(steps, image),
            }
            for image in range(len(job.keys))
        ],
        "load": load,
    }


def reporter(is_quiet: bool) -> Report:
    """Return a function that prints a line to stderr, or nothing."""
    return (lambda text: None) if is_quiet else (lambda text: print(text, file=sys.stderr, flush=True))


def first_passes(contender: Contender, job: RoundImages) -> list[float]:
    """Decode the first passes of a job; return the time after each, the prompt's first."""
    times: list[float] = []

    def is_enough(step: Step) -> bool:
        times.append(now(contender.device))
        return step.index >= WARM_UP_PASSES

    contender.decode(job, callback=is_enough)
    return times


def pass_seconds(contender: Contender, job: RoundImages) -> float:
    """Return the mean seconds of the first few passes after the prompt."""
    times = first_passes(contender, job)
    return (times[-1] - times[0]) / max(len(times) - 1, 1)


def warm(contender: Contender, jobs: Sequence[RoundImages]) -> None:
    """Decode the first job fully and start every other one, since each new shape may trigger compilation."""
    contender.decode(jobs[0])
    for job in jobs[1:]:
        first_passes(contender, job)


def runs_of(steps: Sequence[tuple[Tensor, Tensor, int]], number: int) -> Line:
    """Return for image `number` the tokens of each step, and the sum of the nodes that were verified.

    `steps` has first places, counts of tokens, and nodes. Empty if not watched, or if tokens are not made in order.
    """
    own = [(int(start[number]), int(counts[number]), nodes) for start, counts, nodes in steps]
    own = [one for one in own if one[1]]  # others of the batch may take more steps
    runs = [counts for _, counts, _ in own]
    if not runs or [start for start, _, _ in own] != [0, *itertools.accumulate(runs[:-1])]:
        return {}
    return {"runs": " ".join(map(str, runs)), "nodes": sum(nodes for _, _, nodes in own)}


def pack(tokens: Int[Tensor, " n"]) -> str:
    """Encode tokens as text: base64 of 32-bit little-endian numbers."""
    return base64.b64encode(tokens.cpu().numpy().astype("<u4").tobytes()).decode("ascii")


def unpack(texts: Sequence[str]) -> Int[Tensor, "b n"]:
    """Decode the tokens of several images from the text of `pack`."""
    rows = [np.frombuffer(base64.b64decode(text), dtype="<u4").astype(np.int64) for text in texts]
    return torch.from_numpy(np.stack(rows))


def rounds_of(lines: Sequence[Line], name: str) -> dict[int, Line]:
    """Return the records of a contender at one temperature by round, in order."""
    found = {line["round"]: line for line in lines if line.get("contender") == name}
    return dict(sorted(found.items()))


def paired(lines: Sequence[Line], name: str, other: str) -> list[tuple[Line, Line]]:
    """Return the records of the rounds that two contenders made, in order."""
    mine, its = rounds_of(lines, name), rounds_of(lines, other)
    return [(mine[number], its[number]) for number in mine if number in its]


def images_of(lines: Sequence[Line], name: str) -> list[Line]:
    """Return the records of a contender's images, in order."""
    return [image for line in rounds_of(lines, name).values() for image in line["images"]]


def seconds_of(lines: Sequence[Line], name: str) -> list[float]:
    """Return the seconds of a contender's rounds, in order."""
    return [line["seconds"] for line in rounds_of(lines, name).values()]


def identity(lines: Sequence[Line], name: str, plain: str) -> dict[str, int]:
    """Count images and tokens that differ from plain decoding, over the rounds that both made."""
    sides = zip(*paired(lines, name, plain), strict=True)
    tokens = (unpack([image["tokens"] for line in side for image in line["images"]]) for side in sides)
    differing = torch.ne(*tokens).sum(1)
    return {"differing_images": int((differing > 0).sum()), "differing_tokens": int(differing.sum())}


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, tenth and ninetieth percentile of one or more runs, for JSON."""
    found = zip(("median", "p10", "p90"), np.quantile(seconds, (0.5, 0.1, 0.9)), strict=True)
    return {name: rounded(value) for name, value in found}


def compare(baseline: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Compare seconds of the same rounds with plain decoding's, for JSON.

    `median_of_ratios` is the speedup over the baseline within a round, with its `median_interval`;
    `ratio_of_medians` does without rounds. `refusal` is why no claim is made, or None; `claim` is then None.
    """
    ratios = [before / max(after, 1e-12) for before, after in zip(baseline, other, strict=True)]
    of_medians, of_ratios, why = rounded(median(baseline) / max(median(other), 1e-12)), rounded(median(ratios)), None
    (low, high), times = median_interval(ratios), spread(baseline)
    width = times["p90"] / max(times["p10"], 1e-12)  # 1 on a quiet machine: plain decoding makes all images alike
    if len(ratios) < ENOUGH_ROUNDS:
        why = f"no claim: {len(ratios)} rounds, wanted at least {ENOUGH_ROUNDS}"
    elif width > STEADY:
        why = f"no claim: p90/p10 is {width:.1f} for the baseline, wanted at most {STEADY}"
    elif low <= 1 <= high:
        why = f"no claim: the 95 % interval by rounds, {low:.2f} to {high:.2f}, contains 1"
    ends = {"median_of_ratios": of_ratios, "interval_95": [rounded(low), rounded(high)]}
    return {"ratio_of_medians": of_medians, **ends, "claim": None if why else of_ratios, "refusal": why}


def rounded(value: float) -> float:
    """Round to five significant digits, as JSON results have them."""
    return float(f"{value:.5g}")


def phases(best: Sequence[Contender], job: RoundImages, steps: Mapping[str, int] | None = None) -> Iterator[Line]:
    """Yield the shares of each method's time by phase without prefill, of all steps or so many, in a run of its own."""
    for one in best:
        ends: Any = None if steps is None else lambda step, last=steps[one.label]: step.index >= last
        seconds = one.decode(job, is_timed=True, callback=ends, interval=PATIENCE).seconds
        whole = sum(seconds.values()) - seconds.get("prefill", 0.0)
        shares = {name: rounded(value / whole) for name, value in seconds.items() if name != "prefill"}
        yield {"method": one.label, "variant": str(one.variant), "shares": shares}


def best_of_labels(contenders: Sequence[Contender], lines: Sequence[Line]) -> list[Contender]:
    """Return the variant of each label with the smallest median, in the order of labels."""
    slowest_first = sorted(contenders, key=lambda one: -median(seconds_of(lines, one.name)))
    best = {one.label: one for one in slowest_first}
    return [best[label] for label in dict.fromkeys(one.label for one in contenders)]


def results(contenders: Sequence[Contender], lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Compare every method in its fastest variant with plain decoding, which comes first, in its fastest."""
    plain, *best = best_of_labels(contenders, lines)
    before = seconds_of(lines, plain.name)
    return [
        {"method": one.label, "variant": str(one.variant), "baseline": str(plain.variant)}
        | compare(before, seconds_of(lines, one.name))
        for one in best
    ]


def copy_bandwidth(device: torch.device) -> float:
    """Return the bandwidth in GB/s (read and written bytes) of copying a tensor larger than any cache."""
    count = COPY_BYTES.get(device.type, 1 << 28)
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = run_times(lambda: target.copy_(source), device, REPEATS)
    return 2 * count / median(seconds[1:]) / 1e9


def pass_bytes(target: nn.Module, *, rows: int, cached: int, nodes: int = 1, kv_cache: KvCache = "full") -> int:
    """Return the bytes of a pass: weights without tables, and keys and values of `cached` slots, fp32 on every CPU."""
    config: Any = target.config
    weights = sum(value.nbytes for name, value in target.named_parameters() if not name.startswith(TABLES))
    norm = target.get_parameter("norm.weight")
    width = 1 if kv_cache == "fp8" else 4 if norm.device.type == "cpu" else norm.dtype.itemsize
    return weights + 2 * config.n_layer * rows * (cached + nodes) * config.dim * width


def product_rate(contender: Contender) -> float:
    """Return how many multiplications the target's head makes in a second over LINES inputs, in its engine."""
    target = contender.parts.target
    weight = target.tok_embeddings.weight
    inputs = torch.ones(1, LINES, target.config.dim, dtype=weight.dtype, device=weight.device)
    seconds = run_times(lambda: target.head(inputs), weight.device, REPEATS)
    return LINES * target.config.dim * target.config.vocab_size / min(seconds)


def pass_products(target: nn.Module, *, rows: int, cached: int, nodes: int = 1) -> int:
    """Return the multiplications of a pass: of the linear layers, and with keys and values of `cached` slots."""
    config: Any = target.config
    named = [(name, value) for name, value in target.named_parameters() if not name.startswith(TABLES)]
    linear = sum(value.numel() for _, value in named if value.ndim == 2)
    return rows * nodes * (linear + 2 * config.n_layer * (cached + nodes) * config.dim)


def roofline(contender: Contender, *, rows: int, copy_gbps: float, step_seconds: float) -> dict[str, float]:
    """Return the least milliseconds of a pass (`floor_ms`), and the shares of a step's time of this (`roofline`) and of
    the pass's products at the rate of a large one (`arithmetic`), for JSON.

    A pass must at least read the weights and, on average over an image, half of the keys and values; at the bandwidth
    of a copy this takes `floor_ms`. Weights that stay in a processor's cache can be read faster, and the share then
    exceeds 1. The step's time includes drafting and verification. Empty for a target that is not LlamaGen's.
    """
    target, drafter = original(contender.parts.target), contender.parts.drafter
    if not isinstance(target, nn.Module) or "norm.weight" not in dict(target.named_parameters()):
        return {}
    sizes: dict[str, Any] = {"rows": rows, "nodes": 1 if drafter is None else drafter.max_nodes}
    sizes["cached"] = contender.parts.target.config.block_size // 2
    seconds = pass_bytes(target, **sizes, kv_cache=contender.parts.engine.kv_cache) / copy_gbps / 1e9
    shares = {"roofline": seconds, "arithmetic": pass_products(target, **sizes) / product_rate(contender)}
    step = max(step_seconds, 1e-12)
    return {"floor_ms": rounded(1e3 * seconds)} | {name: rounded(of / step) for name, of in shares.items()}
