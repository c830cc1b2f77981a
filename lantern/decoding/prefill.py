"""The pass over the prompt, which begins every generation."""

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Target
from lantern.decoding.cache import StaticCache

FP32_ROWS = 16  # fp32 products were measured to round alike from this number of rows on


@dataclass(frozen=True)
class PromptState:
    """A target's results for prompts: all that codes and drafters read of them.

    `means` are each layer's mean values over the words (see `Transformer.read_prompt`). `features` are those of the
    last slot, or of all slots for drafters that read them. `fused` are the inputs of the layers that a drafter taps, if
    any. `mask` is False for padding.
    """

    means: Float[Tensor, "b l r h d"]
    features: Float[Tensor, "b r t c"]
    mask: Bool[Tensor, "b t"]
    counts: Int[Tensor, " b"]
    fused: Float[Tensor, "b r t k"] | None = None

    def at(self, image: int) -> "PromptState":
        """Return the state of one image, as a batch of one."""
        parts: list[Any] = [None if part is None else part[image : image + 1] for part in _fields(self)]
        return PromptState(*parts)


@dataclass(frozen=True)
class Start:
    """Results of the pass over the prompt: a filled cache, its mask, and the logits of the first code."""

    cache: StaticCache
    noise: Noise
    mask: Bool[Tensor, "b t"]
    prefix: Float[Tensor, "b p"]
    features: Float[Tensor, "b r t c"]
    logits: Float[Tensor, "b r 1 v"]
    fused: Float[Tensor, "b r t k"] | None = None


@dataclass(frozen=True)
class FirstScores:
    """The scores of the last prompt slot alone."""

    logits: Float[Tensor, "rows n v"]
    features: Float[Tensor, "rows n c"]
    fused: Float[Tensor, "rows n k"] | None = None


