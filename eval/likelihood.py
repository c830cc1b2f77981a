"""How well the target predicts pictures that it has not seen: nats per code, and what a caption is worth."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.models.llamagen.transformer import Transformer
from lantern.types import Condition


def teacher_mask(valid: Bool[Tensor, "b t"], codes: int) -> Bool[Tensor, "b n n"]:
    """Causal over t conditioning slots and `codes` codes; padding is seen by nobody but itself.

    For one padding slot, one word and two codes:

        .   1 . . .
        a   . 1 . .
        0   . 1 1 .
        1   . 1 1 1
    """
    count = valid.shape[1] + codes
    seen = F.pad(valid, (0, codes), value=True)
    causal = torch.ones(count, count, dtype=torch.bool, device=valid.device).tril() & seen[:, None]
    return causal | torch.eye(count, dtype=torch.bool, device=valid.device)


def nats(
    target: Transformer, condition: Condition, codes: Int[Tensor, "b n"], *, has_caption: bool = True
) -> Float[Tensor, "b n"]:
    """-log p of each code given the codes before it and the caption; without one, given the unconditional caption."""
    logits = taught_logits(target, condition, codes, has_caption=has_caption)
    return F.cross_entropy(logits.transpose(1, 2), codes, reduction="none")


@torch.inference_mode()
def taught_logits(
    target: Transformer, condition: Condition, codes: Int[Tensor, "b n"], *, has_caption: bool
) -> Float[Tensor, "b n v"]:
    """The logits of each code given the codes before it, in one pass without a cache."""
    assert condition.embeddings is not None and condition.mask is not None
    embed = target.cls_embedding if has_caption else target.cls_embedding.unconditional
    prefix = embed(condition.embeddings)
    slots = prefix.shape[1]
    inputs = torch.cat([prefix, target.tok_embeddings(codes[:, :-1])], dim=1)
    first = target.config.cls_token_num - slots
    positions = torch.arange(first, first + inputs.shape[1], device=codes.device).expand(len(codes), -1)
    features = target.features(inputs, positions, teacher_mask(condition.mask, codes.shape[1] - 1))
    return target.head(features[:, slots - 1 :])
