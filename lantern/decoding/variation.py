"""The total variation of finished images, measured in passes over them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Target
from lantern.decoding.cache import by_row
from lantern.decoding.prompt import Start


@torch.no_grad()
def total_variation(
    target: Target, begun: Start, sampling: Sampling, tokens: Int[Tensor, "b n"], log_p: Float[Tensor, "b n+ v"]
) -> Float[Tensor, "b n"]:
    """Return TV between the distributions that tokens were sampled from, `log_p`, and those of plain decoding.

    Both follow the same tokens. The rows of a grid are scored again, each in a pass over its tokens, with all tokens
    before them. `begun` holds a cache of all tokens, which is overwritten.
    """
    cache, config = begun.cache, target.config
    images, columns = len(tokens), config.raster.columns
    numbers = torch.arange(config.block_size, device=tokens.device)
    mask = torch.full((images, cache.rows, columns, cache.slots), -torch.inf, device=tokens.device)
    mask = mask.to(cache.buffer.dtype)
    mask[..., : cache.prefix] = by_row(begun.prefix)

    def apart(exact: Float[Tensor, "b m v"], first: int) -> Float[Tensor, "b m"]:
        return (log_p[:, first : first + exact.shape[1]].exp() - exact.exp()).abs().sum(-1) / 2

    found = [apart(sampling.log_probs(begun.logits, numbers[:1].expand(images, -1)), 0)]
    for row in range(config.raster.rows):
        places = numbers[row * columns : (row + 1) * columns]
        seen = numbers <= places[:, None]
        mask[..., cache.prefix : cache.first_stage_slot] = torch.where(seen, 0.0, -torch.inf)
        inputs = target.tok_embeddings(tokens[:, places]).repeat_interleave(cache.rows, 0)
        at = places.expand(len(inputs), -1)
        scores = target(inputs, at + config.cls_token_num, mask.flatten(0, 1), cache=cache, slots=at + cache.prefix)
        after = numbers[row * columns + 1 : (row + 1) * columns + 1].expand(images, -1)
        logits = scores.logits.unflatten(0, (images, -1))[:, :, : after.shape[1]]
        if begun.forced is not None:
            logits = begun.forced.logits(logits, after)
        found.append(apart(sampling.log_probs(logits, after), row * columns + 1))
    return torch.cat(found, 1)
