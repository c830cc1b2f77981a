"""Trees of an `EagleDrafter` in a real generation, checked against passes without a cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, DraftTree
from lantern.decoding import loop
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.eagle.eagle1 import Eagle
from lantern.drafters.trees.static import named
from lantern.models.llamagen.transformer import Transformer
from lantern.verifiers.gumbel import GumbelVerifier


class Watched(EagleDrafter):
    """Records known codes, the tree, and log q of each inner node."""

    def __init__(self, module: Eagle, target: Transformer, *, tree: str, sampling: Sampling) -> None:
        super().__init__(module, target, tree=named(tree), mode="gumbel", sampling=sampling)
        self.seen: list[tuple[Tensor, DraftTree, Tensor]] = []

    def propose(self) -> DraftTree:
        self.distributions: list[Tensor] = []
        tree = super().propose()
        self.seen.append((self.known.clone(), tree, torch.cat(self.distributions, 1)))
        return tree

    def _log_q(self, features: Tensor, depth: int) -> Tensor:
        distribution = super()._log_q(features, depth)
        self.distributions.append(distribution)
        return distribution


def sampled(drafter: Watched, condition: Condition, target: Transformer) -> Tensor:
    """The codes of a generation with this drafter."""
    keys = [(3, i) for i in range(condition.batch)]
    made = loop.generate(
        target, condition, sampling=drafter.sampling, keys=keys, drafter=drafter, verifier=GumbelVerifier()
    )
    return made.codes


def true_rows(target: Transformer, condition: Condition, codes: Tensor, layers: tuple[int, ...] = ()) -> Tensor:
    """Return (b 2 16 k) what predicts codes 0 .. 15, without a cache: features, or the inputs of these layers."""
    assert condition.embeddings is not None and condition.mask is not None
    words, rows = condition.embeddings, []
    count = words.shape[1] + codes.shape[1]
    valid = torch.cat([condition.mask, torch.ones_like(codes, dtype=torch.bool)], 1)
    mask = torch.tril(valid[:, None] | ~valid[:, :, None])
    for prompt in (target.cls_embedding(words), target.cls_embedding.unconditional(words)):
        inputs = torch.cat([prompt, target.tok_embeddings(codes)], 1)
        output = target(inputs, torch.arange(count).expand(len(codes), -1), mask, taps=layers)
        rows.append(output.fused if layers else output.features)
    return torch.stack(rows, 1)[:, :, words.shape[1] - 1 : -1]


def ways(tree: DraftTree) -> list[list[int]]:
    """Return the nodes on the path to the root and to each inner node, without the root, in the order of log q."""
    inner = [0, *sorted(set(tree.shape.parents[1:].tolist()) - {0})]
    return [[i for i in range(1, node + 1) if tree.shape.ancestors[node, i]] for node in inner]


def check_paths(
    drafter: Watched,
    codes: Tensor,
    features: Tensor,
    run: Callable[[Tensor, Tensor, int], Tensor],
    logits: Callable[[Tensor], Tensor],
) -> None:
    """Check log q behind every drafted path of the first steps against passes without a cache.

    `features` (b n c) are true up to what is committed. `run` takes features, codes and the number of drafts among
    them, and its outputs follow as the features of drafts.
    """
    checked = 0
    for known, tree, distributions in drafter.seen[:3]:
        for image, length in enumerate(known.tolist()):
            for row, way in enumerate(ways(tree)):
                if length + len(way) > codes.shape[1]:
                    continue
                inputs, tokens = features[image : image + 1, :length], codes[image : image + 1, :length]
                out = run(inputs, tokens, 0)
                for step, node in enumerate(way, 1):
                    inputs = torch.cat([inputs, out[:, -1:]], 1)
                    tokens = torch.cat([tokens, tree.tokens[image, node].view(1, 1)], 1)
                    out = run(inputs, tokens, step)
                expected = drafter.sampling.filtered(logits(out[:, -1:]))
                assert (expected.flatten() - distributions[image, row]).abs().max() < 1e-4
                checked += 1
    assert checked > 20
