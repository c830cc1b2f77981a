"""Jacobi coupling: every token of a window is resampled at each step, coupled so that it rarely changes."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import pad

from lantern.core.sampling import Noise, pick, probabilities
from lantern.core.types import Cost, DraftTree, Rows, Verdict
from lantern.verifiers.rejection import cost_of, normalised
from lantern.verifiers.relaxations.rule import Acceptance, UnderTest


@dataclass(frozen=True)
class CouplingVerifier:
    """Keep token x with probability min(1, p(x) / q(x)), else sample from norm(max(p - q, 0)), at all places at once.

    The result is a sample of p that differs from x with the smallest possible probability (maximal coupling). The
    tokens up to the first change are committed. The tokens behind it are drafts for the next step, and their
    distribution is now p, whether they changed or not. With `redraw` "coupled" they come from the same test
    (arXiv:2510.24211); with "independent" they are sampled from p again, as in speculative Jacobi decoding
    (arXiv:2410.01699, algorithm 1). With "reuse" a token with p(x) > `reuse` q(x) stays, and others are sampled from p
    again (SJD++, arXiv:2512.07503). Their distribution is then r = q where p > `reuse` q, plus p times the rest of q.
    It is recorded: the next test is exact.

        window  a b c d        p of what follows each, at the root and at a, b, c, d
        kept    a b . d        the tests at the root and at a pass, the test at b fails: x replaces c
        sampled a b x d e      committed: a b x; leftovers d (or its redraw) and e, sampled from the row of d

    The test at a place reads no token behind it, and its uniforms are used in one step only. Given all tokens before it
    and their history, a token therefore follows its recorded distribution, as the next test requires. A tree must be a
    chain in node order, with log q.

    `relaxation` replaces the test and what a rejection leaves, as in grouped speculative decoding (GSD,
    arXiv:2508.07747). It needs `redraw` "independent": tokens behind the first change are then samples of p itself,
    which is the q of their next test. The reported total variation of a token is that of its test,
    `lantern.verifiers.rejection.cost_of`. ValueError for a relaxation that it cannot test.
    """

    redraw: Literal["coupled", "independent", "reuse"] = "coupled"
    relaxation: Acceptance | None = None
    modes = frozenset({"jacobi"})
    reuse: float | int = 0.5

    def __post_init__(self) -> None:
        if self.redraw not in ("coupled", "independent", "reuse"):
            raise ValueError(f'redraw is "{self.redraw}", wanted "coupled", "independent" or "reuse"')
        if self.relaxation is None:
            return
        name = type(self.relaxation).__name__
        if not isinstance(self.relaxation, Acceptance):
            raise ValueError(f"{name} relaxes distributions: use RelaxedVerifier({name}(...), CouplingVerifier())")
        if self.redraw != "independent" or not self.modes <= self.relaxation.modes:
            raise ValueError(f'{name} cannot test windows with redraw "{self.redraw}"')

    @property
    def is_exact(self) -> bool:
        """Whether tokens follow the target's own distribution."""
        return self.relaxation is None

    def verify(self, tree: DraftTree, rows: Rows, noise: Noise) -> Verdict:
        """Sample what follows every node; commit up to the first sample that is not the node's child.

        ValueError for a window without log q.
        """
        log_p = rows.log_p()
        p, tokens = probabilities(log_p), tree.tokens[:, 1:]
        # Every step decides at least one token, so the number of the first undecided token identifies the step.
        uniforms = noise.uniform(rows.places, 2, iterations=rows.places[:, 0])
        if tree.log_q is None and tree.shape.depth > 0:
            raise ValueError("the window has no log q, which coupling reads: set keeps_distributions=True")
        q = p if tree.log_q is None else probabilities(tree.log_q)
        trial = UnderTest(p[:, :-1].flatten(0, 1), q[:, :-1].flatten(0, 1), tokens.flatten(), is_point=False)
        threshold = uniforms[:, :-1, 0] * trial.own_q.view(tokens.shape)
        ruling = self.relaxation.judge(trial) if self.relaxation is not None else None
        mass = trial.own_p if ruling is None else ruling.mass
        is_kept = threshold < mass.view(tokens.shape)
        is_before = is_kept.cumprod(1).bool()
        length = is_before.sum(1)
        steps = torch.arange(p.shape[1], device=length.device)
        is_behind = steps > length[:, None]
        is_fresh = (steps == steps[-1]) | (is_behind & (self.redraw != "coupled"))
        above, cost = (p - q).clamp_(min=0.0), None
        if ruling is not None:
            refused = normalised(ruling.left, trial.p)
            above[:, :-1] = refused.view_as(above[:, :-1])
            spent, moved = cost_of(trial, ruling, refused)
            is_relaxed = ~(threshold < trial.own_p.view(tokens.shape))
            distance = None if moved is None else pad(moved.view(tokens.shape), (0, 1))
            cost = Cost(is_relaxed.float(), pad(spent.view(tokens.shape), (0, 1)), distance)
        # by rounding: then the sample is of p
        is_empty = ~(above.sum(-1) > 0)
        sampled = pick(torch.where((is_fresh | is_empty)[..., None], p, above), uniforms[..., 1])
        if self.redraw == "reuse":  # r of the tokens behind the first change that stay or are sampled again
            kept = torch.where(p > self.reuse * q, q, 0.0)
            log_r = (kept + (q - kept).sum(-1, keepdim=True) * p).log()
            log_p = torch.where((is_behind & (steps < steps[-1]))[..., None], log_r, log_p)
            stays = (trial.own_p > self.reuse * trial.own_q).view(tokens.shape)
            is_kept = is_before | (stays & is_behind[:, :-1])
        is_kept = is_before if self.redraw == "independent" else is_kept
        sampled[:, :-1] = torch.where(is_kept, tokens, sampled[:, :-1])
        path = torch.where(is_before, steps[1:], 0)
        return Verdict(path, length, sampled.gather(1, length[:, None])[:, 0], sampled, log_p, cost)
