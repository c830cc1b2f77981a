"""Relaxed rules enumerated at one node: the emitted distribution, exactly, for small random distributions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int32
from scipy.optimize import linprog
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

RULES: dict[str, Callable[["Case"], Any]] = {
    "bounded 0.1": lambda case: Bounded(case.table, k=8, delta=0.1),
    "bounded 0.2": lambda case: Bounded(case.table, k=8, delta=0.2),
    "lantern 0.05": lambda case: Lantern(case.table, k=8, delta=0.05),
    "lantern 0.2": lambda case: Lantern(case.table, k=8, delta=0.2),
    "lantern++ 2": lambda case: LanternPP(case.table, k=8, lambda_=2.0),
    "lantern++ 5": lambda case: LanternPP(case.table, k=8, lambda_=5.0),
    "cool 1.1": lambda case: Cool(omega=1.1),
    "cool 2": lambda case: Cool(omega=2.0),
    "grouped": lambda case: Grouped(case.codebook, d_radius=1.0),
    "tolerance 2": lambda case: Tolerance(2),
    "tolerance 4": lambda case: Tolerance(4),
}


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


def max_flow(supply: Sequence[float], demand: Sequence[float], pairs: Sequence[tuple[int, int]]) -> float:
    """Return the largest flow over `pairs` (y, x) within the supply of each y and the demand of each x."""
    if not pairs:
        return 0.0
    limits = np.zeros((len(supply) + len(demand), len(pairs)))
    for column, (y, x) in enumerate(pairs):
        limits[y, column] = limits[len(supply) + x, column] = 1
    return -linprog(-np.ones(len(pairs)), limits, [*supply, *demand]).fun
