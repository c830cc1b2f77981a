"""The beginning of a generation: prompts are read, or found among those of earlier calls, and fill a cache."""

import hashlib
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from lantern.core.types import Condition, Prompt, Scores, Target
from lantern.core.weights import original, weights_of
from lantern.decoding.cache import StaticCache, by_row

READ_TOKENS = 64  # known tokens of a pass
FP32_ROWS = 16  # measured: fp32 products of this many rows or more round in the same way


class PromptCache:
    """Prompts of earlier calls, so that another seed needs no pass over them.

    It holds the latest `limit` prompts, of at most `limit_bytes` together beside those of the last call. They are
    looked up by the bytes of the condition and the engine that read them, which rounds in its own way, and dropped when
    the target's weights change.
    """

    def __init__(self, limit: int = 256, limit_bytes: int = 1 << 30) -> None:
        self.limit, self.limit_bytes = limit, limit_bytes
        self._weights: tuple[Any, ...] = ()
        self._prompts: OrderedDict[bytes, Prompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prompts)

    def read(
        self,
        target: Target,
        condition: Condition,
        rows: int,
        *,
        whole: bool = False,
        taps: tuple[int, ...] = (),
        alone: bool = False,
    ) -> Prompt:
        """Return what `target.read` does of these prompts; new ones are read together, or with `alone` in a pass each.

        With `alone` the bits of a prompt do not depend on the others.
        """
        weights = weights_of(original(target))
        if weights != self._weights:
            self._weights, self._prompts = weights, OrderedDict()
        kind = f"{type(target).__qualname__} {rows} {whole} {taps} {alone}"
        names = [_digest(condition, i, kind) for i in range(condition.batch)]
        new = {name: i for i, name in enumerate(names) if name not in self._prompts}
        size = 1 if alone else max(len(new), 1)
        for first in range(0, len(new), size):
            some = list(new)[first : first + size]
            found = target.read(condition.select([new[name] for name in some]), rows, whole=whole, taps=taps)
            self._prompts |= {name: found.at(i) for i, name in enumerate(some)}
        prompts = [self._prompts[name] for name in names]
        for name in names:
            self._prompts.move_to_end(name)
        size = sum(prompt.nbytes for prompt in self._prompts.values())
        while len(self._prompts) > self.limit or (size > self.limit_bytes and len(self._prompts) > len(set(names))):
            size -= self._prompts.popitem(last=False)[1].nbytes
        return replace(Prompt.joined(prompts), condition=condition)


