"""Drafters, verifiers and relaxations of other packages that return what is none: each is refused in one line."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import pad

from lantern.core.sampling import Sampling
from lantern.core.types import DraftTree, TreeShape, Verdict
from lantern.decoding.checked import check_shape
from lantern.drafters.lookup import RepeatDrafter
from lantern.generation.generator import build_decoder
from lantern.methods import METHODS, find
from lantern.methods.method import Made, lazy, method
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.relaxations.rule import Acceptance, Relaxation, Relaxed, Ruling, UnderTest
from tests.refusals import refused
from tests.tiny_decoder import CONDITION, KEYS, TARGET, tiny_condition, tiny_decoder

CHANGES: dict[str, Callable[..., Any]] = {}  # of what a part of "wrong" returns
VOCAB = TARGET.config.vocab_size


class Guess(RepeatDrafter):
    """Repeats the last token, with a flat log q, undefined at the leaf."""

    def propose(self) -> DraftTree:
        tree = super().propose()
        flat = torch.full((*tree.tokens.shape, VOCAB), 1 / VOCAB).log()
        flat[:, -1] = torch.nan
        return CHANGES.get("tree", lambda tree: tree)(replace(tree, log_q=flat))


class Match(GumbelVerifier):
    def verify(self, *of: Any) -> Verdict:
        return CHANGES.get("verdict", lambda verdict: verdict)(super().verify(*of))


class Keep(Relaxation):
    def relax(self, log_p: torch.Tensor, log_q: torch.Tensor, **where: Any) -> Relaxed:
        zeros = log_p.new_zeros(len(log_p))
        return CHANGES.get("relaxed", lambda relaxed: relaxed)(Relaxed(log_p, zeros))


class Claim(Acceptance):
    def judge(self, trial: UnderTest) -> Ruling:
        ruling = Ruling(trial.own_p, (trial.p - trial.q).clamp(min=0))
        return CHANGES.get("ruling", lambda ruling: ruling)(ruling)


@pytest.fixture(autouse=True)
def _wrong() -> Iterator[None]:
    guess, match, keep, claim = lazy(__name__, "Guess", "Match", "Keep", "Claim")
    rejection = lazy("lantern.verifiers.rejection", "RejectionVerifier")
    relaxed = lazy("lantern.verifiers.relaxed", "RelaxedVerifier")
    # drafts that are repeated, a relaxation that changes nothing, and a rule that relaxes nothing, with faults
    verifiers = {"wrong": match(), "wrong-relaxed": relaxed(keep(), rejection()), "wrong-accepted": rejection(claim())}
    with patch.dict(METHODS), patch.dict(CHANGES):
        for name, verifier in verifiers.items():
            method(name=name)(lambda m, verifier=verifier: (guess(m.target, length=3, side="left"), verifier))
        yield


def decoded(name: str) -> torch.Tensor:
    decoder = build_decoder(find(name), TARGET, sampling=Sampling(guidance=3))
    return decoder.generate(tiny_condition((4, 2)), keys=KEYS[:2]).tokens


def new(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what replaces parts of a tree, a verdict or a relaxation by functions of them."""
    return lambda made: replace(made, **{name: change(vars(made)[name]) for name, change in changes.items()})


def shaped(**changes: Any) -> Callable[[DraftTree], DraftTree]:
    return new(shape=lambda shape: replace(shape, **changes))


