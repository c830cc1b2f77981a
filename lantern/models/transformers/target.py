"""A decoder of transformers as a target: the loop counts an image's tokens, this adapter makes the sequence.

    tokens      0 1 2 3 4 5 ...            what the loop, drafters, trees and verifiers see
    sequence   prompt 0 1 2 \\n 3 4 5 \\n ...    what the decoder reads, for rows of three tokens and a newline

A node that ends a row is passed with the newline behind it. What follows the token is what follows the newline.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.core.types import Condition, Prompt, Raster, Scores, Target
from lantern.models.llamagen.transformer import prefix_mask


@dataclass(frozen=True)
class TargetSizes:
    """Sizes of a target, under the names that decoding reads.

    `n_head` counts heads of keys and values, `query_heads` those of queries. `vocab_size` is the number of tokens of
    images, `words` the size of the decoder's whole vocabulary.
    """

    family: str
    dim: int
    n_layer: int
    n_head: int
    head_dim: int
    vocab_size: int
    raster: Raster
    model_type: str = "t2i"
    cls_token_num: int = 0  # positions count tokens
    caption_dim: int = 0
    num_classes: int = 0
    query_heads: int = 0
    ffn_dim: int = 0
    norm_eps: float = 1e-5
    rope_base: float = 10_000.0  # of drafters, in two dimensions
    words: int = 0
    processes: int = 1  # that share its layers, and round sums in another order than one

    def cache_dtype(self, device: torch.device, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of keys and values: the weights'."""
        return dtype

    @property
    def block_size(self) -> int:
        """Number of tokens of an image."""
        return self.raster.tokens


