"""The key-value cache, the mask of a pass over a draft tree, and the pass over the prompt that fills the cache."""

import copy
import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Target
from lantern.decoding.forced import ForcedCodes
from lantern.engines.prepared import original, weights_of

READ_CODES = 64  # known codes of a pass
FP32_ROWS = 16  # measured: fp32 products of this many rows or more round in the same way


class StaticCache:
    """Keys and values of all layers in one buffer, in three regions of slots.

        [ prefix: the prompt | codes: committed, slot i = code i | stage: nodes of the pass under way ]

    A pass writes its n nodes to the first n stage slots of every row, whatever the lengths of the images. Slots are
    therefore the same for all rows, and the ancestor part of the mask is constant. `commit` then copies the accepted
    nodes to the slots of their codes:

        stage  [a b c d]  path of image 0: a, c   codes 5.. -> [.. a c]
                          path of image 1: a, b   codes 7.. -> [.. a b]

    Memory starts as zeros unless `is_zeroed` is False: values that a pass reads and masks must be finite. The last
    code's slot is never read (nothing follows the last code), so writes past the end of the image go there. A target
    pads its passes to `least_rows`.

    With `columns` a row of codes is followed by a newline, which the loop does not see: behind the `slots` of masks
    lies one slot for the newline of each row of codes, and one for a newline behind each staged node. `commit` copies
    the newline of an accepted node with it. The slot of the last row's newline is never read, so that writes which are
    not needed go there. `first` is the position of code 0 in each row: the number of its prompt's tokens.
    """

    def __init__(
        self,
        *,
        layers: int,
        images: int,
        rows: int,
        heads: int,
        head_dim: int,
        prefix: int,
        codes: int,
        stage: int,
        dtype: torch.dtype,
        device: torch.device | str,
        least_rows: int = 0,
        columns: int = 0,
        is_zeroed: bool = True,
    ) -> None:
        self.least_rows = least_rows
        self.images, self.rows = images, rows
        self.prefix, self.codes, self.stage = prefix, codes, stage
        self.columns, lines = columns, codes // columns if columns else 0
        self._slots, self._first_staged_newline = prefix + codes + stage, prefix + codes + stage + lines
        size = (2 * layers, images * rows, heads, self._slots + (lines + stage if columns else 0), head_dim)
        first = torch.zeros(images * rows, 1, dtype=torch.long, device=device)
        make = torch.zeros if is_zeroed else torch.empty
        self._hold(make(size, dtype=dtype, device=device), slice(None), first)
        ends = torch.arange(1, lines + 1, device=device) * columns - 1 + prefix
        # the slot that each newline follows
        self._ahead = torch.cat([ends, torch.arange(stage if columns else 0, device=device) + prefix + codes])

    def _hold(self, memory: Float[Tensor, "2l r h s d"], rows: slice, first: Int[Tensor, "rows 1"]) -> None:
        self._memory, self.first = memory, first
        self.buffer = buffer = memory[:, rows]
        # which slots are seen with a newline behind them: of codes those that end a row, of nodes those last staged
        self._ends = torch.zeros(len(first), self._slots, dtype=torch.bool, device=first.device)
        self._ends[:, : self.first_stage_slot] = True
        self._layers = [buffer[layer : layer + 2] for layer in range(0, len(buffer), 2)]
        self._rows = torch.arange(len(first), device=first.device)[:, None]

    @classmethod
    def joined(
        cls, parts: Sequence["StaticCache"], earlier: "StaticCache | None" = None, used: Sequence[int] | None = None
    ) -> "StaticCache":
        """Return a cache of the images of caches of one `form`, which are views of its memory from then on.

        The memory of an `earlier` joined cache is used again if it has enough rows: parts that are views of rows in
        use must have their earlier places, and the others are copied to the rows between them. With `used`, only the
        first slots of each part are copied, so many of them; others hold anything, for passes that do not read what a
        mask hides.
        """
        made, first = copy.copy(parts[0]), torch.cat([part.first for part in parts])
        made.images = sum(part.images for part in parts)
        if earlier is not None and earlier._memory.shape[1] >= len(first):
            memory = earlier._memory
        else:
            layers, _, *sizes = parts[0].buffer.shape
            memory = parts[0].buffer.new_empty(layers, len(first), *sizes)
        made._hold(memory, slice(len(first)), first)
        at = 0
        for part, count in zip(parts, used or [parts[0].buffer.shape[3]] * len(parts), strict=True):
            rows = slice(at, at := at + len(part.first))
            buffer = memory[:, rows]
            if part.buffer.data_ptr() != buffer.data_ptr():
                buffer[..., :count, :].copy_(part.buffer[..., :count, :])
            part._hold(memory, rows, first[rows])
        return made

    def with_codes(self, codes: int) -> "StaticCache":
        """Return a cache of the same prompts with empty slots for this many codes."""
        layers, _, heads, _, head_dim = self.buffer.shape
        made = StaticCache(
            layers=layers // 2,
            images=self.images,
            rows=self.rows,
            heads=heads,
            head_dim=head_dim,
            prefix=self.prefix,
            codes=codes,
            stage=self.stage,
            dtype=self.buffer.dtype,
            device=self.buffer.device,
            least_rows=self.least_rows,
            columns=self.columns,
        )
        made.buffer[..., : self.prefix, :] = self.buffer[..., : self.prefix, :]
        made.first.copy_(self.first)
        return made

    @property
    def form(self) -> tuple[object, ...]:
        """What caches must have in common to be joined."""
        sizes = (self.rows, self.prefix, self.codes, self.stage, self.columns, self.least_rows)
        return (*sizes, self.buffer.dtype, self.buffer.device)

    @property
    def slots(self) -> int:
        """Number of slots of a row, those of newlines excluded."""
        return self._slots

    @property
    def first_stage_slot(self) -> int:
        """Index of the first stage slot."""
        return self.prefix + self.codes

    def write(
        self, layer: int, slots: Int[Tensor, "b n"], fresh: Float[Tensor, "b n 2 h d"]
    ) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b h s d"]]:
        """Store n keys and values of a layer at `slots`, the same for every row; return all keys and values of it."""
        both = self.layer(layer)
        both.index_copy_(3, slots[0], fresh.permute(2, 0, 3, 1, 4).to(both.dtype))
        return both[0], both[1]

    def write_newlines(
        self, layer: int, nodes: Int[Tensor, "b n"], fresh: Float[Tensor, "b n 2 h d"], is_real: Bool[Tensor, "b n"]
    ) -> None:
        """Store keys and values of the newlines behind `nodes`, given by their slots, where `is_real`."""
        staged = self._first_staged_newline + nodes - self.first_stage_slot
        places = torch.where(nodes < self.first_stage_slot, self._slots + (nodes - self.prefix) // self.columns, staged)
        places = places.where(is_real, self._first_staged_newline - 1)
        self._layers[layer][:, self._rows, :, places] = fresh.to(self.buffer.dtype)

    def newline_mask(
        self, mask: Float[Tensor, "rows n s"], slots: Int[Tensor, "rows n"], is_end: Bool[Tensor, "rows n"]
    ) -> Float[Tensor, "rows n m"]:
        """Return the mask of newlines: seen with the code that they follow, if it ends a row (`is_end` if staged).

        Nodes that were staged by earlier passes keep their newlines.

        A node that ends a row sees its own newline too, as the newline itself does; nodes must not.
        """
        self._ends.scatter_(1, slots, is_end | (slots < self.first_stage_slot))
        return mask[..., self._ahead].masked_fill(~self._ends[:, None, self._ahead], -torch.inf)

    def is_own_newline(self, slots: Int[Tensor, "rows n"]) -> Bool[Tensor, "rows n m"]:
        """Return which newline follows each of these slots."""
        return slots[..., None] == self._ahead

    def write_prompt(self, entries: Float[Tensor, "b l 2 r h t d"], first: Int[Tensor, "b r"]) -> None:
        """Fill the prefix with keys and values of a prompt, and set the position of code 0 in each row."""
        flat = entries.permute(1, 2, 0, 3, 4, 5, 6).flatten(2, 3).flatten(0, 1)
        self.buffer[:, :, :, : self.prefix] = flat.to(self.buffer.dtype)
        self.first.copy_(first.reshape(-1, 1))

    def layer(self, number: int) -> Float[Tensor, "2 b h s d"]:
        """Return keys and values of a layer."""
        return self._layers[number]

    def write_prefix(self, means: Float[Tensor, "b l r h d"]) -> None:
        """Fill every prefix slot with these values and keys of zeros: all that codes see of the prompt."""
        values = means.transpose(0, 1).flatten(1, 2)
        self.buffer[1::2, :, :, : self.prefix] = values[:, :, :, None].to(self.buffer.dtype)
        self.buffer[0::2, :, :, : self.prefix] = 0.0

    def commit(self, nodes: Int[Tensor, "b m"], start: Int[Tensor, " b"]) -> None:
        """Copy staged node `nodes[:, j]` to the slot of code `start + j`; past the end, to the last slot.

        Entries that were not accepted may be copied too: the mask hides them until they are overwritten.
        """
        steps = torch.arange(nodes.shape[1], device=nodes.device)
        self.move(nodes, start[:, None] + steps)

    def move(self, nodes: Int[Tensor, "b m"], codes: Int[Tensor, "b m"]) -> None:
        """Copy staged node `nodes[:, j]` to the slot of code `codes[:, j]`; past the end, to the last slot."""
        source = nodes + self.first_stage_slot
        places = codes.clamp(max=self.codes - 1) + self.prefix
        if self.columns:
            newlines = self._first_staged_newline + nodes
            is_end = (places - self.prefix + 1) % self.columns == 0
            behind = (self._slots + (places - self.prefix) // self.columns).where(
                is_end, self._first_staged_newline - 1
            )
            source, places = torch.cat([source, newlines], 1), torch.cat([places, behind], 1)
        if self.images == 1:
            self.buffer.index_copy_(3, places[0], self.buffer.index_select(3, source[0]))
            return
        source = source.repeat_interleave(self.rows, 0)
        places = places.repeat_interleave(self.rows, 0)
        self.buffer[:, self._rows, :, places] = self.buffer[:, self._rows, :, source]


def by_row(scores: Float[Tensor, "*b t"]) -> Float[Tensor, "b r 1 t"]:
    """Return the scores of prefix slots, of images or of each row of them, in the shape of a mask."""
    return scores[:, None, None] if scores.ndim == 2 else scores[:, :, None]


class TreeMask:
    """Mask `(images x rows, nodes, slots)` of a pass over staged nodes, added to attention scores: 0 or -inf.

    Each node sees the prompt, the committed codes and its own ancestors. `prefix` holds the values added at the slots
    of the prompt, or which of them are seen, of each image or of each of its rows. For prompt "p", two
    committed codes of four, and the tree a(b c(d)), with 0 shown as 1 and -inf as a dot:

              p | 0 1 2 3 | a b c d
        a     1 | 1 1 . . | 1 . . .
        b     1 | 1 1 . . | 1 1 . .
        c     1 | 1 1 . . | 1 . 1 .
        d     1 | 1 1 . . | 1 . 1 1
    """

    def __init__(self, cache: StaticCache, prefix: Bool[Tensor, "*b t"] | Float[Tensor, "*b t"], nodes: int) -> None:
        self._cache, dtype, device = cache, cache.buffer.dtype, prefix.device
        size = (cache.images, cache.rows, nodes, cache.slots)
        self._buffer = torch.full(size, -torch.inf, dtype=dtype, device=device)
        self._shown, self._hidden = torch.tensor([0.0, -torch.inf], dtype=dtype, device=device).unbind()
        scores = self._scores(prefix) if prefix.dtype == torch.bool else prefix.to(dtype)
        self._buffer[..., : cache.prefix] = by_row(scores)
        self._codes = torch.arange(cache.codes, device=device)
        self._last: Tensor | None = None

    def update(self, lengths: Int[Tensor, " b"], ancestors: Bool[Tensor, "*b n m"]) -> Float[Tensor, "rows n s"]:
        """Return the mask of n nodes, which see `lengths` committed codes and `ancestors` among m stage slots."""
        nodes, width = ancestors.shape[-2:]
        view = self._buffer[:, :, :nodes]
        first = self._cache.first_stage_slot
        view[..., self._cache.prefix : first] = self._scores(self._codes < lengths[:, None])[:, None, None]
        if ancestors is not self._last:  # a static tree is written once
            seen = self._scores(ancestors)
            view[..., first : first + width] = seen if seen.ndim == 2 else seen[:, None]
            view[..., first + width :] = -torch.inf
            self._last = ancestors
        return view.flatten(0, 1)

    def _scores(self, seen: Bool[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        return torch.where(seen, self._shown, self._hidden)


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
    """Results of the pass over the prompt: a filled cache, its mask, the logits of the first code, and forced codes.

    `prefix` is added to the attention scores of the prompt's slots, of each image or of each guidance row.
    """

    cache: StaticCache
    noise: Noise
    mask: Bool[Tensor, "b t"]
    prefix: Float[Tensor, "b p"] | Float[Tensor, "b r p"]
    features: Float[Tensor, "b r t c"]
    logits: Float[Tensor, "b r 1 v"]
    fused: Float[Tensor, "b r t k"] | None = None
    forced: ForcedCodes | None = None


@dataclass(frozen=True)
class CodesRead:
    """Results of `passes` over known codes: the features of each, and the inputs of tapped layers side by side."""

    features: Float[Tensor, "b r m c"]
    fused: Float[Tensor, "b r m k"] | None
    passes: int


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
        weights = weights_of(original(target))
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
    forced: Int[Tensor, "b n"] | None = None,
    codes: int | None = None,
) -> Start:
    """Score the prompt, or take its state from `prompts`; `cache` is reused if it has the right size.

    The cache has slots for `codes` codes, by default for all of an image. `forced` are given codes, -1
    where codes are sampled (`ForcedCodes`).

    With `reproducible` prompts are read one by one, and the cache is that of reproducible decoding (`make_cache`).
    ValueError for a target in training mode and for another number of noise keys.
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
    cache = make_cache(target, state, stage, reproducible, cache, codes)
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
    given = None
    if forced is not None:
        given = ForcedCodes(forced.to(logits.device))
        given.checked(images=len(keys), codes=config.block_size, vocab_size=config.vocab_size)
        logits = given.logits(logits, forced.new_zeros(len(keys), 1).to(logits.device))
    return Start(cache, noise, state.mask, prefix, state.features, logits, state.fused, given)


@torch.no_grad()
def read_codes(
    target: Target, cache: StaticCache, prefix: Tensor, codes: Int[Tensor, "b m"], *, taps: tuple[int, ...] = ()
) -> CodesRead:
    """Write keys and values of the first m codes to the cache, READ_CODES in a pass; return their features.

    `prefix` is added to the attention scores of the prompt's slots (`Start`).
    An engine runs these passes only if its bits do not depend on the size of a pass: others would compile this size.
    """
    images, rows, count = len(codes), cache.rows, codes.shape[1]
    is_whole = bool(taps) or target.is_batch_invariant
    numbers = torch.arange(count, device=codes.device)
    found, entered = list[Tensor](), list[Tensor]()
    for block in numbers.split(READ_CODES):
        mask = cache.buffer.new_full((images, rows, len(block), cache.slots), -torch.inf)
        mask[..., : cache.prefix] = by_row(prefix)
        mask[..., cache.prefix : cache.prefix + count].masked_fill_(numbers <= block[:, None], 0.0)
        places = block.expand(images * rows, -1)
        inputs = target.tok_embeddings(codes[:, block]).repeat_interleave(rows, 0)
        positions, slots = places + target.config.cls_token_num, places + cache.prefix
        how: dict[str, Any] = {"cache": cache, "slots": slots}
        if is_whole:
            scores = target(inputs, positions, mask.flatten(0, 1), taps=taps, **how)
            found.append(scores.features)
            entered += [] if scores.fused is None else [scores.fused]
        else:
            found.append(target.features(inputs, positions, mask.flatten(0, 1), **how))
    features = torch.cat(found, 1).unflatten(0, (images, rows))
    fused = torch.cat(entered, 1).unflatten(0, (images, rows)) if taps else None
    return CodesRead(features, fused, len(found))


def read_prompts(
    target: Target, condition: Condition, *, rows: int, needs_whole_prefix: bool, taps: tuple[int, ...] = ()
) -> PromptState:
    """Read both guidance rows of each prompt, which share its mask.

    Padding that all prompts share is cut off unless the target has `prompt_rows`. The rotary rows of the prompt are
    zero, so cutting changes nothing but the order of sums. This order must not depend on the drafter, or codes would
    differ from plain decoding's where two are nearly equal: what a drafter reads of padding comes from a pass of its
    own, and only from there. A negative caption has its own mask, under which its row is
    read; codes attend to its mean value with the weight of the prompt's n words, as they do to the unconditional
    caption of n slots. ValueError for padding behind words, for more slots than the model has, and for a negative
    caption with a drafter that reads slots.
    """
    if target.has_token_prompts:
        if needs_whole_prefix:
            raise ValueError(
                "this drafter reads the prompt slot by slot, but here each guidance row has a prompt of its own:"
                " use another method"
            )
        return _read_tokens(target, condition, rows, taps)
    slots = target.config.cls_token_num
    negative = condition.negative if rows == 2 else None
    if negative is not None and needs_whole_prefix:
        raise ValueError("this drafter reads the slots of the prompt, and takes no negative prompt: use another method")
    is_padded = negative is not None or target.prompt_rows > 0
    given = condition
    condition = pad_prefix(condition, slots) if is_padded else cut_common_padding(condition)
    mask = prefix_mask(condition)
    if mask.shape[1] > slots:
        raise ValueError(f"the condition has {mask.shape[1]} slots, the model takes at most {slots}")
    counts, inputs = mask.sum(1), embed_condition(target, condition, rows)
    seen = mask[:, None].expand(-1, rows, -1)
    if negative is not None:
        unconditional = embed_condition(target, pad_prefix(negative, slots), 1)
        inputs = torch.cat([inputs[:, :1], unconditional], 1)
        seen = torch.stack([mask, prefix_mask(pad_prefix(negative, slots))], 1)
    features, means, fused = _read_slots(target, inputs, seen, taps)
    if needs_whole_prefix:
        whole = pad_prefix(given, slots)
        mask, missing = prefix_mask(whole), prefix_mask(whole).shape[1] - mask.shape[1]
        if missing:
            inputs = embed_condition(target, whole, rows)
            padded, _, entered = _read_slots(target, inputs, mask[:, None].expand(-1, rows, -1), taps)
            # padding sees padding; the last slot gives code 0, be it a word or not
            is_own = torch.nn.functional.pad(mask[:, :-1], (0, 1), value=True)[:, None, :, None]
            lengthened = partial(torch.nn.functional.pad, pad=(0, 0, missing, 0))
            features = torch.where(is_own, lengthened(features), padded)
            fused = None if fused is None or entered is None else torch.where(is_own, lengthened(fused), entered)
    else:
        features, fused, mask = features[:, :, -1:], None if fused is None else fused[:, :, -1:], mask[:, -1:]
    return PromptState(means, features, mask, counts, fused)


def _read_slots(
    target: Target, inputs: Float[Tensor, "b r t c"], seen: Bool[Tensor, "b r t"], taps: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return features `(b r t c)`, mean values `(b l r h d)`, and the inputs of tapped layers side by side."""
    entered: dict[int, Tensor] = dict.fromkeys(taps, inputs)
    reported = {"entered": entered} if taps else {}
    features, means = target.read_prompt(inputs.flatten(0, 1), seen.flatten(0, 1), **reported)
    shape = inputs.shape[:2]
    fused = torch.cat([entered[layer] for layer in taps], -1).unflatten(0, shape) if taps else None
    return features.unflatten(0, shape), means.unflatten(1, shape).transpose(0, 1), fused


def _read_tokens(target: Target, condition: Condition, rows: int, taps: tuple[int, ...]) -> PromptState:
    """Read the first `rows` guidance rows of token prompts."""
    if condition.tokens is None or condition.mask is None:
        raise ValueError("this model takes token prompts: make the condition with its text encoder")
    tokens, seen = condition.tokens[:, :rows], condition.mask[:, :rows]
    entered: dict[int, Any] = dict.fromkeys(taps)
    reported = {"entered": entered} if taps else {}
    features, entries = target.read_tokens(tokens.flatten(0, 1), seen.flatten(0, 1), **reported)
    fused = torch.cat([entered[layer] for layer in taps], -1).unflatten(0, tokens.shape[:2]) if taps else None
    return PromptState(
        means=None,
        features=features.unflatten(0, tokens.shape[:2]),
        mask=seen[:, 0, -1:],
        counts=seen[:, 0].sum(-1),
        fused=fused,
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
    target: Target,
    state: PromptState,
    stage: int,
    reproducible: bool = False,
    used: StaticCache | None = None,
    codes: int | None = None,
) -> StaticCache:
    """Return a cache of the size that these prompts and `codes` codes need: `used` if it fits, else a new one.

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
    expected = {"images": images, "rows": rows, "prefix": prefix, "stage": stage}
    expected["codes"] = config.block_size if codes is None else codes
    expected["least_rows"] = least
    expected["columns"] = config.raster.columns if config.raster.newlines else 0
    if used is not None and {name: getattr(used, name) for name in expected} == expected and used.buffer.dtype == dtype:
        return used
    sizes = {"layers": config.n_layer, "heads": heads, "head_dim": head_dim} | expected
    is_zeroed = target.reads_masked or dtype != torch.float32
    return StaticCache(dtype=dtype, device=device, is_zeroed=is_zeroed, **sizes)


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
