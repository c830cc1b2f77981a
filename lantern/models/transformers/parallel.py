"""Tensor parallelism for models of transformers: the processes of `torchrun` share the layers of one model.

Every process runs the same loop on the same noise. Sums over processes are the same on all of them, so that all commit
the same tokens. Queries, keys, values and the inner channels of the feed-forward layers are divided; embeddings, heads
and VQ tokenizers are whole on every process.
"""

from dataclasses import replace
from typing import Any

import torch

from lantern.core.config import one_line

# class -> its decoder, whose linears have Llama's names; Chameleon and Emu3 have no plan in transformers
BODIES = {
    "JanusForConditionalGeneration": "model.language_model",
    "Emu3ForConditionalGeneration": "model.text_model",
    "ChameleonForConditionalGeneration": "model",
    "GemmaForCausalLM": "model",
    "Qwen2ForCausalLM": "model",
}
DIVIDED = {
    **{f"self_attn.{letter}_proj": "colwise" for letter in "qkv"},
    "self_attn.o_proj": "rowwise",
    **{"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"},
}


def plan_of(name: str, processes: int) -> Any:
    """Return transformers' config that divides a class among processes; ValueError where its layers are not known."""
    if name not in BODIES:
        raise ValueError(f"{name} has no plan for tensor parallelism: start one process")
    body = BODIES[name]
    plan = {f"{body}.layers.*.{part}": style for part, style in DIVIDED.items()}
    whole = {f"{body}.embed_tokens": "replicate", "lm_head": "replicate"}
    try:
        from transformers.distributed.configuration_utils import DistributedConfig

        return DistributedConfig(tp_size=processes, tp_plan=plan | whole)
    except (ImportError, TypeError) as error:
        raise ValueError(f"tensor parallelism needs a newer transformers: {one_line(error)}") from error


def divide_heads(target: Any, processes: int) -> None:
    """Adjust what a target and its layers know of their heads; ValueError unless processes divide them.

    Chameleon counts its heads itself, and its norms of queries and keys have a row for each.
    """
    sizes = target.body.config
    heads = sizes.num_key_value_heads or sizes.num_attention_heads
    if heads % processes or sizes.num_attention_heads % processes or sizes.intermediate_size % processes:
        raise ValueError(
            f"{processes} processes do not divide {heads} heads of keys and values, {sizes.num_attention_heads} of"
            f" queries and {sizes.intermediate_size} channels: start another number"
        )
    target.config = replace(target.config, n_head=target.config.n_head // processes, processes=processes)
    rank = torch.distributed.get_rank()
    if sizes.model_type == "chameleon":
        for layer in target.body.layers:
            attention = layer.self_attn
            attention.num_heads //= processes
            attention.num_key_value_heads //= processes
            for norm in (attention.q_norm, attention.k_norm):
                norm.weight.data = norm.weight.data.chunk(processes)[rank].clone()
                norm.bias.data = norm.bias.data.chunk(processes)[rank].clone()
