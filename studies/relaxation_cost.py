"""`python -m studies.relaxation_cost`: total variation (TV) that relaxed rules realise, on random distributions.

Backs two statements of docs/notes/decoding.md and docs/methods/lantern.md: LANTERN's delta bounds one test, not the
distribution, and two rounds of proportional filling give `bounded` 93 to 99 % of the largest flow. Writes
eval/results/relaxation_cost.json.

All drafts, accepted or not, are enumerated, so the figures are exact for these distributions. Random codebooks have no
structure in common with p; in real distributions neighbours have similar probabilities and more mass can move.
"""

import argparse
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from lantern.core.types import Acceptance, Relaxation, Trial
from lantern.verifiers.rejection import cost_of, normalised
from lantern.verifiers.relaxations.bounded import Bounded
from lantern.verifiers.relaxations.cool import Cool
from lantern.verifiers.relaxations.grouped import Grouped
from lantern.verifiers.relaxations.lantern import Lantern
from lantern.verifiers.relaxations.lantern_pp import LanternPP
from lantern.verifiers.relaxations.neighbours import proximity_table
from lantern.verifiers.relaxations.tolerance import Tolerance

RESULTS = Path(__file__).resolve().parents[1] / "eval" / "results" / "relaxation_cost.json"
ENTROPIES = (1.0, 2.0, 3.0, 3.8)
ROUNDS = (1, 2, 3, 4)
CAP = 4.0
EPSILON = 1e-12


@dataclass(frozen=True)
class Case:
    """Distributions p of a target and q of a drafter, and a codebook with its proximity table."""

    p: Float[Tensor, " v"]
    q: Float[Tensor, " v"]
    codebook: Float[Tensor, "v d"]
    table: Int32[Tensor, "v k"]


@dataclass(frozen=True)
class Emitted:
    """The distribution emitted at a node, the probability that a draft is accepted, and the mean reported TV."""

    distribution: Float[Tensor, " v"]
    accepted: float
    reported: float


@dataclass(frozen=True)
class Rule:
    """A relaxation with settings: `make` builds it for a case, `nominal` is the mass that its settings name, if any."""

    name: str
    settings: Mapping[str, Any]
    make: Callable[[Case], Any]
    nominal: Callable[[Case], float | None]


def random_case(entropy: float, codes: int, generator: torch.Generator, noise: float = 1.0) -> Case:
    """Return p of a given entropy in nats, q with noise on the logits, and a random unit codebook."""
    raw = torch.randn(codes, generator=generator, dtype=torch.float64)
    low, high = 0.0, 200.0
    for _ in range(60):
        middle = (low + high) / 2
        flat = float(torch.special.entr((middle * raw).softmax(0)).sum()) > entropy
        low, high = (middle, high) if flat else (low, middle)
    logits = low * raw
    drafted = logits + noise * torch.randn(codes, generator=generator, dtype=torch.float64)
    codebook = torch.nn.functional.normalize(torch.randn(codes, 8, generator=generator, dtype=torch.float64), dim=1)
    return Case(logits.softmax(0), drafted.softmax(0), codebook, proximity_table(codebook, codes - 1))


def emitted(rule: Acceptance, case: Case, drafts: int) -> Emitted:
    """Enumerate the rejection verifier at one node with `drafts` siblings, sampled without replacement from q.

    Rules for point drafts get the most probable codes of q instead.
    """
    p, q, weight = case.p[None], case.q[None], torch.ones_like(case.p[:1])
    distribution, accepted, reported = torch.zeros_like(case.p), 0.0, 0.0
    is_point = rule.modes == frozenset({"point"})
    best = case.q.argsort(descending=True)
    for rank in range(drafts):
        codes = best[rank : rank + 1] if is_point else torch.arange(len(case.p))
        code = codes.repeat(len(p))
        each = len(codes)
        p, q, weight = (rows.repeat_interleave(each, 0) for rows in (p, q, weight))
        seen = torch.nn.functional.one_hot(code, len(case.p)).to(q) if is_point else q
        trial = Trial(p, seen, code, is_point)
        weight = weight * trial.own_q
        ruling = rule.judge(trial)
        chance = (ruling.mass / trial.own_q.clamp(min=1e-300)).clamp(max=1.0)
        distribution.scatter_add_(0, code, weight * chance)
        accepted += float((weight * chance).sum())
        left = normalised(ruling.left, p)
        reported += float((weight * cost_of(trial, ruling, left).total_variation).sum())
        weight = weight * (1.0 - chance)
        p, q = left, normalised(q.scatter(1, code[:, None], 0.0), q)
    return Emitted(distribution + weight @ p, accepted, reported)


