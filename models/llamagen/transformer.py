"""The LlamaGen transformer: caption or class in, logits over VQ codes out (arXiv:2406.06525, section 3.2)."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.core.types import TargetDefaults
from lantern.models.llamagen.conditioning import CaptionEmbedder, LabelEmbedder
from lantern.models.llamagen.config import TransformerConfig
from lantern.models.llamagen.layers import Block, LayerCache, RMSNorm
from lantern.models.llamagen.rotary import rope_factors, rope_table


@dataclass(frozen=True)
class Scores:
    """Result for n inputs: fp32 logits `(rows n v)`, and features `(rows n c)` after the final norm.

    `fused` holds the inputs of the tapped layers, concatenated; None without taps.
    """

    logits: Float[Tensor, "rows n v"]
    features: Float[Tensor, "rows n c"]
    fused: Float[Tensor, "rows n k"] | None = None


class Transformer(nn.Module, TargetDefaults):
    """LlamaGen's transformer. One forward serves prefill, plain and tree passes: positions and mask are arguments."""

    rope: Tensor
    layers: Any  # a ModuleList of Block, which the type checker takes for modules of any kind

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.cls_embedding = LabelEmbedder(config) if config.model_type == "c2i" else CaptionEmbedder(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.tok_dropout = nn.Dropout(config.token_dropout_p)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        table = rope_table(config.grid, config.cls_token_num, config.head_dim, config.rope_base)
        self.register_buffer("rope", table, persistent=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Normal(0, initializer_range) for linears and embeddings, zero for the output head, as the reference does."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.data.normal_(0.0, self.config.initializer_range, generator=generator)
        self.output.weight.data.zero_()

    def head(self, features: Float[Tensor, "b n c"]) -> Float[Tensor, "b n v"]:
        """Return fp32 logits of features after the final norm."""
        return self.output(features).float()

    def features(
        self,
        inputs: Float[Tensor, "b n c"],
        positions: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b n s"] | Float[Tensor, "b n s"] | None = None,
        *,
        cache: LayerCache | None = None,
        slots: Int[Tensor, "b n"] | None = None,
        entered: dict[int, Tensor] | None = None,
    ) -> Float[Tensor, "b n c"]:
        """Run the layers and the final norm over embedded inputs.

        `positions` are rows of the rotary table: conditioning slots first (cls_token_num of them), then the
        codes in raster order. A boolean `mask` selects the cache slots (without a cache: the inputs)
        that each input attends to; a float mask is added to the scores; None is causal.
        With a cache, keys and values go to `slots`. `entered` receives the inputs of the layers that are its keys.
        """
        factors = rope_factors(self.rope, positions)
        x = self.tok_dropout(inputs)
        for layer, block in enumerate(self.layers):
            if entered is not None and layer in entered:
                entered[layer] = x
            x = block(x, factors, mask, layer=layer, cache=cache, slots=slots)
        return self.norm(x)

    def read_prompt(
        self, inputs: Float[Tensor, "b t c"], mask: Bool[Tensor, "b t"], *, entered: dict[int, Tensor] | None = None
    ) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "l b h d"]]:
        """Return features of conditioning slots (padding on the left), and the mean value of each layer over the words.

        Rotary rows of the prompt are zero, so its queries and keys are zero: attention among conditioning slots is a
        running mean, and to a code the n words of a prompt are one key of zeros with log n added to its score, and
        these means as its value. `features` computes the same without this shortcut. `entered` as there.
        """
        x, means = inputs, []
        for layer, block in enumerate(self.layers):
            if entered is not None and layer in entered:
                entered[layer] = x
            x, mean = block.read(x, mask)
            means.append(mean)
        return self.norm(x), torch.stack(means)

    def forward(
        self,
        inputs: Float[Tensor, "b n c"],
        positions: Int[Tensor, "b n"],
        mask: Bool[Tensor, "b n s"] | Float[Tensor, "b n s"] | None = None,
        *,
        cache: LayerCache | None = None,
        slots: Int[Tensor, "b n"] | None = None,
        taps: tuple[int, ...] = (),
    ) -> Scores:
        """Run `features` and the head: row i of the logits is the distribution of the code that follows input i.

        `taps` are layers whose inputs are returned, concatenated. If a cache needs more rows than there are
        (`least_rows`), the last input is repeated and its scores are dropped.
        """
        count, least = inputs.shape[1], -(-getattr(cache, "least_rows", 0) // inputs.shape[0])
        if count < least:
            assert slots is not None and mask is not None
            more = [_repeat_last(x, least) for x in (inputs, positions, mask, slots)]
            scores = self(*more[:3], cache=cache, slots=more[3], taps=taps)
            fused = None if scores.fused is None else scores.fused[:, :count]
            return Scores(scores.logits[:, :count], scores.features[:, :count], fused)
        if not taps:
            features = self.features(inputs, positions, mask, cache=cache, slots=slots)
            return Scores(logits=self.head(features), features=features)
        entered = dict.fromkeys(taps, inputs)
        features = self.features(inputs, positions, mask, cache=cache, slots=slots, entered=entered)
        return Scores(self.head(features), features, torch.cat([entered[layer] for layer in taps], dim=-1))


def _repeat_last(x: Tensor, count: int) -> Tensor:
    """Return `x` with its last entry along axis 1 repeated up to `count` entries."""
    return torch.cat([x, x[:, -1:].expand(-1, count - x.shape[1], *x.shape[2:])], dim=1)