class TokenEmbedding(nn.Module):
    """Tokens of images to inputs of the decoder: rows of its embedding of words."""

    tokens: Tensor

    def __init__(self, embedding: nn.Embedding, tokens: Int[Tensor, " v"]) -> None:
        super().__init__()
        self.embedding = embedding
        self.register_buffer("tokens", tokens, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The embedding of words, of whose dtype and on whose device the target is."""
        return self.embedding.weight

    def forward(self, tokens: Int[Tensor, "*n"]) -> Float[Tensor, "*n c"]:
        """Embed tokens."""
        return self.embedding(self.tokens[tokens])


class TokenHead(nn.Linear):
    """A copy of the rows of a head that belong to tokens, so that the rest of it can be freed."""

    def __init__(self, head: nn.Linear, tokens: Int[Tensor, " v"]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = head.in_features, len(tokens)
        self.weight = nn.Parameter(head.weight.detach()[tokens], requires_grad=False)
        self.bias = None if head.bias is None else nn.Parameter(head.bias.detach()[tokens], requires_grad=False)


@dataclass(eq=False)
class Writes:
    """What transformers' layers take for a cache: writes the keys and values of a pass to the slots of its nodes.

    Behind the inputs of the nodes come those of newlines, if there are any; `followed` are the slots of the nodes that
    they follow, and `is_real` is False for newlines that only fill the batch up.
    """

    cache: Any
    slots: Int[Tensor, "rows n"]
    followed: Int[Tensor, "rows m"] | None = None
    is_real: Bool[Tensor, "rows m"] | None = None

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values `(rows h n d)` of a layer, and return all of that layer."""
        fresh = torch.stack([keys, values], 2).transpose(1, 3)
        nodes = self.slots.shape[1]
        if self.followed is not None:
            self.cache.write_newlines(layer_idx, self.followed, fresh[:, nodes:], self.is_real)
        return self.cache.write(layer_idx, self.slots, fresh[:, :nodes])


class TransformersTarget(nn.Module, Target):
    """A decoder of transformers, with embedding and head of tokens, as a `lantern.core.types.Target`.

    `body` maps embedded inputs to features after the final norm, and `words` is its embedding. `embedding` maps
    tokens to inputs, `head` features to logits over `tokens` of them; attention is of a kind that takes every mask.
    ValueError for a raster longer than the positions of the model. `loaded` is for pipelines built of components: what
    belongs to the model that it was loaded with, its defaults of a call and its folder's add-ons.
    """

    loaded: Any = None

    def __init__(
        self, body: Any, words: Any, embedding: Any, head: nn.Module, *, tokens: int, family: str, raster: Raster
    ) -> None:
        super().__init__()
        self.body, self.words, self.tok_embeddings, self.output = body, words, embedding, head
        arguments = inspect.signature(body.forward).parameters
        self.cache_name = "cache" if "cache" in arguments else "past_key_values"  # `cache` since transformers 5.24
        sizes = body.config
        heads = sizes.num_attention_heads
        if (length := raster.tokens + raster.newlines) > sizes.max_position_embeddings:
            raise ValueError(
                f"{raster.rows} rows of {raster.columns} tokens are a sequence of {length}, the model has"
                f" {sizes.max_position_embeddings} positions: choose a smaller size"
            )
        self.config = TargetSizes(
            family=family,
            dim=sizes.hidden_size,
            n_layer=sizes.num_hidden_layers,
            n_head=sizes.num_key_value_heads or heads,
            head_dim=sizes.to_dict().get("head_dim") or sizes.hidden_size // heads,
            vocab_size=tokens,
            raster=raster,
            query_heads=heads,
            ffn_dim=sizes.intermediate_size,
            words=words.num_embeddings,
        )
        self.eval()

    def head(self, features: Float[Tensor, "rows n c"]) -> Float[Tensor, "rows n v"]:
        """Map features to fp32 logits over tokens."""
        return self.output(features).float()

    @property
    def device(self) -> torch.device:
        """Device of the decoder."""
        return self.words.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the decoder."""
        return self.words.weight.dtype

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies have, such as quantized ones: all but `loaded`."""
        return {name: value for name, value in vars(self).items() if name != "loaded"}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `fn`; buffers, such as rotary factors, keep the dtype that transformers gave them."""
        kept = [(module, dict(module._buffers)) for module in self.modules()]
        super()._apply(fn, recurse)
        for module, buffers in kept:
            for name, before in buffers.items():
                after = module._buffers[name]
                if before is not None and after is not None and after.dtype != before.dtype:
                    module._buffers[name] = before.to(after.device)
        return self

    @property
    def norm(self) -> nn.Module:
        """The decoder's final norm."""
        return self.body.norm

    @property
    def has_linear_head(self) -> bool:
        """Whether features combined by guidance have the combined logits."""
        return isinstance(self.output, nn.Linear)

    def read(self, condition: Condition, rows: int, *, whole: bool = False, taps: tuple[int, ...] = ()) -> Prompt:
        """Read token prompts, as `Target.read`.

        Positions count the tokens that are not padding, from 0. Padding attends to itself alone, so that its keys and
        values, which nothing attends to, are finite. ValueError for captions and labels, and for `whole`.
        """
        if condition.tokens is None or condition.mask is None:
            raise ValueError("this model takes token prompts: make the condition with its text encoder")
        if whole:
            raise ValueError(
                "this drafter reads the prompt slot by slot, but here each guidance row has a prompt of its own:"
                " use another method"
            )
        from transformers import DynamicCache

        tokens, shown = condition.tokens[:, :rows].flatten(0, 1), condition.mask[:, :rows]
        mask = shown.flatten(0, 1)
        seen = prefix_mask(mask, 0)
        scores = torch.zeros_like(seen, dtype=self.words.weight.dtype).masked_fill(~seen, -torch.inf)
        kept: Any = DynamicCache()
        features, inputs = self._run(self.words(tokens), (mask.cumsum(1) - 1).clamp(min=0), scores, kept, taps)
        entries = torch.stack([torch.stack([layer.keys, layer.values]) for layer in kept.layers])
        features, tapped = joined(features[:, -1:].unflatten(0, (-1, rows)), [x[:, -1:] for x in inputs])
        return Prompt(
            entries=entries.unflatten(2, (-1, rows)).movedim(2, 0),
            scores=torch.zeros_like(shown, dtype=torch.double).masked_fill(~shown, -torch.inf),
            first=shown.sum(-1),
            logits=self.head(features),
            features=features,
            mask=shown[:, 0, -1:],
            tapped=None if tapped is None else tapped.unflatten(0, (-1, rows)),
        )

    def features(self, *where: Any, **how: Any) -> Float[Tensor, "rows n c"]:
        """Return the features of embedded tokens, as `Target.features`."""
        return self._pass(*where, **how)[0]

    def places(self, positions: Int[Tensor, "rows n"], first: Int[Tensor, "rows 1"]) -> Int[Tensor, "*rows n"]:
        """Return the decoder's positions of tokens behind prompts of `first` tokens, without newlines."""
        return positions + first

    def _pass(
        self,
        inputs: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        *,
        cache: Any = None,
        slots: Tensor | None = None,
        taps: tuple[int, ...] = (),
        newlines: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the decoder over embedded tokens, whose numbers are `positions`; nodes that end a row with a newline.

        Returns features, and the inputs of tapped layers side by side. The pass has `newlines`, at least as many as
        rows that end in it; those that follow no row are never read. None: as many as needed, which the host reads
        back from the device.
        ValueError without a cache, its mask and slots.
        """
        if cache is None or mask is None or slots is None:
            raise ValueError("passes of this target need a cache with its mask and slots: it holds the prompt")
        raster = self.config.raster
        if raster.newlines == 0:
            return joined(*self._run(inputs, self.places(positions, cache.first), mask, Writes(cache, slots), taps))
        places = positions + positions // raster.columns + cache.first
        is_end = ((positions + 1) % raster.columns == 0) & (positions < raster.tokens - 1)
        behind = cache.newline_mask(mask, slots, is_end)
        own = behind.masked_fill(cache.is_own_newline(slots), -torch.inf)
        if newlines is None:
            newlines = int(is_end.sum(1).max())  # sync
        if newlines == 0:
            return joined(*self._run(inputs, places, torch.cat([mask, own], 2), Writes(cache, slots), taps))
        # newlines come behind all nodes, in the order of those that they follow
        nodes = is_end.byte().argsort(dim=1, descending=True, stable=True)[:, :newlines]
        follows = rows_of(torch.cat([mask, behind], 2), nodes)
        newline = self.words(torch.full_like(nodes, raster.newline))  # type: ignore[arg-type]
        features, entered = self._run(
            torch.cat([inputs, newline], 1),
            torch.cat([places, places.gather(1, nodes) + 1], 1),
            torch.cat([torch.cat([mask, own], 2), follows], 1),
            Writes(cache, slots, slots.gather(1, nodes), is_end.gather(1, nodes)),
            taps,
        )
        count = inputs.shape[1]
        last = torch.where(is_end, count - 1 + is_end.cumsum(1), torch.arange(count, device=inputs.device))
        return joined(rows_of(features, last), [rows_of(x, last) for x in entered])

    def forward(self, *where: Any, **how: Any) -> Scores:
        """Score embedded tokens, as `Target.__call__`; `newlines` is the size of the pass (`_pass`)."""
        features, tapped = self._pass(*where, **how)
        return Scores(self.head(features), features, tapped)

    def _run(
        self, inputs: Tensor, positions: Tensor, mask: Tensor, cache: Any, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the features of inputs, and the inputs of tapped layers."""
        reported = {"output_hidden_states": True} if taps else {}
        found = self.body(
            inputs_embeds=inputs,
            position_ids=positions,
            attention_mask=mask[:, None],
            use_cache=True,
            **{self.cache_name: cache},
            **reported,
        )
        return found.last_hidden_state, [found.hidden_states[layer] for layer in taps]


def vocabulary_target(
    body: Any, words: Any, head: Any, tokens: Int[Tensor, " v"], *, kind: Any = TransformersTarget, **how: Any
) -> TransformersTarget:
    """Return the target of a decoder whose tokens are `tokens` of its vocabulary, with the family and raster of `how`.

    `kind` is its class, which may take more.
    """
    tokens = tokens.to(words.weight.device)
    return kind(body, words, TokenEmbedding(words, tokens), TokenHead(head, tokens), tokens=len(tokens), **how)


def causal_target(model: Any, tokenizer: Any | None, tokens: int, *, family: str, raster: Raster) -> TransformersTarget:
    """Return the target of a causal language model whose vocabulary ends with the tokens of images.

    Token c of an image is word `len(tokenizer) + c`. Only these are sampled, while the releases sample from the whole
    vocabulary and clamp what is no token. Without a tokenizer it is the target's shape only.
    ValueError for a vocabulary without the tokens, and for layers that this adapter does not reproduce.
    """
    sizes = model.config.to_dict()
    if any(kind != "full_attention" for kind in sizes.get("layer_types") or ()) or sizes.get("final_logit_softcapping"):
        raise ValueError(f"{sizes['model_type']} has windows of attention or capped logits, which are not supported")
    words, first = model.get_input_embeddings(), 0 if tokenizer is None else len(tokenizer)
    if tokenizer is None and not words.weight.is_meta:
        raise ValueError("the tokenizer is needed: tokens follow its tokens")
    if (most := words.weight.shape[0]) < first + tokens:
        raise ValueError(f"the vocabulary has {most} tokens, wanted {first} of the tokenizer and {tokens} tokens")
    numbers = torch.arange(first, first + tokens)
    return vocabulary_target(model.model, words, model.get_output_embeddings(), numbers, family=family, raster=raster)


def joined(features: Tensor, entered: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return features, and the inputs of tapped layers side by side."""
    return features, torch.cat(entered, -1) if entered else None


def rows_of(x: Float[Tensor, "rows n s"], nodes: Int[Tensor, "rows m"]) -> Float[Tensor, "rows m s"]:
    """Return the rows of a tensor, such as a mask, that belong to some of the nodes."""
    return x.gather(1, nodes[..., None].expand(-1, -1, x.shape[-1]))
