"""Laws of drafted features, by the target's own head."""

from typing import Any

from jaxtyping import Float
from torch import Tensor


def target_logits(target: Any, features: Float[Tensor, "*b c"]) -> Float[Tensor, "*b v"]:
    """What features say of the next code, fp32; by the faster head of fused passes where there is one."""
    head = getattr(target, "draft_head", target.head)
    return head(features.to(target.tok_embeddings.weight.dtype))