def relaxed(rule: Relaxation, case: Case) -> Emitted:
    """Return the relaxed distribution r and the acceptance of one draft with it."""
    depths = torch.zeros(1, dtype=torch.long)
    found = rule.relax(case.p.log()[None], case.q.log()[None], depths=depths, levels=1)
    r = found.log_r[0].exp()
    return Emitted(r, float(torch.minimum(r, case.q).sum()), float(found.total_variation))


def rules() -> list[Rule]:
    """Return the published rules at their usual settings, and `bounded`."""

    def free(case: Case) -> None:
        return None

    made: list[Rule] = []
    for delta in (0.1, 0.2):
        settings = {"k": 8, "delta": delta}
        make = lambda case, settings=settings: Bounded(case.table, **settings)  # noqa: E731
        made.append(Rule("bounded", settings, make, lambda case, delta=delta: delta))
    for delta in (0.05, 0.1, 0.2):
        settings = {"k": 8, "delta": delta}
        make = lambda case, settings=settings: Lantern(case.table, **settings)  # noqa: E731
        made.append(Rule("lantern", settings, make, lambda case, delta=delta: delta))
    for factor in (2.0, 5.0):
        settings = {"k": 8, "lambda_": factor}
        make = lambda case, settings=settings: LanternPP(case.table, **settings)  # noqa: E731
        named = lambda case, factor=factor: float((((factor - 1) * case.p).clamp(max=1.0) * case.q).sum())  # noqa: E731
        made.append(Rule("lantern++", settings, make, named))
    for omega in (1.1, 2.0):
        settings = {"omega": omega}
        made.append(Rule("cool", settings, lambda case, omega=omega: Cool(omega=omega), free))
    made.append(
        Rule("grouped", {"group": 14, "d_radius": 1.0}, lambda case: Grouped(case.codebook, d_radius=1.0), free)
    )
    for samples in (2, 4):
        settings = {"samples": samples}
        made.append(Rule("tolerance", settings, lambda case, samples=samples: Tolerance(samples), free))
    return made


def row(rule: Rule, cases: Sequence[Case]) -> dict[str, Any]:
    """Return the figures of one rule over cases of one entropy."""
    exact = [float(torch.minimum(case.p, case.q).sum()) for case in cases]
    built = [rule.make(case) for case in cases]
    both = [
        [relaxed(one, case)] * 2 if hasattr(one, "relax") else [emitted(one, case, drafts) for drafts in (1, 2)]
        for one, case in zip(built, cases, strict=True)
    ]
    figures: dict[str, Any] = {"nominal": _mean([rule.nominal(case) for case in cases])}
    is_point = getattr(built[0], "modes", None) == frozenset({"point"})
    # an exact test accepts a point draft with probability p(x), others with the overlap of p and q
    base = [float(case.p[case.q.argmax()]) for case in cases] if is_point else exact
    figures["exact_acceptance"] = _mean(base)
    figures["acceptance"] = _mean([one[0].accepted for one in both])
    for name, i in (("one_draft", 0), ("two_drafts", 1)):
        spent = [float((one[i].distribution - case.p).abs().sum() / 2) for one, case in zip(both, cases, strict=True)]
        figures[name] = {
            "realised_mean": _mean(spent),
            "realised_max": round(max(spent), 5),
            "reported_mean": _mean([one[i].reported for one in both]),
        }
    return figures


def flow_shares(cases: Sequence[Case], k: int = 8) -> dict[str, float]:
    """Return the share of the largest flow that proportional filling reaches by round, with k neighbours."""
    most = 0.0
    for case in cases:
        supply = (case.p - case.q).clamp(min=0.0).tolist()
        demand = torch.minimum(case.q - case.p, (CAP - 1) * case.p).clamp(min=0.0).tolist()
        near = case.table[:, :k].tolist()
        most += max_flow(supply, demand, [(y, x) for x in range(len(near)) for y in near[x]])
    shares = {}
    for rounds in ROUNDS:
        found = 0.0
        for case in cases:
            rule = Bounded(case.table, k=k, delta=1.0, cap=CAP, rounds=rounds, width=len(case.p))
            found += relaxed(rule, case).reported
        shares[str(rounds)] = round(found / most, 5)
    return shares


