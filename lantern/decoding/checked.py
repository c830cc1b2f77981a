"""Generations with a drafter, verifier or relaxation of another package: what these return is checked in each step."""

from copy import copy
from typing import Any

import torch
from torch import Tensor

from lantern.core.types import DraftTree, TreeShape, Verdict, Verifier, ancestors_of
from lantern.decoding.loop import State
from lantern.verifiers.relaxations.rule import Acceptance, Relaxation, Relaxed, Ruling, UnderTest
from lantern.verifiers.relaxed import RelaxedVerifier

MOST_OFF = 1e-2  # by which a sum of probabilities may differ from 1


class CheckedState(State):
    """A state that looks at trees, verdicts and relaxed distributions before they are used, which needs the host.

    ValueError, one line with the class that was wrong.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        if isinstance(self.verifier, RelaxedVerifier):
            checked = CheckedRelaxation(self.verifier.relaxation)
            self.verifier = copy(self.verifier)
            object.__setattr__(self.verifier, "relaxation", checked)  # a subclass may have other arguments
        elif isinstance(rule := vars(self.verifier).get("relaxation"), Acceptance):
            self.verifier = copy(self.verifier)
            object.__setattr__(self.verifier, "relaxation", checked_acceptance(rule))
        self.checked_shape: TreeShape | None = None

    def propose(self) -> DraftTree:
        """Return the drafter's tree; ValueError for one that cannot be verified."""
        tree, drafter = super().propose(), self.drafter
        name, config = type(drafter).__name__, self.target.config
        if not isinstance(tree, DraftTree):
            raise ValueError(f"{name} proposed a {type(tree).__name__}, wanted a DraftTree")
        shape, tokens, device = tree.shape, tree.tokens, self.known.device
        wanted = torch.int64, [len(self.known), shape.num_nodes], device
        if (got := (tokens.dtype, list(tokens.shape), tokens.device)) != wanted:
            raise ValueError(f"{name} drafted tokens that are {described(got)}, wanted {described(wanted)}")
        if tree.mode != drafter.mode:
            raise ValueError(f'{name} drafted in mode "{tree.mode}", wanted its own, "{drafter.mode}"')
        nodes, depth = drafter.max_nodes, drafter.depth
        if shape.num_nodes > nodes or shape.depth > depth:
            got = f"{shape.num_nodes} nodes to depth {shape.depth}"
            raise ValueError(f"{name} drafted {got}, wanted at most {nodes} to depth {depth}")
        if shape.parents.device != device:
            raise ValueError(f"{name} proposed a tree on {shape.parents.device}, wanted {device}")
        if shape is not self.checked_shape:
            check_shape(shape, name)
            self.checked_shape = shape
        if (outside := tokens[(tokens < 0) | (tokens >= config.vocab_size)]).numel():
            raise ValueError(f"{name} drafted token {int(outside[0])}, wanted 0 to {config.vocab_size - 1}")
        roots = self.tokens.gather(1, self.known[:, None] - 1)[:, 0]
        is_wrong = (roots != tokens[:, 0]) & (self.known < self.count)
        if bool(is_wrong.any()):
            root, last = int(tokens[is_wrong, 0][0]), int(roots[is_wrong][0])
            raise ValueError(f"{name} has token {root} at node 0, wanted the last committed one, {last}")
        if shape.depth > 0:
            self._check_log_q(tree, name)
        return tree

    def _check_log_q(self, tree: DraftTree, name: str) -> None:
        if tree.log_q is None:
            if isinstance(self.verifier, RelaxedVerifier):
                raise ValueError(f"{name} records no log q, toward which a relaxation moves p")
            return
        wanted = torch.float32, [*tree.tokens.shape, self.target.config.vocab_size], tree.tokens.device
        if (got := (tree.log_q.dtype, list(tree.log_q.shape), tree.log_q.device)) != wanted:
            raise ValueError(f"{name} has log q of {described(got)}, wanted {described(wanted)}")
        inner = tree.shape.has_children.expand(tree.tokens.shape)
        check_sums(tree.log_q[inner], f"{name} has a log q")

    def verify(self, tree: DraftTree, *scores: Any) -> Verdict:
        """Return the verdict; ValueError for one that is none of this tree."""
        found, name = super().verify(tree, *scores), type(self.verifier).__name__
        if not isinstance(found, Verdict):
            raise ValueError(f"{name} returned a {type(found).__name__}, wanted a Verdict")
        images, tokens = len(self.known), self.target.config.vocab_size
        for what, axes in (("path", 2), ("length", 1), ("next_token", 1)):
            one: Tensor = vars(found)[what]
            if (one.dtype != torch.int64 and one.numel()) or one.ndim != axes or len(one) != images:
                got = described((one.dtype, list(one.shape)))
                raise ValueError(f"{name} returned a {what} that is {got}, wanted int64, {axes} axes, {images} images")
        if found.path.shape[1] > self.drafter.depth:
            depth = self.drafter.depth
            raise ValueError(f"{name} returned a path of {found.path.shape[1]} nodes, wanted at most {depth}")
        if bool(((found.length < 0) | (found.length > found.path.shape[1])).any()):
            raise ValueError(f"{name} kept {found.length.tolist()} nodes of a path of {found.path.shape[1]}")
        is_kept = torch.arange(found.path.shape[1], device=found.path.device) < found.length[:, None]
        nodes = found.walked.clamp(0, tree.shape.num_nodes - 1)
        parents = tree.shape.parents.expand(tree.tokens.shape).gather(1, nodes)[:, 1:]
        if bool((is_kept & ((parents != nodes[:, :-1]) | (nodes[:, 1:] != found.path) | (found.path == 0))).any()):
            raise ValueError(f"{name} returned a path that is none of the tree: {found.path.tolist()}"[:200])
        if bool(((found.next_token < 0) | (found.next_token >= tokens)).any()):
            raise ValueError(f"{name} returned the tokens {found.next_token.tolist()}, wanted 0 to {tokens - 1}"[:200])
        is_exact = isinstance(self.verifier, Verifier) and self.verifier.is_exact
        if found.cost is None and tree.shape.depth > 0 and not is_exact:
            raise ValueError(f"{name} returned no cost, wanted that of a relaxed test, or is_exact = True in its class")
        if found.cost is not None:
            spent = found.cost.total_variation
            is_tested = torch.arange(spent.shape[1], device=spent.device) <= found.length[:, None]
            if bool((is_tested & ~((spent >= -1e-4) & (spent < torch.inf))).any()):
                raise ValueError(f"{name} returned a total variation that is negative or not finite")
        return found


