"""The pass over the prompt, with which every generation begins."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lantern.decoding.cache import StaticCache
from lantern.noise import Noise
from lantern.sampling import Sampling
from lantern.types import Condition, Target


@dataclass(frozen=True)
class Start:
    """What the pass over the prompt leaves: a filled cache, features of the prompt, the law of the first code."""

    cache: StaticCache
    noise: Noise
    mask: Bool[Tensor, "b t"]
    features: Float[Tensor, "b r t c"]
    logits: Float[Tensor, "b r 1 v"]


@dataclass(frozen=True)
class FirstScores:
    """The scores of the last prompt slot alone."""

    logits: Float[Tensor, "rows n v"]
    features: Float[Tensor, "rows n c"]


@torch.no_grad()
def start(
    target: Target,
    condition: Condition,
    *,
    sampling: Sampling,
    keys: Sequence[tuple[int, int]],
    stage: int,
    needs_whole_prefix: bool = False,
    cache: StaticCache | None = None,
) -> Start:
    """Scores the prompt: both guidance rows share its mask, and padding common to all images is cut off.

    The rotary rows of the prompt are zero, so that cutting changes nothing. Padding slots see the padding before
    them, as LANTERN's drafters expect; nothing else ever sees them. `cache` is used again if it has the right size.
    """
    if len(keys) != condition.batch:
        raise ValueError(f"got {len(keys)} noise keys for {condition.batch} images, wanted one (seed, number) each")
    if getattr(target, "training", False):
        raise ValueError("the target is in training mode, in which dropout is random: call .eval() on it first")
    slots = target.config.cls_token_num
    condition = pad_prefix(condition, slots) if needs_whole_prefix else cut_common_padding(condition)
    mask = prefix_mask(condition)
    if mask.shape[1] > slots:
        raise ValueError(f"the condition has {mask.shape[1]} slots, the model takes at most {slots}")
    inputs = embed_condition(target, condition, sampling)
    cache = make_cache(target, inputs, stage, cache)
    features = score_prompt(target, inputs, mask, cache)
    noise = Noise(
        keys,
        positions=target.config.block_size,
        vocab_size=target.config.vocab_size,
        device=inputs.device,
        is_silent=sampling.is_greedy,
    )
    logits = target.head(features[:, -1:])
    return Start(cache, noise, mask, features.unflatten(0, inputs.shape[:2]), logits.unflatten(0, inputs.shape[:2]))


def make_cache(target: Target, inputs: Float[Tensor, "b r t c"], stage: int, used: StaticCache | None) -> StaticCache:
    """A cache of the size that this prompt asks for: `used` if it has it, else a fresh one."""
    config, (images, rows, length, _) = target.config, inputs.shape
    wanted = {"images": images, "rows": rows, "prefix": length, "codes": config.block_size, "stage": stage}
    if used is not None and {name: getattr(used, name) for name in wanted} == wanted:
        return used
    head_dim = config.dim // config.n_head
    return StaticCache(
        layers=config.n_layer,
        heads=config.n_head,
        head_dim=head_dim,
        dtype=inputs.dtype,
        device=inputs.device,
        **wanted,
    )


def score_prompt(
    target: Target, inputs: Float[Tensor, "b r t c"], mask: Bool[Tensor, "b t"], cache: StaticCache
) -> Float[Tensor, "rows t c"]:
    """Features of the prompt's slots; their keys and values go to the cache."""
    images, rows, length, _ = inputs.shape
    slots = torch.arange(length, device=inputs.device).expand(images * rows, -1)
    seen = torch.zeros(images, length, cache.slots, dtype=torch.bool, device=inputs.device)
    seen[:, :, :length] = torch.tril(mask[:, None] | ~mask[:, :, None])
    positions = slots + (target.config.cls_token_num - length)
    seen = seen.repeat_interleave(rows, 0)
    return target.features(inputs.flatten(0, 1), positions, seen, cache=cache, slots=slots)


def embed_condition(target: Target, condition: Condition, sampling: Sampling) -> Float[Tensor, "b r t c"]:
    """The conditional and, with guidance, the unconditional rows of each image."""
    if condition.labels is None:
        assert condition.embeddings is not None
        given = condition.embeddings.to(target.tok_embeddings.weight.dtype)
    else:
        given = condition.labels
    rows = [target.cls_embedding(given)]
    if sampling.rows == 2:
        rows.append(target.cls_embedding.unconditional(given))
    return torch.stack(rows, dim=1)


def prefix_mask(condition: Condition) -> Bool[Tensor, "b t"]:
    """Which conditioning slots hold something."""
    if condition.labels is not None:
        return torch.ones(condition.batch, 1, dtype=torch.bool, device=condition.device)
    assert condition.mask is not None
    return condition.mask


def cut_common_padding(condition: Condition) -> Condition:
    """Without the slots that are padding in every image; at least one slot stays. Padding must be on the left."""
    if condition.embeddings is None or condition.mask is None:
        return condition
    if bool((condition.mask[:, 1:] < condition.mask[:, :-1]).any()):
        raise ValueError("the caption mask has padding behind words, wanted it on the left: rotate the captions")
    longest = max(int(condition.mask.sum(1).max()), 1)
    return dataclasses.replace(
        condition, embeddings=condition.embeddings[:, -longest:], mask=condition.mask[:, -longest:]
    )


def pad_prefix(condition: Condition, slots: int) -> Condition:
    """With zero padding on the left up to `slots`."""
    if condition.embeddings is None or condition.mask is None:
        return condition
    missing = slots - condition.embeddings.shape[1]
    pad = torch.nn.functional.pad
    return dataclasses.replace(
        condition,
        embeddings=pad(condition.embeddings, (0, 0, missing, 0)),
        mask=pad(condition.mask, (missing, 0)),
    )
