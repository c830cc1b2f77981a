"""The pass over the prompt, with which every generation begins."""

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.decoding.cache import StaticCache
from lantern.noise import Noise
from lantern.sampling import Sampling
from lantern.types import Condition, Target

FP32_ROWS = 16  # from so many rows on, fp32 products were found to round alike


@dataclass(frozen=True)
class PromptState:
    """What a target makes of prompts: all that codes and drafters ever see of them.

    `means` are each layer's mean values over the words (see `Transformer.read_prompt`), `features` those of the last
    slot, or of all slots for drafters that read them, and `fused` what entered the layers that a drafter taps, if any;
    `mask` says which slots are no padding.
    """

    means: Float[Tensor, "b l r h d"]
    features: Float[Tensor, "b r t c"]
    mask: Bool[Tensor, "b t"]
    counts: Int[Tensor, " b"]
    fused: Float[Tensor, "b r t k"] | None = None

    def at(self, image: int) -> "PromptState":
        """The state of one image, as a batch of one."""
        parts: list[Any] = [None if part is None else part[image : image + 1] for part in _fields(self)]
        return PromptState(*parts)


@dataclass(frozen=True)
class Start:
    """What the pass over the prompt leaves: a filled cache, what codes see of it, the law of the first code."""

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
    """Prompt states of earlier calls, the latest `limit` of them: another seed of a prompt costs no pass over it.

    States are found by what the target is told, byte for byte, and forgotten when the target's weights change.
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
        """The states of these prompts; those that are new are read in one pass, or `alone`, each in a pass of its own.

        Alone, a state does not depend on the prompt's company, bit for bit.
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
    """Scores the prompt, or takes its state from `prompts`; `cache` is used again if it has the right size.

    `reproducible` says how attention is to round, see `make_cache`, and that prompts are read one by one.
    """
    if len(keys) != condition.batch:
        raise ValueError(f"got {len(keys)} noise keys for {condition.batch} images, wanted one (seed, number) each")
    if getattr(target, "training", False):
        raise ValueError("the target is in training mode, in which dropout is random: call .eval() on it first")
    prompts = prompts if prompts is not None else PromptCache()
    alone = reproducible or getattr(target, "is_fused", False)  # where passes keep their promise, prompts do too
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
        make_uniforms=getattr(target, "make_uniforms", None),  # of a target's runner, where it makes them faster
    )
    last = state.features[:, :, -1:]
    logits = torch.cat([target.head(of_one) for of_one in last.split(1 if alone else len(last))])
    return Start(cache, noise, state.mask, prefix_scores(state.counts, cache), state.features, logits, state.fused)


def read_prompts(
    target: Target, condition: Condition, *, rows: int, needs_whole_prefix: bool, taps: tuple[int, ...] = ()
) -> PromptState:
    """Both guidance rows of each prompt, which share its mask.

    The padding that all prompts share is cut off unless a drafter wants it: the rotary rows of the prompt are zero, so
    that cutting changes nothing. ValueError for padding behind words and for more slots than the model has.
    """
    slots = target.config.cls_token_num
    condition = pad_prefix(condition, slots) if needs_whole_prefix else cut_common_padding(condition)
    mask = prefix_mask(condition)
    if mask.shape[1] > slots:
        raise ValueError(f"the condition has {mask.shape[1]} slots, the model takes at most {slots}")
    inputs = embed_condition(target, condition, rows)
    entered: dict[int, Tensor] = dict.fromkeys(taps, inputs)
    told = {"entered": entered} if taps else {}
    features, means = target.read_prompt(inputs.flatten(0, 1), mask.repeat_interleave(rows, 0), **told)
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
    """What is added to the scores of the prompt's slots: log n for n words, as one number or as two.

    In half precision log n is off by up to 1.6 %: a second slot of the same value makes up for what the first lacks.
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
    """A cache of the size that these prompts ask for: `used` if it has it, else a fresh one.

    On a CPU it is fp32 whatever the model is: rotated keys are fp32 already, and attention is faster so. `reproducible`
    makes it fp64: codes lie in other places in a tree than in plain decoding, so attention adds them up in another
    order, and in fp64 the difference is gone once the result is rounded to the model's precision. In fp32 it asks for
    passes of at least FP32_ROWS rows too: a matrix product of fewer rows adds up in another order.
    """
    config, device = target.config, state.mask.device
    weights = target.tok_embeddings.weight
    dtype = torch.float32 if device.type == "cpu" else weights.dtype
    dtype = torch.float64 if reproducible else dtype
    images, _, rows, heads, head_dim = state.means.shape
    prefix = 1 if dtype in (torch.float32, torch.float64) else 2
    least = FP32_ROWS if reproducible and weights.dtype == torch.float32 else 0
    wanted = {"images": images, "rows": rows, "prefix": prefix, "codes": config.block_size, "stage": stage}
    wanted["least_rows"] = least
    if used is not None and {name: getattr(used, name) for name in wanted} == wanted and used.buffer.dtype == dtype:
        return used
    return StaticCache(layers=config.n_layer, heads=heads, head_dim=head_dim, dtype=dtype, device=device, **wanted)


def embed_condition(target: Target, condition: Condition, rows: int) -> Float[Tensor, "b r t c"]:
    """The conditional and, with guidance, the unconditional rows of each image."""
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
