"""Kernel passes for targets of transformers with Llama's decoder layers, such as Janus.

Unlike LlamaGen's, prompts have keys and values of their own, positions are one-dimensional and count their tokens
too, queries may share heads of keys and values, and the weights of a layer stay separate, so that none is held twice.
"""

from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from lantern.core.types import Condition, Prompt
from lantern.core.weights import WeightCache, read_in_passes
from lantern.engines.cuda.target import PROMPT_ROWS, KernelPass, KernelTarget, Linear, refuses_dtype
from lantern.models.transformers.target import TokenEmbedding, TransformersTarget

LEAST_TOKENS = 64  # of a prompt that is read, padding included
FIXED_ROPES = ("default", "linear", "llama3", "yarn")  # whose factors do not depend on the sequence's length


def refusal(target: Any) -> str | None:
    """Return why the kernels cannot run a target of transformers, or None if they can."""
    if not isinstance(target, TransformersTarget):
        return f"the GPU kernels run Llama's layers, this is a {type(target).__name__}"
    what = _unknown(target)
    return refuses_dtype(target) if what is None else f"the GPU kernels have no {what}, which this model has"


def _unknown(target: TransformersTarget) -> str | None:
    """Return a part of a target that the kernels do not compute, or None."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

    body, config = target.body, target.body.config.to_dict()
    modules = dict(body.named_modules())
    layers = list(body.layers) if "layers" in modules else [body]
    if target.config.raster.newlines:
        return "newline tokens behind rows of tokens"
    if any(name.endswith(("q_norm", "k_norm")) for name in modules):
        return "norms of queries and keys"
    if any(isinstance(module, nn.Linear) and module.bias is not None for module in modules.values()):
        return "biases in layers"
    if (activation := config.get("hidden_act")) != "silu":
        return f"activation {activation}"
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()) or config.get("sliding_window"):
        return "windows of attention"
    if not isinstance(norm := modules.get("norm"), LlamaRMSNorm):
        return f"norms of the kind {type(norm).__name__}"
    if (other := next((layer for layer in layers if not isinstance(layer, LlamaDecoderLayer)), None)) is not None:
        return f"layers of the kind {type(other).__name__}"
    if (kind := body.rotary_emb.rope_type) not in FIXED_ROPES:
        return f"rotary positions of the kind {kind}"
    return None


class LlamaLayer:
    """The weights of a layer, which are the model's own memory."""

    def __init__(self, block: Any) -> None:
        attention, feed = block.self_attn, block.mlp
        self.attention_norm = block.input_layernorm.weight.data
        self.ffn_norm = block.post_attention_layernorm.weight.data
        self.qkv = Linear(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        self.out = Linear(attention.o_proj.weight)
        self.gate_up, self.down = Linear(feed.gate_proj.weight, feed.up_proj.weight), Linear(feed.down_proj.weight)


class LlamaPass(KernelPass):
    """A Llama's weights, and the pass over them. `embedding` maps tokens to inputs, without a matrix product."""

    has_prompt_keys = splits = True

    @torch.no_grad()
    def __init__(self, target: TransformersTarget) -> None:
        body, weight = target.body, target.tok_embeddings.weight
        self.config, self.dtype = target.config, weight.dtype
        self.eps, self.heads = body.config.rms_norm_eps, self.config.query_heads
        self.layers = [LlamaLayer(block) for block in body.layers]
        self.norm, self.output = body.norm.weight.data, target.output
        places = torch.arange(body.config.max_position_embeddings, device=weight.device)
        factors = torch.stack(body.rotary_emb(weight, places[None]), -1)[0]
        self.rope = factors[:, : self.config.head_dim // 2].float().contiguous()
        self.embedding = target.tok_embeddings
        if not isinstance(self.embedding, TokenEmbedding):
            # all tokens at once: the bits of a product may depend on how many there are
            tokens = torch.arange(self.config.vocab_size, device=weight.device)
            self.embedding = nn.Embedding.from_pretrained(target.tok_embeddings(tokens))
        self.trials = {}

    def logits(self, features: Float[Tensor, "m c"]) -> Float[Tensor, "m v"]:
        """Apply the head to all rows of a pass."""
        return self.output(features)


class LlamaTarget(KernelTarget):
    """A target of transformers that scores tokens by kernels, and reads prompts by torch, in passes of few sizes."""

    passes: ClassVar[WeightCache[Any]] = WeightCache(LlamaPass)
    program: LlamaPass

    def refresh(self) -> None:
        """Read the weights again if they have changed."""
        super().refresh()
        self.tok_embeddings = self.program.embedding

    @torch.no_grad()
    def read(self, condition: Condition, rows: int, *, whole: bool = False, taps: tuple[int, ...] = ()) -> Prompt:
        """Read prompts, as `Target.read`; the bits of each depend on its own tokens only.

        A prompt is padded to LEAST_TOKENS or the next power of two, and read in a pass of PROMPT_ROWS tokens, if it
        is longer alone. ValueError where the model has fewer positions than the prompt and the image have tokens.
        """
        if condition.tokens is None or condition.mask is None:
            return self.module.read(condition, rows)  # which refuses it
        tokens, mask, count = condition.tokens, condition.mask, condition.tokens.shape[-1]
        by_size: dict[int, list[int]] = {}
        lengths, positions = mask[:, :rows].sum(-1).amax(1).tolist(), len(self.program.rope)
        if (most := max(lengths) + self.config.block_size) > positions:
            raise ValueError(
                f"a prompt of {max(lengths)} tokens and {self.config.block_size} tokens are a sequence of {most}, the"
                f" model has {positions} positions: use a shorter prompt"
            )
        for image, length in enumerate(lengths):
            by_size.setdefault(max(1 << (length - 1).bit_length(), LEAST_TOKENS), []).append(image)
        found: dict[int, Prompt] = {}
        read = partial(self.module.read, rows=rows, whole=whole, taps=taps)
        for size, images in by_size.items():
            padded = Condition(tokens=pad(tokens, (size - count, 0)), mask=pad(mask, (size - count, 0)))
            found |= read_in_passes(read, padded, max(PROMPT_ROWS // (size * rows), 1), images)
        return Prompt.joined([found[image] for image in range(condition.batch)])
