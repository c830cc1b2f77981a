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

    A token prompt has keys and values of its own, `entries`, in place of `means`; `seen` is False for its padding.
    """

    means: Float[Tensor, "b l r h d"] | None
    features: Float[Tensor, "b r t c"]
    mask: Bool[Tensor, "b t"]
    counts: Int[Tensor, " b"]
    fused: Float[Tensor, "b r t k"] | None = None
    entries: Float[Tensor, "b l 2 r h t d"] | None = None
    seen: Bool[Tensor, "b r t"] | None = None

    def at(self, image: int) -> "PromptState":
        """Return the state of one image, as a batch of one, without padding that its rows share."""
        parts: list[Any] = [None if part is None else part[image : image + 1] for part in _fields(self)]
        state = PromptState(*parts)
        return state if state.seen is None else state.with_slots(int(state.seen.sum(-1).max()))

    def with_slots(self, count: int) -> "PromptState":
        """Return the state of token prompts with this number of slots, cut or padded on the left."""
        assert self.entries is not None and self.seen is not None
        missing = count - self.seen.shape[-1]
        pad = torch.nn.functional.pad
        entries, seen = pad(self.entries, (0, 0, missing, 0)), pad(self.seen, (missing, 0))
        return dataclasses.replace(self, entries=entries.clone() if missing < 0 else entries, seen=seen)

    def fill(self, cache: StaticCache) -> Float[Tensor, "b p"] | Float[Tensor, "b r p"]:
        """Write the prompt to a cache, and return what is added to the attention scores of its slots."""
        if self.entries is None:
            assert self.means is not None
            cache.write_prefix(self.means)
            return prefix_scores(self.counts, cache)
        assert self.seen is not None
        cache.write_prompt(self.entries, self.seen.sum(-1))
        return torch.zeros_like(self.seen, dtype=cache.buffer.dtype).masked_fill(~self.seen, -torch.inf)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in _fields(self) if part is not None)


@dataclass(frozen=True)
class Start:
    """Results of the pass over the prompt: a filled cache, its mask, and the logits of the first code.

    `prefix` is added to the attention scores of the prompt's slots, of each image or of each guidance row.
    """

    cache: StaticCache
    noise: Noise
    mask: Bool[Tensor, "b t"]
    prefix: Float[Tensor, "b p"] | Float[Tensor, "b r p"]
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
    """Prompt states of earlier calls, so that another seed needs no pass over the prompt.

    It holds the latest `limit` states, of at most `limit_bytes` together beside those of the last call. States are
    looked up by the bytes of the condition, and dropped when the target's weights change.
    """

    def __init__(self, limit: int = 256, limit_bytes: int = 1 << 30) -> None:
        self.limit, self.limit_bytes = limit, limit_bytes
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

        With `alone` the bits of a state do not depend on the other prompts. Nor do they if the target has
        `prompt_rows`: passes then have the same size, whatever the prompts.
        """
        weights = tuple((parameter.data_ptr(), parameter._version) for parameter in target.parameters())
        if weights != self._weights:
            self._weights, self._states = weights, OrderedDict()
        kind = f"{rows} {needs_whole_prefix} {taps} {alone}"
        names = [_digest(condition, i, kind) for i in range(condition.batch)]
        new = {name: i for i, name in enumerate(names) if name not in self._states}
        size = 1 if alone else max(len(new), 1)
        if target.prompt_rows:
            size = max(target.prompt_rows // (rows * target.config.cls_token_num), 1)
        for first in range(0, len(new), size):
            together = list(new)[first : first + size]
            images = [new[name] for name in together]
            if target.prompt_rows:
                images += images[-1:] * (size - len(images))
            some = condition.select(images)
            states = read_prompts(target, some, rows=rows, needs_whole_prefix=needs_whole_prefix, taps=taps)
            self._states |= {name: states.at(i) for i, name in enumerate(together)}
        found = [self._states[name] for name in names]
        for name in names:
            self._states.move_to_end(name)
        size = sum(state.nbytes for state in self._states.values())
        while len(self._states) > self.limit or (size > self.limit_bytes and len(self._states) > len(set(names))):
            size -= self._states.popitem(last=False)[1].nbytes
        if found[0].seen is not None:
            longest = max(state.seen.shape[-1] for state in found if state.seen is not None)
            found = [state.with_slots(longest) for state in found]
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
    prefix = state.fill(cache)
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
    size = 1 if alone or target.prompt_rows else len(last)
    logits = torch.cat([target.head(of_one) for of_one in last.split(size)])
    return Start(cache, noise, state.mask, prefix, state.features, logits, state.fused)


def read_prompts(
    target: Target, condition: Condition, *, rows: int, needs_whole_prefix: bool, taps: tuple[int, ...] = ()
) -> PromptState:
    """Read both guidance rows of each prompt, which share its mask.

    Padding that all prompts share is cut off unless a drafter reads it or the target has `prompt_rows`. The rotary rows
    of the prompt are zero, so cutting changes nothing. A negative caption has its own mask, under which its row is
    read; codes attend to its mean value with the weight of the prompt's n words, as they do to the unconditional
    caption of n slots. ValueError for padding behind words, for more slots than the model has, and for a negative
    caption with a drafter that reads slots.
    """
    if target.has_token_prompts:
        if needs_whole_prefix or taps:
            raise ValueError("this drafter reads the prompt's slots or layers of a LlamaGen target: use another method")
        return _read_tokens(target, condition, rows)
    slots = target.config.cls_token_num
    negative = condition.negative if rows == 2 else None
    if negative is not None and needs_whole_prefix:
        raise ValueError("this drafter reads the slots of the prompt, and takes no negative prompt: use another method")
    is_padded = needs_whole_prefix or negative is not None or target.prompt_rows > 0
    condition = pad_prefix(condition, slots) if is_padded else cut_common_padding(condition)
    mask = prefix_mask(condition)
    if mask.shape[1] > slots:
        raise ValueError(f"the condition has {mask.shape[1]} slots, the model takes at most {slots}")
    inputs = embed_condition(target, condition, rows)
    seen = mask[:, None].expand(-1, rows, -1)
    if negative is not None:
        unconditional = embed_condition(target, pad_prefix(negative, slots), 1)
        inputs = torch.cat([inputs[:, :1], unconditional], 1)
        seen = torch.stack([mask, prefix_mask(pad_prefix(negative, slots))], 1)
    entered: dict[int, Tensor] = dict.fromkeys(taps, inputs)
    reported = {"entered": entered} if taps else {}
    features, means = target.read_prompt(inputs.flatten(0, 1), seen.flatten(0, 1), **reported)
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


def _read_tokens(target: Target, condition: Condition, rows: int) -> PromptState:
    """Read the first `rows` guidance rows of token prompts."""
    if condition.tokens is None or condition.mask is None:
        raise ValueError("this model takes token prompts: make the condition with its text encoder")
    tokens, seen = condition.tokens[:, :rows], condition.mask[:, :rows]
    features, entries = target.read_tokens(tokens.flatten(0, 1), seen.flatten(0, 1))
    return PromptState(
        means=None,
        features=features.unflatten(0, tokens.shape[:2]),
        mask=seen[:, 0, -1:],
        counts=seen[:, 0].sum(-1),
        entries=entries.unflatten(2, tokens.shape[:2]).movedim(2, 0),
        seen=seen,
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
    if state.entries is None:
        assert state.means is not None
        images, _, rows, heads, head_dim = state.means.shape
        prefix = 1 if dtype in (torch.float32, torch.float64) else 2
    else:
        images, _, _, rows, heads, prefix, head_dim = state.entries.shape
        dtype = state.entries.dtype
    least = FP32_ROWS if reproducible and weights.dtype == torch.float32 else 0
    expected = {"images": images, "rows": rows, "prefix": prefix, "codes": config.block_size, "stage": stage}
    expected["least_rows"] = least
    expected["columns"] = config.raster.columns if config.raster.newlines else 0
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