class CheckedRelaxation(Relaxation):
    """A relaxation, with a look at what it returns."""

    def __init__(self, inner: Relaxation) -> None:
        self.inner = inner

    def relax(self, log_p: Tensor, log_q: Tensor, **where: Any) -> Relaxed:
        """Return r; ValueError where it is no distribution, or its total variation from p is another."""
        found, name = self.inner.relax(log_p, log_q, **where), type(self.inner).__name__
        shapes = (found.log_r.shape, found.total_variation.shape) if isinstance(found, Relaxed) else None
        if shapes != (log_p.shape, log_p.shape[:1]):
            raise ValueError(
                f"{name} returned a result that is no Relaxed of {len(log_p)} nodes and {log_p.shape[1]} tokens"
            )
        is_inner = (log_q.float().logsumexp(-1).exp() - 1).abs() < MOST_OFF  # rows of leaves are undefined
        check_sums(found.log_r[is_inner], f"{name} returned a log r")
        spent = (found.log_r.exp() - log_p.exp()).clamp(min=0).sum(-1)
        if not torch.allclose(spent[is_inner], found.total_variation.to(spent.dtype)[is_inner], atol=MOST_OFF):
            raise ValueError(f"{name} returned a total variation that is not that of r and p")
        return found


def checked_acceptance(rule: Acceptance) -> Acceptance:
    """Return a copy of a rule with a look at what it rules: ValueError for what are no masses."""
    checked, name = copy(rule), type(rule).__name__

    def judge(trial: UnderTest) -> Ruling:
        found = rule.judge(trial)
        if not isinstance(found, Ruling) or (found.mass.shape, found.left.shape) != (trial.own_p.shape, trial.p.shape):
            tokens, size = trial.p.shape
            raise ValueError(f"{name} returned no Ruling with a mass and a row of {size} for each of {tokens} tokens")
        for what, one in (("a mass", found.mass), ("what is left", found.left)):
            if not bool(((one >= 0) & (one < torch.inf)).all()):  # NaN is not either
                raise ValueError(f"{name} returned {what} that is negative or not finite")
        return found

    object.__setattr__(checked, "judge", judge)
    return checked


def check_sums(log_p: Tensor, what: str) -> None:
    """Raise ValueError unless rows are the logarithms of distributions."""
    sums = log_p.float().logsumexp(-1).exp()
    if not bool(((sums - 1).abs() < MOST_OFF).all()):  # NaN is not either
        raise ValueError(f"{what} whose probabilities sum to {sums[(sums - 1).abs().argmax()]:.4g}, wanted 1")


def check_shape(shape: TreeShape, name: str) -> None:
    """Raise ValueError unless depths, ancestors, ranks and widths are those of the parents; `name` is the drafter."""
    parents, nodes = shape.parents, torch.arange(shape.num_nodes, device=shape.parents.device)
    if bool((parents < 0).any() or (parents > (nodes - 1).clamp(min=0)).any()):
        got = f"{name} proposed a tree with parents {parents.tolist()}"[:200]
        raise ValueError(f"{got}, wanted 0 for the root, and nodes before their children")
    ancestors = ancestors_of(parents, shape.num_nodes)
    if not torch.equal(shape.ancestors.expand_as(ancestors), ancestors):
        raise ValueError(f"{name} proposed a tree whose ancestors are not those of its parents")
    depths = ancestors.sum(-1) - 1
    if not torch.equal(shape.depths.expand_as(depths), depths) or shape.depth < int(depths.max()):
        raise ValueError(f"{name} proposed a tree whose depths and widths are not those of its parents")
    keys = parents * (int(shape.ranks.max()) + 1) + shape.ranks
    siblings = keys.expand_as(parents)[..., 1:].sort(-1).values
    if bool((siblings[..., 1:] == siblings[..., :-1]).any() or (shape.ranks < 0).any()):
        raise ValueError(f"{name} proposed a tree with siblings of equal ranks")
    children = torch.zeros_like(depths).scatter_add_(-1, parents[..., 1:], torch.ones_like(depths[..., 1:]))
    counts = tuple(int((children * (depths == depth)).max()) for depth in range(shape.depth))
    if any(width < count for width, count in zip(shape.widths, counts, strict=True)):
        raise ValueError(f"{name} proposed a tree with widths {shape.widths}, wanted at least {counts}")


def described(facts: Any) -> str:
    """Return dtype, shape and device in words."""
    return " ".join(str(one).removeprefix("torch.") for one in facts)