@torch.no_grad()
def prefill(
    target: Target,
    condition: Condition,
    rows: int,
    *,
    stage: int,
    whole: bool = False,
    taps: tuple[int, ...] = (),
    cache: StaticCache | None = None,
    prompts: PromptCache | None = None,
    reproducible: bool = False,
    is_fp8: bool = False,
    multiple: int = 1,
) -> tuple[Prompt, StaticCache]:
    """Read prompts as `Target.read` does, or find them in `prompts`, and fill a cache with `stage` slots for nodes.

    `cache` is reused if it has the right size. With `reproducible` prompts are read one by one, and the cache is that
    of reproducible decoding (`make_cache`), with `is_fp8` it is in fp8. Prompts are padded to a `multiple` of slots.
    ValueError for a target in training mode.
    """
    if target.training:
        raise ValueError("the target is in training mode, in which dropout is random: call .eval() on it first")
    prompts = prompts if prompts is not None else PromptCache()
    prompt = prompts.read(target, condition, rows, whole=whole, taps=taps, alone=reproducible)
    prompt = prompt.with_slots(-(-prompt.scores.shape[-1] // multiple) * multiple)
    cache = make_cache(target, prompt, stage, reproducible, cache, is_fp8)
    cache.fill(prompt)
    return prompt, cache


@torch.no_grad()
def read_tokens(
    target: Target, cache: StaticCache, tokens: Int[Tensor, "b m"], *, taps: tuple[int, ...] = ()
) -> tuple[Scores, int]:
    """Write keys and values of the first m tokens to the cache, READ_TOKENS in a pass.

    Return the features at each token, without logits, and the number of passes. An engine runs them only if it need
    not compile their size (`Target.features`), or for taps.
    """
    images, rows, count = len(tokens), cache.rows, tokens.shape[1]
    numbers = torch.arange(count, device=tokens.device)
    found, entered = list[Tensor](), list[Tensor]()
    for block in numbers.split(READ_TOKENS):
        mask = cache.prefix_scores.new_full((images, rows, len(block), cache.slots), -torch.inf)
        mask[..., : cache.prefix] = by_row(cache.prefix_scores)
        mask[..., cache.prefix : cache.prefix + count].masked_fill_(numbers <= block[:, None], 0.0)
        places = block.expand(images * rows, -1)
        inputs = target.tok_embeddings(tokens[:, block]).repeat_interleave(rows, 0)
        positions, slots = places + target.config.cls_token_num, places + cache.prefix
        how: dict[str, Any] = {"cache": cache, "slots": slots}
        if taps:
            scores = target(inputs, positions, mask.flatten(0, 1), taps=taps, **how)
            found.append(scores.features)
            entered += [] if scores.fused is None else [scores.fused]
        else:
            found.append(target.features(inputs, positions, mask.flatten(0, 1), **how))
    features = torch.cat(found, 1).unflatten(0, (images, rows))
    fused = torch.cat(entered, 1).unflatten(0, (images, rows)) if taps else None
    return Scores(features[..., :0], features, fused), len(found)


def reading_passes(forced: Int[Tensor, "b n"]) -> int:
    """Return how many passes of a batch only read: those over the prompt and over the tokens that all images keep."""
    kept = int((forced >= 0).long().cumprod(1).sum(1).min())
    return 1 + -(-(kept - 1) // READ_TOKENS) if kept else 0


def make_cache(
    target: Target,
    prompt: Prompt,
    stage: int,
    reproducible: bool = False,
    used: StaticCache | None = None,
    is_fp8: bool = False,
) -> StaticCache:
    """Return a cache of the size that these prompts need: `used` if it fits, else a new one.

    With `reproducible` it is fp64: tokens are at other slots in a tree than in plain decoding, so attention sums them
    in another order, and in fp64 the difference vanishes when the result is rounded to the model's precision. For fp32
    models passes then have at least FP32_ROWS rows too, since a matrix product of fewer rows sums in another order.
    """
    config, is_fp32 = target.config, target.tok_embeddings.weight.dtype == torch.float32
    images, layers, _, rows, heads, prefix, head_dim = prompt.entries.shape
    return StaticCache.of(
        used,
        layers=layers,
        images=images,
        rows=rows,
        heads=heads,
        head_dim=head_dim,
        prefix=prefix,
        tokens=config.block_size,
        stage=stage,
        dtype=torch.float64 if reproducible else prompt.entries.dtype,
        device=prompt.mask.device,
        least_rows=FP32_ROWS if reproducible and is_fp32 else 0,
        columns=config.raster.columns if config.raster.newlines else 0,
        is_fp8=is_fp8,
    )


def _digest(condition: Condition, image: int, kind: str) -> bytes:
    given = [condition.labels] if condition.labels is not None else [condition.embeddings, condition.mask]
    if condition.tokens is not None:  # padding depends on the other prompts
        assert condition.mask is not None
        longest = int(condition.mask[image].sum(-1).max())
        given = [condition.tokens[..., -longest:], condition.mask[..., -longest:]]
    if condition.negative is not None:
        given += [condition.negative.embeddings, condition.negative.mask]
    digest = hashlib.sha256(kind.encode())
    for tensor in given:
        assert tensor is not None
        digest.update(tensor[image : image + 1].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.digest()
