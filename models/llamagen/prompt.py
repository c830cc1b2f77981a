"""The pass of a LlamaGen transformer over captions or class labels.

Rotary rows of conditioning slots are zero, and so are their queries and keys: attention is a mean of values, and tokens
see n words as one key of zeros, with log n added to its score and the mean as its value.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lantern.core.types import Condition, Prompt


def read(
    target: Any,
    condition: Condition,
    rows: int,
    *,
    whole: bool = False,
    taps: tuple[int, ...] = (),
    is_padded: bool = False,
) -> Prompt:
    """Read the guidance rows of each prompt (`Target.read`); with `is_padded` in all of the model's slots.

    Otherwise padding that all prompts share is cut off, which changes nothing but the order of sums. This order must
    not depend on the drafter, or tokens would differ from plain decoding's where two are nearly equal: what a drafter
    reads of padding comes from a pass of its own, and only from there. A negative caption is read under its own mask;
    tokens attend to its mean with the weight of the prompt's n words, as they do to the unconditional caption.
    """
    most, negative = target.config.cls_token_num, condition.negative if rows == 2 else None
    if condition.tokens is not None:
        raise ValueError("this model takes captions or class labels, got tokens: use its own text encoder")
    if negative is not None and whole:
        raise ValueError("this drafter reads the slots of the prompt, and takes no negative prompt: use another method")
    longest = 1  # of labels
    if condition.mask is not None:
        if bool((condition.mask[:, 1:] < condition.mask[:, :-1]).any()):
            raise ValueError("the caption mask has padding behind words, wanted it on the left: rotate the captions")
        longest = max(int(condition.mask.sum(1).max()), 1)
    if longest > most:
        raise ValueError(f"the condition has {longest} slots, the model takes at most {most}")
    inputs, mask = _embedded(target, condition, most if is_padded or negative is not None else longest, rows)
    counts, seen = mask.sum(1), mask[:, None].expand(-1, rows, -1)
    if negative is not None:
        other, its = _embedded(target, negative, most, 1)
        inputs, seen = torch.cat([inputs[:, :1], other], 1), torch.stack([mask, its], 1)
    features, means, fused = _read_slots(target, inputs, seen, taps)
    logits = target.head(features[:, :, -1:])
    if not whole:
        features, fused, mask = features[:, :, -1:], None if fused is None else fused[:, :, -1:], mask[:, -1:]
    elif missing := (most - longest if condition.labels is None and not is_padded else 0):
        inputs, mask = _embedded(target, condition, most, rows)
        padded, _, entered = _read_slots(target, inputs, mask[:, None].expand(-1, rows, -1), taps)
        # padding sees padding; the last slot gives token 0, be it a word or not
        is_own = pad(mask[:, :-1], (0, 1), value=True)[:, None, :, None]
        features = torch.where(is_own, pad(features, (0, 0, missing, 0)), padded)
        if fused is not None and entered is not None:
            fused = torch.where(is_own, pad(fused, (0, 0, missing, 0)), entered)
    weight = target.tok_embeddings.weight
    dtype = target.config.cache_dtype(weight.device, weight.dtype)
    scores = word_scores(counts, dtype)
    values = means[:, :, None, :, :, None].expand(-1, -1, -1, -1, -1, scores.shape[1], -1).to(dtype)
    entries = torch.cat([torch.zeros_like(values), values], 2)
    first = torch.zeros(len(mask), rows, dtype=torch.long, device=mask.device)
    return Prompt(entries, scores[:, None].expand(-1, rows, -1), first, logits, features, mask, fused)


def word_scores(counts: Int[Tensor, " b"], dtype: torch.dtype) -> Float[Tensor, "b p"]:
    """Return what is added to the attention scores of a prompt's slots: log n for n words, in one slot or in two.

    In half precision log n is off by up to 1.6 %. A second slot of the same value compensates for the rounding.
    """
    logs = counts.double().log()
    if dtype == torch.float32:
        return logs[:, None]
    first = (logs * (1 - 2**-7)).to(dtype).double()
    return torch.stack([first, (counts.double() - first.exp()).clamp(min=0).log().to(dtype).double()], 1)


def _embedded(
    target: Any, condition: Condition, slots: int, rows: int
) -> tuple[Float[Tensor, "b r t c"], Bool[Tensor, "b t"]]:
    """Return conditional and, for two rows, unconditional inputs in so many slots, and which are no padding."""
    if condition.labels is not None:
        given, mask = condition.labels, torch.ones_like(condition.labels, dtype=torch.bool)[:, None]
    else:
        assert condition.embeddings is not None and condition.mask is not None
        missing = slots - condition.embeddings.shape[1]  # cut off where negative
        given = pad(condition.embeddings.to(target.tok_embeddings.weight.dtype), (0, 0, missing, 0))
        mask = pad(condition.mask, (missing, 0))
    embed = target.cls_embedding
    embedded = [embed(given)] if rows == 1 else [embed(given), embed.unconditional(given)]
    return torch.stack(embedded, 1), mask


def _read_slots(
    target: Any, inputs: Float[Tensor, "b r t c"], seen: Bool[Tensor, "b r t"], taps: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return features `(b r t c)`, mean values `(b l r h d)`, and the inputs of tapped layers side by side."""
    entered = dict.fromkeys(taps, inputs)
    features, means = target.read_slots(inputs.flatten(0, 1), seen.flatten(0, 1), entered=entered)
    shape = inputs.shape[:2]
    fused = torch.cat([entered[layer] for layer in taps], -1).unflatten(0, shape) if taps else None
    return features.unflatten(0, shape), means.unflatten(1, shape).transpose(0, 1), fused