ONES = torch.ones(4, 4, dtype=torch.bool)
TREES: dict[str, Callable[[DraftTree], Any]] = {
    "proposed a NoneType, wanted a DraftTree": lambda tree: None,
    r"tokens that are int64 \[1, 4\] cpu, wanted int64 \[2, 4\] cpu": new(tokens=lambda tokens: tokens[:1]),
    r"tokens that are float32 \[2, 4\]": new(tokens=torch.Tensor.float),
    r"tokens that are int64 \[4\]": new(tokens=lambda tokens: tokens[0]),
    'drafted in mode "sampled", wanted its own, "point"': new(mode=lambda _: "sampled"),
    f"drafted token {VOCAB}, wanted 0 to {VOCAB - 1}": new(tokens=lambda x: x.index_fill(1, torch.tensor(2), VOCAB)),
    "has token [0-9]+ at node 0, wanted the last committed one": new(tokens=lambda tokens: (tokens + 1) % VOCAB),
    r"with parents \[0, 2, 1, 2\], wanted 0 for the root": shaped(parents=torch.tensor([0, 2, 1, 2])),
    "whose ancestors are not those": shaped(ancestors=ONES),
    "whose depths and widths are not": shaped(depths=torch.tensor([0, 1, 1, 1])),
    "depths and widths are not": shaped(widths=(1, 1)),
    r"log q of float32 \[2, 4, 5\]": new(log_q=lambda log_q: log_q[..., :5]),
    "log q whose probabilities sum to nan": new(log_q=lambda log_q: log_q * torch.nan),
    "log q whose probabilities sum to 7.389": new(log_q=lambda log_q: log_q + 2),
}
VERDICTS: dict[str, Callable[[Verdict], Any]] = {
    "returned a NoneType, wanted a Verdict": lambda verdict: None,
    r"next_token that is float32 \[2\], wanted int64": new(next_token=torch.Tensor.float),
    r"length that is int64 \[1\]": new(length=lambda length: length[:1]),
    "path of [0-9]+ nodes, wanted at most 3": new(path=lambda path: pad(path, (0, 9))),
    "nodes of a path of": new(length=lambda length: length + 9),
    "path that is none of the tree": lambda verdict: replace(
        verdict, path=torch.zeros_like(verdict.path), length=torch.full_like(verdict.length, verdict.path.shape[1])
    ),
    f"wanted 0 to {VOCAB - 1}": new(next_token=lambda token: token - VOCAB),
}
RELAXED: dict[str, Callable[[Relaxed], Relaxed]] = {
    "log r whose probabilities sum to nan": new(log_r=lambda log_r: log_r * torch.nan),
    "log r whose probabilities sum to 2.718": new(log_r=lambda log_r: log_r + 1),
    "result that is no Relaxed of [0-9]+ nodes and": new(log_r=lambda log_r: log_r[:0]),
    "total variation that is not that of r and p": new(total_variation=lambda spent: spent + 0.1),
}
RULINGS: dict[str, Callable[[Ruling], Any]] = {
    "no Ruling with a mass": lambda _: None,
    f"no Ruling .* and a row of {VOCAB} for each": new(left=lambda left: left[:, :5]),
    "a mass that is negative": new(mass=lambda mass: mass - 2),
    "what is left that is negative or not finite": new(left=lambda left: left * torch.nan),
}


def test_right_parts_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(decoded("wrong"), decoded("plain"))
    relaxed = {name: decoded(name) for name in ("wrong-relaxed", "wrong-accepted")}
    monkeypatch.setattr(Made, "has_foreign", False)
    for name, tokens in relaxed.items():
        assert torch.equal(decoded(name), tokens)  # unchecked


@pytest.mark.parametrize(
    ("name", "top_k"), [*((name, 2) for name in METHODS), *((name, 0) for name in METHODS if not METHODS[name].exact)]
)
def test_no_method_of_the_catalogue_is_refused(name: str, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With parts of other packages the others are the catalogue's: dynamic trees, too few tokens for all children."""
    monkeypatch.setattr(Made, "has_foreign", True)
    decoder = tiny_decoder(find(name), TARGET, Sampling(guidance=3, top_k=top_k))
    assert decoder.generate(CONDITION.select([0, 1]), keys=KEYS[:2]).tokens.shape == (2, TARGET.config.block_size)


def test_a_pruned_tree_keeps_its_ranks() -> None:
    parents, ranks, depths = torch.tensor([0, 0, 1]), torch.tensor([0, 3, 0]), torch.arange(3)
    check_shape(TreeShape(parents, ranks, depths, ONES[:3, :3].tril(), (4, 4, 4)), "Guess")
    twins = TreeShape(torch.tensor([0, 0, 0]), ranks * 0, depths.clamp(max=1), torch.eye(3) + (depths == 0) > 0, (2,))
    refused(check_shape, twins, "Guess", match="Guess proposed a tree with siblings of equal ranks")


PARTS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("tree", "wrong", "Guess .*", TREES),
    ("verdict", "wrong", "Match .*", VERDICTS),
    ("relaxed", "wrong-relaxed", "Keep returned a ", RELAXED),
    ("ruling", "wrong-accepted", "Claim returned ", RULINGS),
]


@pytest.mark.parametrize(
    ("part", "name", "message", "change"),
    [(part, name, own + message, change) for part, name, own, table in PARTS for message, change in table.items()],
)
def test_wrong_parts_are_refused(part: str, name: str, message: str, change: Any) -> None:
    CHANGES[part] = change
    refused(decoded, name, match=message)


def test_a_verifier_that_is_not_exact_gives_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Match, "is_exact", False)
    refused(decoded, "wrong", match="Match returned no cost, wanted that of a relaxed test, or is_exact = True")
