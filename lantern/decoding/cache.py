"""The key-value cache, the mask of a pass over a draft tree, and the prompts that fill the cache.

Prompts are read, or found among those of earlier calls.
"""

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from lantern.core.types import Condition, Prompt, Scores, Target
from lantern.core.weights import original, weights_of

LARGEST_FP8 = 448.0  # of e4m3
READ_TOKENS = 64  # known tokens of a pass
FP32_ROWS = 16  # measured: fp32 products of this many rows or more round in the same way


class StaticCache:
    """Keys and values of all layers in one buffer, in three regions of slots.

        [ prefix: the prompt | tokens: committed, slot i = token i | stage: nodes of the pass under way ]

    A pass writes its n nodes to the first n stage slots of every row, whatever the lengths of the images. Slots are
    therefore the same for all rows, and the ancestor part of the mask is constant. `commit` then copies the accepted
    nodes to the slots of their tokens:

        stage  [a b c d]  path of image 0: a, c   tokens 5.. -> [.. a c]
                          path of image 1: a, b   tokens 7.. -> [.. a b]

    Keys and values are stored in the `dtype` of masks, or with `is_fp8` in a byte each: the bits of e4m3, rounded to
    nearest even, at most 448. Passes read them in `dtype`.

    Memory starts as zeros: values that a pass reads and masks must be finite. The slot of the last token is never read
    (nothing follows it), and writes past the end of the image go to stage slots, which the next pass overwrites. A
    target pads its passes to `least_rows`.

    With `columns` a row of tokens is followed by a newline, which the loop does not see: behind the `slots` of masks
    lies one slot for the newline of each row of tokens, and one for a newline behind each staged node. `commit` copies
    the newline of an accepted node with it. The slot of the last row's newline is never read, so that writes which are
    not needed go there. `first` is the position of token 0 in each row: the number of its prompt's tokens.
    """

    prefix_scores: Float[Tensor, "b r p"]
    is_freed: bool = False
    _mask: "TreeMask | None" = None

    def __init__(
        self,
        *,
        layers: int,
        images: int,
        rows: int,
        heads: int,
        head_dim: int,
        prefix: int,
        tokens: int,
        stage: int,
        dtype: torch.dtype,
        device: torch.device | str,
        least_rows: int = 0,
        columns: int = 0,
        is_fp8: bool = False,
    ) -> None:
        self.least_rows, self.dtype, self.is_fp8 = least_rows, dtype, is_fp8
        self.images, self.rows = images, rows
        self.prefix, self.tokens, self.stage = prefix, tokens, stage
        self.columns, lines = columns, tokens // columns if columns else 0
        self.first_stage_slot, self.slots = prefix + tokens, prefix + tokens + stage
        self._first_staged_newline = self.slots + lines
        size = (2 * layers, images * rows, heads, self.slots + (lines + stage if columns else 0), head_dim)
        first = torch.zeros(images * rows, 1, dtype=torch.long, device=device)
        memory = torch.zeros(size, dtype=torch.uint8 if is_fp8 else dtype, device=device)
        self._hold(memory, slice(None), first)
        self._first_slots = torch.arange(stage, device=device) + prefix
        ends = torch.arange(1, lines + 1, device=device) * columns - 1 + prefix
        # the slot that each newline follows
        self._ahead = torch.cat([ends, self._first_slots[: stage if columns else 0] + tokens])

    def _hold(self, memory: Float[Tensor, "2l r h s d"], rows: slice, first: Int[Tensor, "rows 1"]) -> None:
        self._memory, self.first = memory, first
        self.buffer = buffer = memory[:, rows]
        # which slots are seen with a newline behind them: of tokens those that end a row, of nodes those last staged
        self._ends = torch.zeros(len(first), self.slots, dtype=torch.bool, device=first.device)
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

    def copy_image(self, place: int, other: "StaticCache", of: int) -> None:
        """Copy keys, values and mask of an image of a cache of another number of images to a place."""
        mine, its = (slice(i * self.rows, (i + 1) * self.rows) for i in (place, of))
        self.buffer[:, mine].copy_(other.buffer[:, its])
        self.first[mine].copy_(other.first[its])
        self._ends[mine].copy_(other._ends[its])
        if self._mask is not None and other._mask is not None:
            self._mask.buffer[place].copy_(other._mask.buffer[of])

    def leave(self) -> None:
        """Copy this part of a joined cache to memory of its own."""
        self._hold(self.buffer.clone(), slice(None), self.first.clone())

    @classmethod
    def of(cls, earlier: "Self | None", **sizes: Any) -> "Self":
        """Return an earlier cache if it has the given sizes, else a new one; the arguments are those of the class."""
        names = ("images", "rows", "prefix", "tokens", "stage", "least_rows", "columns", "is_fp8")
        wanted = [*(sizes.get(name, 0) for name in names), sizes["dtype"], torch.device(sizes["device"])]
        if earlier is not None and not earlier.is_freed:
            found = [*(getattr(earlier, name) for name in names), earlier.dtype, earlier.buffer.device]
            if found == wanted:
                return earlier
            earlier.free()
        return cls(**sizes)

    def free(self) -> None:
        """Give up the memory, before another cache takes its place."""
        self._memory = self.buffer = self.first[:0]
        self._layers, self._mask, self.is_freed = [], None, True

    def tree_mask(
        self, prefix: Bool[Tensor, "*b t"] | Float[Tensor, "*b t"], nodes: int, *, hides: bool = True
    ) -> "TreeMask":
        """Return the mask of passes over up to `nodes` staged nodes: the same one as long as their number is the same.

        `prefix` holds the values added at the slots of the prompt, or which of them are seen, of each image or of each
        of its rows. With `hides` it hides tokens that are not committed, else it shows all slots of tokens.
        """
        if self._mask is None or (self._mask.nodes, self._mask.hides) != (nodes, hides):
            self._mask = TreeMask(self, nodes, hides)
        self._mask.show(prefix)
        return self._mask

    @property
    def form(self) -> tuple[object, ...]:
        """What caches must have in common to be joined."""
        sizes = (self.rows, self.prefix, self.tokens, self.stage, self.columns, self.least_rows)
        return (*sizes, self.dtype, self.is_fp8, self.buffer.device)

    def write(
        self, layer: int, slots: Int[Tensor, "b n"], fresh: Float[Tensor, "b n 2 h d"]
    ) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b h s d"]]:
        """Store n keys and values of a layer at `slots`, the same for every row; return all keys and values of it."""
        both = self.layer(layer)
        both.index_copy_(3, slots[0], self.stored(fresh.permute(2, 0, 3, 1, 4)))
        keys, values = both.view(torch.float8_e4m3fn).to(self.dtype) if self.is_fp8 else both
        return keys, values

    def stored(self, numbers: Float[Tensor, "*n"]) -> Tensor:
        """Return keys or values as the cache stores them."""
        if not self.is_fp8:
            return numbers.to(self.dtype)
        # versions of torch differ in what larger numbers become
        return numbers.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8)

    def write_newlines(
        self, layer: int, nodes: Int[Tensor, "b n"], fresh: Float[Tensor, "b n 2 h d"], is_real: Bool[Tensor, "b n"]
    ) -> None:
        """Store keys and values of the newlines behind `nodes`, given by their slots, where `is_real`."""
        staged = self._first_staged_newline + nodes - self.first_stage_slot
        places = torch.where(nodes < self.first_stage_slot, self.slots + (nodes - self.prefix) // self.columns, staged)
        places = places.where(is_real, self._first_staged_newline - 1)
        self._layers[layer][:, self._rows, :, places] = self.stored(fresh)

    def newline_mask(
        self, mask: Float[Tensor, "rows n s"], slots: Int[Tensor, "rows n"], is_end: Bool[Tensor, "rows n"]
    ) -> Float[Tensor, "rows n m"]:
        """Return the mask of newlines: seen with the token that they follow, if it ends a row (`is_end` if staged).

        Nodes that were staged by earlier passes keep their newlines.

        A node that ends a row sees its own newline too, as the newline itself does; nodes must not.
        """
        self._ends.scatter_(1, slots, is_end | (slots < self.first_stage_slot))
        return mask[..., self._ahead].masked_fill(~self._ends[:, None, self._ahead], -torch.inf)

    def is_own_newline(self, slots: Int[Tensor, "rows n"]) -> Bool[Tensor, "rows n m"]:
        """Return which newline follows each of these slots."""
        return slots[..., None] == self._ahead

    def fill(self, prompt: Prompt) -> None:
        """Write what a target read of prompts; `prefix_scores` are added to the attention scores of their slots."""
        flat = prompt.entries.permute(1, 2, 0, 3, 4, 5, 6).flatten(2, 3).flatten(0, 1)
        self.buffer[:, :, :, : self.prefix] = self.stored(flat)
        self.first.copy_(prompt.first.reshape(-1, 1))
        self.prefix_scores = prompt.scores.to(self.dtype)

    def layer(self, number: int) -> Float[Tensor, "2 b h s d"]:
        """Return keys and values of a layer."""
        return self._layers[number]

    def commit(self, nodes: Int[Tensor, "b m"], start: Int[Tensor, " b"]) -> None:
        """Copy staged node `nodes[:, j]` to the slot of token `start + j`; past the end, to the stage.

        Entries that were not accepted may be copied too: the mask hides them until they are overwritten.
        """
        self._copy(nodes, start[:, None] + self._first_slots[: nodes.shape[1]])

    def move(self, nodes: Int[Tensor, "b m"], tokens: Int[Tensor, "b m"]) -> None:
        """Copy staged node `nodes[:, j]` to the slot of token `tokens[:, j]`."""
        self._copy(nodes, tokens + self.prefix)

    def _copy(self, nodes: Int[Tensor, "b m"], places: Int[Tensor, "b m"]) -> None:
        """Copy staged nodes to slots of tokens."""
        staged = self.buffer[:, :, :, self.first_stage_slot :]
        if self.columns:
            last = self._first_staged_newline - 1
            is_end = (places - self.prefix + 1) % self.columns == 0
            behind = (self.slots + (places - self.prefix) // self.columns).where(is_end, last)
            nodes = torch.cat([nodes, nodes + (last + 1 - self.first_stage_slot)], 1)
            places = torch.cat([places, behind], 1)
        if self.images == 1:
            self.buffer.index_copy_(3, places[0], staged.index_select(3, nodes[0]))
            return
        nodes, places = nodes.repeat_interleave(self.rows, 0), places.repeat_interleave(self.rows, 0)
        self.buffer[:, self._rows, :, places] = staged[:, self._rows, :, nodes]


def by_line(values: Shaped[Tensor, "b n *rest"], rows: int) -> Shaped[Tensor, "lines n *rest"]:
    """Return the values of images for each of their guidance rows, those of one image without a copy."""
    return values[:, None].expand(-1, rows, *values.shape[1:]).flatten(0, 1)


def by_row(scores: Float[Tensor, "*b t"]) -> Float[Tensor, "b r 1 t"]:
    """Return the scores of prefix slots, of images or of each row of them, in the shape of a mask."""
    return scores[:, None, None] if scores.ndim == 2 else scores[:, :, None]


class TreeMask:
    """Mask `(images x rows, nodes, slots)` of a pass over staged nodes, added to attention scores: 0 or -inf.

    Each node sees the prompt, the committed tokens and its own ancestors. For prompt "p", two committed tokens of four,
    and the tree a(b c(d)), with 0 shown as 1 and -inf as a dot:

              p | 0 1 2 3 | a b c d
        a     1 | 1 1 . . | 1 . . .
        b     1 | 1 1 . . | 1 1 . .
        c     1 | 1 1 . . | 1 . 1 .
        d     1 | 1 1 . . | 1 . 1 1
    """

    def __init__(self, cache: StaticCache, nodes: int, hides: bool) -> None:
        dtype, device = cache.dtype, cache.buffer.device
        size = (cache.images, cache.rows, nodes, cache.slots)
        self.buffer = torch.full(size, -torch.inf, dtype=dtype, device=device)
        self._shown, self._hidden = torch.tensor([0.0, -torch.inf], dtype=dtype, device=device).unbind()
        self._tokens = torch.arange(cache.tokens, device=device)
        self.nodes, self.hides, self._prefix, self._first = nodes, hides, cache.prefix, cache.first_stage_slot
        self.buffer[..., self._prefix : self._first] = 0.0
        self._last: Tensor | None = None

    def show(self, prefix: Bool[Tensor, "*b t"] | Float[Tensor, "*b t"]) -> None:
        """Take over the values of a prompt's slots, as in `StaticCache.tree_mask`."""
        scores = self._scores(prefix) if prefix.dtype == torch.bool else prefix.to(self.buffer.dtype)
        self.buffer[..., : self._prefix] = by_row(scores)

    def update(self, lengths: Int[Tensor, " b"], ancestors: Bool[Tensor, "*b n m"]) -> Float[Tensor, "rows n s"]:
        """Return the mask of n nodes, which see `lengths` committed tokens and `ancestors` among m stage slots."""
        nodes, width = ancestors.shape[-2:]
        view, first = self.buffer[:, :, :nodes], self._first
        if self.hides:
            tokens = view[..., self._prefix : first]
            is_known = (self._tokens < lengths[:, None])[:, None, None].expand_as(tokens)
            torch.where(is_known, self._shown, self._hidden, out=tokens)
        if ancestors is not self._last:  # a static tree is written once
            seen = self._scores(ancestors)
            view[..., first : first + width] = seen if seen.ndim == 2 else seen[:, None]
            view[..., first + width :] = -torch.inf
            self._last = ancestors
        return view.flatten(0, 1)

    def _scores(self, seen: Bool[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        return torch.where(seen, self._shown, self._hidden)


class PromptCache:
    """Prompts of earlier calls, so that another seed needs no pass over them.

    It holds the latest `limit` prompts, of at most `limit_bytes` together beside those of the last call. They are
    looked up by the bytes of the condition and the engine that read them, which rounds in its own way, and dropped when
    the target's weights change.
    """

    def __init__(self, limit: int = 256, limit_bytes: int = 1 << 30) -> None:
        self.limit, self.limit_bytes = limit, limit_bytes
        self._held: tuple[tuple[Any, ...], OrderedDict[bytes, Prompt]] = (), OrderedDict()

    def __len__(self) -> int:
        return len(self._held[1])

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
        weights, (of, held) = weights_of(original(target)), self._held
        if weights != of:
            held = OrderedDict()
            self._held = weights, held  # which another thread may replace meanwhile, or take prompts from
        kind = f"{type(target).__qualname__} {rows} {whole} {taps} {alone}"
        names = [_digest(condition, i, kind) for i in range(condition.batch)]
        prompts = {name: prompt for name in names if (prompt := held.get(name)) is not None}
        new = {name: i for i, name in enumerate(names) if name not in prompts}
        size = 1 if alone else max(len(new), 1)
        for first in range(0, len(new), size):
            some = list(new)[first : first + size]
            found = target.read(condition.select([new[name] for name in some]), rows, whole=whole, taps=taps)
            prompts |= {name: found.at(i) for i, name in enumerate(some)}
        for name in names:
            held.pop(name, None)
            held[name] = prompts[name]
        size = sum(prompt.nbytes for prompt in list(held.values()))
        while len(held) > self.limit or (size > self.limit_bytes and len(held) > len(set(names))):
            size -= held.popitem(last=False)[1].nbytes
        return replace(Prompt.joined([prompts[name] for name in names]), condition=condition)


@dataclass(frozen=True)
class CacheKind:
    """How keys and values are kept: in fp8 if `is_fp8`, those of prompts padded to a `multiple` of slots.

    With `is_wide`, for reproducible decoding, prompts are read one by one and the cache is fp64: tokens are at other
    slots in a tree than in plain decoding, so attention sums them in another order, and in fp64 the difference vanishes
    when the result is rounded to the model's precision. For fp32 models passes then have at least FP32_ROWS rows too,
    since a matrix product of fewer rows sums in another order.
    """

    is_wide: bool = False
    is_fp8: bool = False
    multiple: int = 1


FULL_CACHE = CacheKind()


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
    kind: CacheKind = FULL_CACHE,
) -> tuple[Prompt, StaticCache]:
    """Read prompts as `Target.read` does, or find them in `prompts`, and fill a cache with `stage` slots for nodes.

    `cache` is reused if it has the right size and kind. ValueError for a target in training mode.
    """
    if target.training:
        raise ValueError("the target is in training mode, in which dropout is random: call .eval() on it first")
    prompts = prompts if prompts is not None else PromptCache()
    prompt = prompts.read(target, condition, rows, whole=whole, taps=taps, alone=kind.is_wide)
    prompt = prompt.with_slots(-(-prompt.scores.shape[-1] // kind.multiple) * kind.multiple)
    config, is_fp32 = target.config, target.tok_embeddings.weight.dtype == torch.float32
    images, layers, _, rows, heads, prefix, head_dim = prompt.entries.shape
    sizes = {"layers": layers, "images": images, "rows": rows, "heads": heads, "head_dim": head_dim, "prefix": prefix}
    sizes |= {"tokens": config.block_size, "stage": stage}
    sizes["columns"] = config.raster.columns if config.raster.newlines else 0
    sizes["least_rows"] = FP32_ROWS if kind.is_wide and is_fp32 else 0
    dtype = torch.float64 if kind.is_wide else prompt.entries.dtype
    cache = StaticCache.of(cache, **sizes, dtype=dtype, device=prompt.mask.device, is_fp8=kind.is_fp8)
    cache.fill(prompt)
    return prompt, cache


@torch.no_grad()
def read_tokens(
    target: Target,
    cache: StaticCache,
    tokens: Int[Tensor, "b m"],
    *,
    taps: tuple[int, ...] = (),
    size: int | None = None,
) -> tuple[Scores, int]:
    """Write keys and values of the first m tokens to the cache, `size` in a pass, by default READ_TOKENS.

    Return the features at each token, without logits, and the number of passes. An engine runs them only if it need
    not compile their size (`Target.features`), or for taps.
    """
    images, rows, count = len(tokens), cache.rows, tokens.shape[1]
    numbers = torch.arange(count, device=tokens.device)
    found, entered = list[Tensor](), list[Tensor]()
    for block in numbers.split(size or READ_TOKENS):
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
            entered += [] if scores.tapped is None else [scores.tapped]
        else:
            found.append(target.features(inputs, positions, mask.flatten(0, 1), **how))
    features = torch.cat(found, 1).unflatten(0, (images, rows))
    tapped = torch.cat(entered, 1).unflatten(0, (images, rows)) if taps else None
    return Scores(features[..., :0], features, tapped), len(found)


def reading_passes(forced: Int[Tensor, "b n"]) -> int:
    """Return how many passes of a batch only read: those over the prompt and over the tokens that all images keep."""
    kept = int((forced >= 0).long().cumprod(1).sum(1).min())
    return 1 + -(-(kept - 1) // READ_TOKENS) if kept else 0


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
