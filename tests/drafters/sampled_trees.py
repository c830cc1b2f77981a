"""Trees of drafters in a real generation; those of an `EagleDrafter` are checked against passes without a cache."""

from typing import Any

import torch
from torch import Tensor

from lantern.core.sampling import Noise, Sampling
from lantern.core.types import Condition, Drafter, Generation, Scores, Step
from lantern.drafters.base import Examples, fused_layers
from lantern.generation.generator import Decoder
from lantern.models.llamagen.transformer import Transformer
from tests.tiny import tiny_prompt, uncached
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
    drafter.begin(tiny_prompt(features, CONDITION), noise)
    logits = torch.zeros(*features.shape[:2], 1, 24)
    scores = Scores(logits, features[:, :, -1:])
    drafter.observe(Step(0, first * 0, torch.ones_like(first), first[:, None], scores))


def stepped(decoder: Decoder, images: list[int] | None = None, **how: Any) -> tuple[Generation, list[Any]]:
    images, steps = [0, 1, 2] if images is None else images, list[Step]()
    keys = [KEYS[i] for i in images]
    made = decoder.generate(CONDITION.select(images), keys=keys, callback=steps.append, **how)
    return made, [step for step in steps if step.tree is not None]


def ways(tree: Any) -> dict[int, list[int]]:
    """Return for the root and each inner node the nodes on the path to it, without the root."""
    inner = sorted({0, *tree.shape.parents[1:].tolist()})
    return {node: [i for i in range(1, node + 1) if tree.shape.ancestors[node, i]] for node in inner}


def whole_pictures(target: Transformer, condition: Condition, tokens: Tensor) -> Examples:
    """Examples of finished images: both rows' features that predict each token, the prompt's, and inputs of layers."""
    features = uncached(target, condition, tokens[:, :-1], "features")
    prompts, rows = features.split([features.shape[2] - tokens.shape[1], tokens.shape[1]], 2)
    tapped = uncached(target, condition, tokens[:, :-1], "tapped", taps=fused_layers(target.config.n_layer))
    layers = tapped[:, :, -tokens.shape[1] :].unflatten(-1, (3, -1)).transpose(2, 3)
    scales = torch.full((len(tokens),), 3.0)
    return Examples(tokens, rows, scales, condition.embeddings, condition.mask, prompts, layers)
