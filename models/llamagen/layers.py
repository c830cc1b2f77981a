"""The layers of a LlamaGen transformer: norm, attention, feed-forward and block."""

from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.models.llamagen.config import TransformerConfig
from lantern.models.llamagen.rotary import rotate


@runtime_checkable
class LayerCache(Protocol):
    """Store of keys and values, those of earlier passes included."""

    def write(
        self, layer: int, slots: Int[Tensor, "b n"], fresh: Float[Tensor, "b n 2 h d"]
    ) -> tuple[Float[Tensor, "b h s d"], Float[Tensor, "b h s d"]]:
        """Store n keys and values at `slots` of a layer; return all of that layer."""
        ...


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, cast back before the weight is applied (the order matters in bf16)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Normalise the last axis."""
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # one operation on a CPU, where a mean is three
        scale = torch.rsqrt(length * length / x.shape[-1] + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Multi-head attention with one fused projection, rows [q | k | v]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.attn_dropout_p
        self.wqkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        factors: Float[Tensor, "b n 3 1 half 2"],
        mask: Bool[Tensor, "b n s"] | Float[Tensor, "b n s"] | None,
        *,
        layer: int,
        cache: LayerCache | None,
        slots: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n c"]:
        """Attend to the cache, or to x without one. No mask is causal; a float mask is added to the scores."""
        turned = rotate(self.wqkv(x).unflatten(-1, (3, self.n_head, -1)), factors)
        if cache is None:
            q, k, v = turned.to(x.dtype).transpose(1, 3).unbind(2)
        else:
            assert slots is not None
            k, v = cache.write(layer, slots, turned[:, :, 1:])
            q = turned[:, :, 0].transpose(1, 2).to(k.dtype)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if mask is None else mask[:, None],
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.wo(out.transpose(1, 2).flatten(2).to(x.dtype))

    def read(self, x: Float[Tensor, "b t c"], mask: Bool[Tensor, "b t"]) -> tuple[Tensor, Float[Tensor, "b h d"]]:
        """Attention of conditioning slots, whose queries and keys are zero: the mean of the values seen so far.

        Gives the output of every slot and the mean of all values, fp32, which is all that codes see of the prompt.
        """
        values = F.linear(x, self.wqkv.weight[2 * x.shape[-1] :]).float()
        means = running_mean(values, mask)
        return self.wo(means.to(x.dtype)), means[:, -1].unflatten(-1, (self.n_head, -1))


def running_mean(values: Float[Tensor, "b t c"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, "b t c"]:
    """Mean of the values up to each slot: of words over the words, of padding (which is on the left) over padding."""
    counts = mask.long().cumsum(1)
    words = (values * mask[..., None]).cumsum(1) / counts.clamp(min=1)[..., None]
    padding = values.cumsum(1) / torch.arange(1, values.shape[1] + 1, device=values.device)[:, None]
    return torch.where(mask[..., None], words, padding)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x), no biases; w1 and w3 are one matrix here, two in files."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w13 = nn.Linear(dim, 2 * hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.register_state_dict_post_hook(_split_gate)
        self.register_load_state_dict_pre_hook(_join_gate)

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        """Map dim -> hidden -> dim."""
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


def _split_gate(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    joined = state.pop(f"{prefix}w13.weight")
    state[f"{prefix}w1.weight"], state[f"{prefix}w3.weight"] = (part.clone() for part in joined.chunk(2))


def _join_gate(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    parts = [state.pop(f"{prefix}{name}.weight", None) for name in ("w1", "w3")]
    if parts[0] is not None and parts[1] is not None:
        state[f"{prefix}w13.weight"] = torch.cat(parts)


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.resid_dropout = nn.Dropout(config.resid_dropout_p)
        self.ffn_dropout = nn.Dropout(config.ffn_dropout_p)

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        factors: Float[Tensor, "b n 3 1 half 2"],
        mask: Bool[Tensor, "b n s"] | Float[Tensor, "b n s"] | None,
        *,
        layer: int,
        cache: LayerCache | None,
        slots: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n c"]:
        """Attention, then feed-forward, each added to its input."""
        return self._add(
            x, self.attention(self.attention_norm(x), factors, mask, layer=layer, cache=cache, slots=slots)
        )

    def read(self, x: Float[Tensor, "b t c"], mask: Bool[Tensor, "b t"]) -> tuple[Tensor, Float[Tensor, "b h d"]]:
        """The same for conditioning slots, with the mean of their values."""
        attended, mean = self.attention.read(self.attention_norm(x), mask)
        return self._add(x, attended), mean

    def _add(self, x: Float[Tensor, "b n c"], attended: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
        if not self.training:
            x = x + attended
            return x + self.feed_forward(self.ffn_norm(x))
        x = x + self.resid_dropout(attended)
        return x + self.ffn_dropout(self.feed_forward(self.ffn_norm(x)))
