"""Trees of drafters in a real generation; those of an `EagleDrafter` are checked against passes without a cache."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Drafter, Generation, Prefill, Scores, Step
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.eagle.eagle1 import Eagle
from lantern.drafters.trees.static import named
from lantern.generation.decoder import Decoder
from lantern.models.llamagen.transformer import Transformer
from tests.tiny import select
from tests.tiny_decoder import CONDITION, KEYS, SAMPLING, TARGET, generate


def drafted(
    drafter: Any, target: Transformer = TARGET, condition: Condition = CONDITION, sampling: Sampling = SAMPLING
) -> tuple[Tensor, list[tuple[Tensor, Any, Any]]]:
    """Return the tokens of a generation; and for each draft the numbers of known tokens, the tree, and its step."""
    steps, keys = list[Step](), KEYS[: condition.batch]
    made = generate(drafter, target=target, condition=condition, sampling=sampling, keys=keys, callback=steps.append)
    return made.tokens, [(step.start, step.tree, step) for step in steps if step.tree is not None]


def begin_after(drafter: Drafter, first: Tensor, features: Tensor, noise: Noise) -> None:
    """Begin a generation of `CONDITION` whose prompt has these features, and whose token 0 is given."""
    is_used = torch.ones(features.shape[0], features.shape[2], dtype=torch.bool)
    drafter.begin(Prefill(features, is_used, CONDITION), noise)
    logits = torch.zeros(*features.shape[:2], 1, 24)
    scores = Scores(logits, features[:, :, -1:])
    drafter.observe(Step(0, first * 0, torch.ones_like(first), first[:, None], scores))


def stepped(decoder: Decoder, images: list[int] | None = None, **how: Any) -> tuple[Generation, list[Any]]:
    """Generate some of the images; return also the steps in which something was drafted."""
    images, steps = [0, 1, 2] if images is None else images, list[Step]()
    keys = [KEYS[i] for i in images]
    made = decoder.generate(select(CONDITION, images), keys=keys, callback=steps.append, **how)
    return made, [step for step in steps if step.tree is not None]


def eagle_drafts(
    module: Eagle, target: Transformer, condition: Condition, **how: Any
) -> tuple[EagleDrafter, Tensor, list[tuple[Tensor, Any, Any]]]:
    """Return the drafter of a wide tree that records log q, and what `drafted` returns of it."""
    given = {"tree": named("mc_sim_7b_63"), "mode": "gumbel", "sampling": SAMPLING, "records_log_q": True} | how
    drafter = EagleDrafter(module, target, **given)
    return drafter, *drafted(drafter, target, condition, given["sampling"])


def ways(tree: Any) -> dict[int, list[int]]:
    """Return for the root and each inner node the nodes on the path to it, without the root."""
    inner = sorted({0, *tree.shape.parents[1:].tolist()})
    return {node: [i for i in range(1, node + 1) if tree.shape.ancestors[node, i]] for node in inner}


def check_paths(
    drafts: tuple[EagleDrafter, Tensor, list[tuple[Tensor, Any, Any]]],
    features: Tensor,
    run: Callable[[Tensor, Tensor, int], Tensor],
    logits: Callable[[Tensor], Tensor],
) -> None:
    """Check log q behind every drafted path of the first steps against passes without a cache.

    `features` (b n c) are true up to what is committed. `run` takes features, tokens and the number of drafts among
    them, and its outputs follow as the features of drafts.
    """
    drafter, tokens, steps = drafts
    checked = 0
    for known, tree, _ in steps[:3]:
        for image, length in enumerate(known.tolist()):
            for node, way in ways(tree).items():
                if length + len(way) > tokens.shape[1]:
                    continue
                inputs, read = features[image : image + 1, :length], tokens[image : image + 1, :length]
                out = run(inputs, read, 0)
                for step, above in enumerate(way, 1):
                    inputs = torch.cat([inputs, out[:, -1:]], 1)
                    read = torch.cat([read, tree.tokens[image, above].view(1, 1)], 1)
                    out = run(inputs, read, step)
                expected = drafter.sampling.filtered(logits(out[:, -1:]))
                assert (expected.flatten() - tree.log_q[image, node]).abs().max() < 1e-4
                checked += 1
    assert checked > 20