def max_flow(supply: Sequence[float], demand: Sequence[float], pairs: Sequence[tuple[int, int]]) -> float:
    """Return the largest flow over `pairs` (y, x) within the supply of each y and the demand of each x.

    Edmonds and Karp (1972): shortest augmenting paths, for graphs of hundreds of codes.
    """
    givers, takers = len(supply), len(demand)
    source, sink = givers + takers, givers + takers + 1
    room: list[dict[int, float]] = [{} for _ in range(givers + takers + 2)]
    for y, x in pairs:
        if supply[y] > EPSILON and demand[x] > EPSILON:
            room[y][givers + x], room[givers + x][y] = float("inf"), 0.0
    for y in range(givers):
        room[source][y], room[y][source] = supply[y], 0.0
    for x in range(takers):
        room[givers + x][sink], room[sink][givers + x] = demand[x], 0.0
    total = 0.0
    while path := _shortest(room, source, sink):
        amount = min(room[a][b] for a, b in path)
        for a, b in path:
            room[a][b] -= amount
            room[b][a] += amount
        total += amount
    return total


def _shortest(room: list[dict[int, float]], source: int, sink: int) -> list[tuple[int, int]]:
    """Return the edges of a shortest path with remaining capacity; empty if there is none."""
    before = {source: source}
    pending = deque([source])
    while pending and sink not in before:
        node = pending.popleft()
        for other, left in room[node].items():
            if left > EPSILON and other not in before:
                before[other] = node
                pending.append(other)
    if sink not in before:
        return []
    path, node = [], sink
    while node != source:
        path.append((before[node], node))
        node = before[node]
    return path


def table(codes: int = 64, cases: int = 12, seed: int = 0, entropies: Sequence[float] = ENTROPIES) -> dict[str, Any]:
    """Return all figures; deterministic."""
    generator = torch.Generator().manual_seed(seed)
    sampled = {entropy: [random_case(entropy, codes, generator) for _ in range(cases)] for entropy in entropies}
    return {
        "codes": codes,
        "cases": cases,
        "seed": seed,
        "entropies": list(entropies),
        "distance_of_distributions": [_mean([_overlap(case) for case in sampled[entropy]]) for entropy in entropies],
        "rules": [
            {"name": rule.name, "settings": dict(rule.settings), "rows": [row(rule, sampled[e]) for e in entropies]}
            for rule in rules()
        ],
        "share_of_largest_flow_by_rounds": {f"{e:g}": flow_shares(sampled[e]) for e in entropies},
    }


def lines(figures: Mapping[str, Any]) -> list[str]:
    """Return the figures as a text table."""
    head = f"{'rule':<28}{'nats':>5}{'named':>8}{'accepts':>9}{'exact':>7}"
    head += f"{'1 draft':>9}{'max':>7}{'report':>7}{'2 drafts':>10}{'max':>7}{'report':>7}"
    out = ["total variation of the emitted distribution to p, enumerated", head]
    for rule in figures["rules"]:
        label = rule["name"] + " " + " ".join(f"{name}={value:g}" for name, value in rule["settings"].items())
        for entropy, found in zip(figures["entropies"], rule["rows"], strict=True):
            named = "-" if found["nominal"] is None else f"{found['nominal']:.3f}"
            line = f"{label:<28}{entropy:>5g}{named:>8}{found['acceptance']:>9.3f}{found['exact_acceptance']:>7.3f}"
            for name, width in (("one_draft", 9), ("two_drafts", 10)):
                one = found[name]
                line += f"{one['realised_mean']:>{width}.3f}{one['realised_max']:>7.3f}{one['reported_mean']:>7.3f}"
            out.append(line)
    out.append("share of the largest flow that `bounded` moves, by rounds:")
    for entropy, shares in figures["share_of_largest_flow_by_rounds"].items():
        out.append(f"  {entropy:>4} nats  " + "  ".join(f"{rounds}: {share:.4f}" for rounds, share in shares.items()))
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table and write it as JSON."""
    from lantern.core.io import write_json
    from lantern.eval.speed.surroundings import surroundings

    parser = argparse.ArgumentParser(prog="python -m studies.relaxation_cost", description=__doc__)
    parser.add_argument("--codes", type=int, default=64, help="codes of a distribution (default 64)")
    parser.add_argument("--cases", type=int, default=12, help="distributions per entropy (default 12)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE")
    args = parser.parse_args(argv)
    figures = table(args.codes, args.cases, args.seed)
    print("\n".join(lines(figures)))
    write_json(args.out, figures | {"surroundings": surroundings(torch.device("cpu"))})


def _overlap(case: Case) -> float:
    return float((case.p - case.q).abs().sum() / 2)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(math.fsum(known) / len(known), 5) if known else None


if __name__ == "__main__":
    main()
