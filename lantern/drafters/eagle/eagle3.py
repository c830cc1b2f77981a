"""EAGLE-3: reads three layers of the target, feeds on its own outputs, has a head of its own (arXiv:2503.01840).

The inputs of the layers 2, L/2 and L - 3 of the target at the prediction of token j are guided like logits,
F*_l = u_l + s (c_l - u_l), concatenated and mapped to one feature. One decoder layer, whose attention reads
[norm(embedding) | norm(feature)], predicts the next feature, which is fed back as the feature of the next draft. Its
features need not be near the target's: its own norm and head give distributions, and the loss is on distributions only,
over several depths (training-time test, section 3.2). Here the head covers the whole codebook.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from lantern.core.weights import DraftLayer
from lantern.drafters.base import token_embeddings
from lantern.drafters.eagle.eagle1 import Eagle, EagleConfig, EagleLayer
from lantern.drafters.examples import Examples, Prediction, fused_layers
from lantern.models.llamagen.transformer import Attention, FeedForward, RMSNorm, TransformerConfig


@dataclass(frozen=True)
class Eagle3Config(EagleConfig):
    """Sizes of an EAGLE-3 drafter; `fused` are the target's layers whose inputs it reads.

    Training takes them from `fused_layers`: all three, or the last ones. ValueError for a value out of range.
    """

    kind: str = "eagle3"
    fused: tuple[int, ...] = (2, 8, 13)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form != "guided":
            raise ValueError(f'form is "{self.form}", wanted "guided": an EAGLE-3 drafter reads guided layers')
        if not self.fused or min(self.fused) < 0:
            raise ValueError(f"fused is {list(self.fused)}, wanted numbers of layers, from 0")

    @classmethod
    def for_target(cls, config: TransformerConfig, **changes: Any) -> Self:
        """Return a config with its target's width that reads three of its layers, or those of `fused`."""
        fused = tuple(changes.get("fused", fused_layers(config.n_layer)))
        return super().for_target(config, **(changes | {"fused": fused}))


class Eagle3Layer(DraftLayer):
    """A decoder layer that reads embedding and feature, concatenated, and adds to the feature."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.embedding_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(TransformerConfig(dim=config.dim, n_head=config.n_head))
        self.attention.wqkv = nn.Linear(2 * config.dim, 3 * config.dim, bias=False)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(
        self, pairs: Float[Tensor, "b n d"], factors: Float[Tensor, "b n 3 1 half 2"], **attention: Any
    ) -> Float[Tensor, "b n c"]:
        """Add attention, then feed-forward, to the feature; `attention` is as for `EagleLayer`."""
        embedded, x = pairs.chunk(2, dim=-1)
        read = torch.cat([self.embedding_norm(embedded), self.attention_norm(x)], dim=-1)
        x = x + self.attention(read, factors, layer=0, **attention)
        return x + self.feed_forward(self.ffn_norm(x))


class Eagle3(Eagle):
    """The drafter's weights: `fc` maps the tapped layers to a feature, `norm` and `output` map features to logits."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self.taps = config.fused
        self.fc = nn.Linear(len(config.fused) * config.dim, config.dim, bias=False)
        rest = [EagleLayer(config, i, has_norm=True) for i in range(1, config.layers)]
        self.layers = nn.ModuleList([Eagle3Layer(config), *rest])
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    @property
    def reads(self) -> frozenset[str]:
        """Extras of `Examples` that training needs: the tapped layers."""
        return frozenset({"layers"})

    def enter(self, features: Float[Tensor, "*b n k"]) -> Float[Tensor, "*b n c"]:
        """Map guided layers, concatenated, to one feature."""
        return self.fc(features.to(self.dtype))

    def logits(self, features: Float[Tensor, "b n c"], target: Any) -> Float[Tensor, "b n v"]:
        """Return the fp32 logits of its own head."""
        return self.output(self.norm(features.to(self.dtype))).float()

    def init_for(self, target: Any, generator: torch.Generator) -> None:
        """Start as the target's norm and head applied to the last tapped layer, with the target's embeddings.

        A head that is not linear cannot be copied: the own head then starts as other linears do. ValueError for layers
        that training does not record.
        """
        known = fused_layers(target.config.n_layer)
        if self.taps != known[-len(self.taps) :]:
            raise ValueError(f"fused is {list(self.taps)}, wanted {list(known)} or the last of these")
        self.init_linears(generator)
        self.fc.weight.data.zero_()
        self.fc.weight.data[:, -self.config.dim :] = torch.eye(self.config.dim)
        self.embed_tokens.weight.data.copy_(token_embeddings(target, self.config.vocab_size))
        with torch.no_grad():  # some norms store their scale less 1; eps is nothing beside 1024 squared
            scale = target.norm(target.tok_embeddings.weight.new_full((self.config.dim,), 1024.0))
        self.norm.weight.data.copy_(scale)
        if isinstance(target.output, nn.Linear):
            self.output.weight.data.copy_(target.output.weight.data)

    def join(
        self, features: Float[Tensor, "b n c"], tokens: Int[Tensor, "b n"], scales: Float[Tensor, "b n"] | None
    ) -> Float[Tensor, "b n d"]:
        """Return embeddings and features of its own space, which carry the guidance scales, concatenated."""
        return self.pair(self.add_scale(features, scales), tokens)

    def inputs(self, examples: Examples) -> Float[Tensor, "b 1 n k"]:
        """Return the guided layers at each token, concatenated: the last ones of `fused_layers`, one for each tap."""
        assert examples.layers is not None
        return rearrange(examples.guide(examples.layers)[:, -len(self.taps) :], "b l n c -> b 1 n (l c)")

    def predict(self, depth: int, places: Int[Tensor, " m"], predicted: Float[Tensor, "b 1 m c"]) -> Prediction:
        """Return logits of its own head; there is no feature to regress."""
        return Prediction(depth, places, logits=self.logits(predicted[:, 0], None))