class PromptCache:
    """Prompt states of earlier calls, the latest `limit` of them, so that another seed needs no pass over the prompt.

    States are looked up by the bytes of the condition, and dropped when the target's weights change.
    """

    def __init__(self, limit: int = 256) -> None:
        self.limit = limit
        self._weights: tuple[Any, ...] = ()
        self._states: OrderedDict[bytes, PromptState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def read(
        self,
        target: Target,
        condition: Condition,
        *,
        rows: int,
        needs_whole_prefix: bool,
        taps: tuple[int, ...] = (),
        alone: bool = False,
    ) -> PromptState:
        """Return the states of these prompts; new ones are read in one pass, or with `alone` in a pass each.

        With `alone` the bits of a state do not depend on the other prompts.
        """
        weights = tuple((parameter.data_ptr(), parameter._version) for parameter in target.parameters())
        if weights != self._weights:
            self._weights, self._states = weights, OrderedDict()
        kind = f"{rows} {needs_whole_prefix} {taps} {alone}"
        names = [_digest(condition, i, kind) for i in range(condition.batch)]
        new = {name: i for i, name in enumerate(names) if name not in self._states}
        size = 1 if alone else max(len(new), 1)
        for first in range(0, len(new), size):
            together = list(new)[first : first + size]
            some = _select(condition, [new[name] for name in together])
            states = read_prompts(target, some, rows=rows, needs_whole_prefix=needs_whole_prefix, taps=taps)
            self._states |= {name: states.at(i) for i, name in enumerate(together)}
        found = [self._states[name] for name in names]
        for name in names:
            self._states.move_to_end(name)
        while len(self._states) > self.limit:
            self._states.popitem(last=False)
        fields: list[Any] = list(zip(*map(_fields, found), strict=True))
        joined: list[Any] = [None if parts[0] is None else torch.cat(parts) for parts in fields]
        return PromptState(*joined)


@torch.no_grad()
def start(
    target: Target,
    condition: Condition,
    *,
    sampling: Sampling,
    keys: Sequence[tuple[int, int]],
    stage: int,
    needs_whole_prefix: bool = False,
    taps: tuple[int, ...] = (),
    cache: StaticCache | None = None,
    prompts: PromptCache | None = None,
    reproducible: bool = False,
) -> Start:
    """Score the prompt, or take its state from `prompts`; `cache` is reused if it has the right size.

    With `reproducible` prompts are read one by one, and the cache is that of reproducible decoding (`make_cache`).
    """
    if len(keys) != condition.batch:
        raise ValueError(f"got {len(keys)} noise keys for {condition.batch} images, wanted one (seed, number) each")
    if target.training:
        raise ValueError("the target is in training mode, in which dropout is random: call .eval() on it first")
    prompts = prompts if prompts is not None else PromptCache()
    alone = reproducible or target.is_batch_invariant  # prompts must be as invariant as passes
    state = prompts.read(
        target, condition, rows=sampling.rows, needs_whole_prefix=needs_whole_prefix, taps=taps, alone=alone
    )
    cache = make_cache(target, state, stage, reproducible, cache)
    cache.write_prefix(state.means)
    config = target.config
    noise = Noise(
        keys,
        positions=config.block_size,
        vocab_size=config.vocab_size,
        device=state.mask.device,
        is_silent=sampling.is_greedy,
        make_uniforms=target.make_uniforms,  # faster ones of an engine, if any
    )
    last = state.features[:, :, -1:]
    logits = torch.cat([target.head(of_one) for of_one in last.split(1 if alone else len(last))])
    return Start(cache, noise, state.mask, prefix_scores(state.counts, cache), state.features, logits, state.fused)


def read_prompts(
    target: Target, condition: Condition, *, rows: int, needs_whole_prefix: bool, taps: tuple[int, ...] = ()
) -> PromptState:
    """Read both guidance rows of each prompt, which share its mask.

    Padding that all prompts share is cut off unless a drafter reads it. The rotary rows of the prompt are zero, so
    cutting changes nothing. ValueError for padding behind words and for more slots than the model has.
    """
    slots = target.config.cls_token_num
    condition = pad_prefix(condition, slots) if needs_whole_prefix else cut_common_padding(condition)
    mask = prefix_mask(condition)
    if mask.shape[1] > slots:
        raise ValueError(f"the condition has {mask.shape[1]} slots, the model takes at most {slots}")
    inputs = embed_condition(target, condition, rows)
    entered: dict[int, Tensor] = dict.fromkeys(taps, inputs)
    reported = {"entered": entered} if taps else {}
    features, means = target.read_prompt(inputs.flatten(0, 1), mask.repeat_interleave(rows, 0), **reported)
    features = features.unflatten(0, inputs.shape[:2])
    fused = torch.cat([entered[layer] for layer in taps], -1).unflatten(0, inputs.shape[:2]) if taps else None
    kept = slice(None) if needs_whole_prefix else slice(-1, None)
    return PromptState(
        means.unflatten(1, inputs.shape[:2]).transpose(0, 1),
        features[:, :, kept],
        mask[:, kept],
        mask.sum(1),
        None if fused is None else fused[:, :, kept],
    )


def prefix_scores(counts: Int[Tensor, " b"], cache: StaticCache) -> Float[Tensor, "b p"]:
    """Return what is added to the attention scores of the prompt's slots: log n for n words, in one slot or in two.

    In half precision log n is off by up to 1.6 %. A second slot of the same value compensates for the rounding.
    """
    logs = counts.double().log()
    if cache.prefix == 1:
        return logs[:, None].to(cache.buffer.dtype)
    first = (logs * (1 - 2**-7)).to(cache.buffer.dtype)
    second = (counts.double() - first.double().exp()).clamp(min=0).log().to(cache.buffer.dtype)
    return torch.stack([first, second], dim=1)


def make_cache(
    target: Target, state: PromptState, stage: int, reproducible: bool = False, used: StaticCache | None = None
) -> StaticCache:
    """Return a cache of the size that these prompts need: `used` if it fits, else a new one.

    On a CPU it is fp32 for every model: rotated keys are fp32 already, and attention is faster. With `reproducible` it
    is fp64: codes are at other slots in a tree than in plain decoding, so attention sums them in another order, and in
    fp64 the difference vanishes when the result is rounded to the model's precision. For fp32 models passes then have
    at least FP32_ROWS rows too, since a matrix product of fewer rows sums in another order.
    """
    config, device = target.config, state.mask.device
    weights = target.tok_embeddings.weight
    dtype = torch.float32 if device.type == "cpu" else weights.dtype
    dtype = torch.float64 if reproducible else dtype
    images, _, rows, heads, head_dim = state.means.shape
    prefix = 1 if dtype in (torch.float32, torch.float64) else 2
    least = FP32_ROWS if reproducible and weights.dtype == torch.float32 else 0
    expected = {"images": images, "rows": rows, "prefix": prefix, "codes": config.block_size, "stage": stage}
    expected["least_rows"] = least
    if used is not None and {name: getattr(used, name) for name in expected} == expected and used.buffer.dtype == dtype:
        return used
    return StaticCache(layers=config.n_layer, heads=heads, head_dim=head_dim, dtype=dtype, device=device, **expected)


def embed_condition(target: Target, condition: Condition, rows: int) -> Float[Tensor, "b r t c"]:
    """Return the conditional and, with guidance, the unconditional row of each image."""
    if condition.labels is None:
        assert condition.embeddings is not None
        given = condition.embeddings.to(target.tok_embeddings.weight.dtype)
    else:
        given = condition.labels
    embedded = [target.cls_embedding(given)]
    if rows == 2:
        embedded.append(target.cls_embedding.unconditional(given))
    return torch.stack(embedded, dim=1)


def prefix_mask(condition: Condition) -> Bool[Tensor, "b t"]:
    """Return which conditioning slots are no padding."""
    if condition.labels is not None:
        return torch.ones(condition.batch, 1, dtype=torch.bool, device=condition.device)
    assert condition.mask is not None
    return condition.mask


def cut_common_padding(condition: Condition) -> Condition:
    """Drop the slots that are padding in every image; at least one slot stays. ValueError for padding behind words."""
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


def _fields(state: PromptState) -> tuple[Any, ...]:
    return tuple(getattr(state, field.name) for field in dataclasses.fields(state))


def _select(condition: Condition, images: list[int]) -> Condition:
    if condition.embeddings is None or condition.mask is None:
        assert condition.labels is not None
        return Condition(labels=condition.labels[images])
    return Condition(embeddings=condition.embeddings[images], mask=condition.mask[images])


def _digest(condition: Condition, image: int, kind: str) -> bytes:
    given = [condition.labels] if condition.labels is not None else [condition.embeddings, condition.mask]
    digest = hashlib.sha256(kind.encode())
    for tensor in given:
        assert tensor is not None
        digest.update(tensor[image : image + 1].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.digest()
