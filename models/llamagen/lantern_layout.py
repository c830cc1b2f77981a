"""LANTERN's Hugging-Face-style key layout, translated to LlamaGen's own.

Queries and keys keep their rows: both layouts rotate interleaved pairs. LANTERN is arXiv:2410.03355.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# LANTERN's beginnings of names, at the start or behind a dot, and LlamaGen's
_NAMES = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.cls_embedding.": "cls_embedding.",
    "model.norm.": "norm.",
    "model.layers.": "layers.",
    "lm_head.": "output.",
    "self_attn.o_proj.": "attention.wo.",
    "mlp.gate_proj.": "feed_forward.w1.",
    "mlp.up_proj.": "feed_forward.w3.",
    "mlp.down_proj.": "feed_forward.w2.",
    "input_layernorm.": "attention_norm.",
    "post_attention_layernorm.": "ffn_norm.",
}
_FOREIGN = {ours: theirs for theirs, ours in _NAMES.items()}
_FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_base",
}
_SAME_FIELDS = ("vocab_size", "num_classes", "caption_dim", "cls_token_num", "block_size", "rope_base", "bias")
_BLOCK_SIZES = {"t2i": 256, "t2i2": 1024}


def target_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a LANTERN target's tensors and fuse its projections; other names, LlamaGen's among them, stay."""
    return _with_fused_qkv({_renamed(name, _NAMES): tensor for name, tensor in state.items()})


def foreign_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a LlamaGen target's tensors in LANTERN's names, from which `target_state` makes them again."""
    found = {}
    for name, tensor in state.items():
        is_fused = name.endswith(".attention.wqkv.weight")
        for letter, part in zip("qkv", tensor.chunk(3), strict=True) if is_fused else [("", tensor)]:
            found[_renamed(name.replace("attention.wqkv", f"self_attn.{letter}_proj"), _FOREIGN)] = part
    return found


def foreign_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a LlamaGen target's config in LANTERN's field names, from which `reference_config` reads it."""
    found = {old: values[new] for old, new in _FIELDS.items() if values.get(new) is not None}
    return {"model_type": "llamagen"} | found | {name: values[name] for name in _SAME_FIELDS if name in values}


def drafter_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a LANTERN drafter's tensors and fuse its projections.

    `embed_tokens` is the drafter's own: released drafters were trained with one that differs from their
    target's. ValueError for the drafters of Chameleon models, which norm queries and keys.
    """
    if any(".self_attn.q_norm." in name for name in state):
        raise ValueError("this is a drafter for Chameleon (Anole, Lumina-mGPT), wanted one for LlamaGen")
    return target_state(state)


def reference_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a Hugging-Face-style config to the reference's field names; what has no counterpart is left out.

    A config in the reference's names is returned as it is.
    """
    if "hidden_size" not in values:
        return dict(values)
    config = {new: values[old] for old, new in _FIELDS.items() if values.get(old) is not None}
    config |= {name: values[name] for name in _SAME_FIELDS if values.get(name) is not None}
    if "block_size" not in config and values.get("input_type") in _BLOCK_SIZES:
        config["block_size"] = _BLOCK_SIZES[values["input_type"]]
    return config


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        name = re.sub(rf"(^|\.){re.escape(old)}", rf"\g<1>{new}", name)
    return name


def _with_fused_qkv(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace each layer's q_proj, k_proj, v_proj by wqkv, rows [q | k | v]; ValueError for an incomplete triple."""
    fused, queries = dict(state), "self_attn.q_proj.weight"
    for layer in [name.removesuffix(queries) for name in state if name.endswith(f".{queries}")]:
        parts = [f"{layer}self_attn.{letter}_proj.weight" for letter in "qkv"]
        if absent := [part for part in parts if part not in state]:
            raise ValueError(f"tensor {absent[0]!r} is missing")
        fused[f"{layer}attention.wqkv.weight"] = torch.cat([fused.pop(part) for part in parts])
    return fused
