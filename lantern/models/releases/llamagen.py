"""Reader of released checkpoints: LlamaGen's `.pt` files, LANTERN's targets and drafters (arXiv:2410.03355).

A released file records neither its kind nor its picture size. `read_checkpoint` unwraps the file, translates LANTERN's
Hugging-Face-style names to LlamaGen's, and recognises kind and size from the tensors. It raises an error if they leave
something open or if a tensor does not fit. Queries and keys keep their rows: both layouts rotate interleaved pairs.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lantern.core.config import build_config, one_line, read_json_object
from lantern.core.io import check_finite, check_state, load_tensors, read_pickled
from lantern.methods.method import ADD_ONS, DRAFTER
from lantern.models.llamagen.transformer import SIZES, Transformer, TransformerConfig
from lantern.models.llamagen.vqvae import CODEBOOK_USED, VQVAE, VQConfig

Kind = Literal["t2i", "c2i", "vq", "drafter"]
MOST_INDEX_BYTES = 1 << 26
WRAPPINGS = ("model", "module", "state_dict", "ema")
WRAPPER_PREFIXES = ("_orig_mod.", "module.")
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


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it goes into a component folder: LlamaGen's tensor names, a config in the reference's fields."""

    kind: Kind
    config: dict[str, Any]
    state: dict[str, Tensor]


def read_checkpoint(
    path: str | Path,
    *,
    kind: Kind | None = None,
    config: Mapping[str, Any] | None = None,
    block_size: int | None = None,
    prefers_ema: bool = False,
) -> Checkpoint:
    """Read a released file, or a folder with `config.json` and `pytorch_model.bin` or `model.safetensors`.

    `config` and `block_size` (tokens per picture) complete and override what the file records; with `config` a folder
    needs no `config.json`. Raises ValueError, one line with the file's name, for anything that does not fit.
    """
    path = Path(path)
    try:
        is_read = path.is_dir() and not (config and not (path / "config.json").exists())
        beside = _reference_config(read_json_object(path / "config.json")) if is_read else {}
        files = weight_files(path) if path.is_dir() else [path]
        raw = {name: value for file in files for name, value in read_weights(file).items()}
        known = _from_arguments(raw.get("args")) | beside | _reference_config(config or {})
        known |= {"block_size": block_size} if block_size else {}
        state = _unwrapped(raw, prefers_ema=prefers_ema)
        found = recognise(state)
        if kind is not None and kind != found:
            raise ValueError(f"holds a {found} checkpoint, not {kind}")
        if found == "vq":
            return _vq(state, known)
        return _drafter(state, known) if found == "drafter" else _transformer(state, known, found)
    except ValueError as error:
        text = str(error)
        raise (error if text.startswith(str(path)) else ValueError(f"{path}: {text}")) from error


def recognise(state: Mapping[str, Tensor]) -> Kind:
    """Return the kind of a state dict, from its tensor names. ValueError for tensors of another architecture."""
    if "fc.weight" in state and any(name.startswith("layers.0.") for name in state):
        return "drafter"
    if any(name.startswith(("encoder.conv", "decoder.conv", "quantize.")) for name in state):
        return "vq"
    names = {name.removeprefix("model.") for name in state}
    if "cls_embedding.embedding_table.weight" in names:
        return "c2i"
    if any(name.startswith(("cls_embedding.cap_proj.", "cls_embedding.uncond_embedding")) for name in names):
        return "t2i"
    raise ValueError(f"is no LlamaGen transformer, tokenizer or drafter: its tensors are {sorted(state)[:3]}...")


def weight_files(folder: Path) -> list[Path]:
    """Return the file of a folder's weights, or the files that its index lists; ValueError without weights."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (index := folder / f"{name}.index.json").is_file():
            listed = read_json_object(index, most=MOST_INDEX_BYTES).get("weight_map")
            if not isinstance(listed, dict) or not listed:
                raise ValueError(f"{index} has no weight_map, wanted the file of each tensor")
            return [folder / part for part in sorted({Path(str(file)).name for file in listed.values()})]
        if (folder / name).is_file():
            return [folder / name]
    raise ValueError(f"{folder} holds neither model.safetensors nor pytorch_model.bin")


def read_weights(file: Path) -> Mapping[Any, Any]:
    """Return what a file of weights holds, by names; ValueError for a damaged file and for what is no mapping."""
    found = load_tensors(file) if file.suffix == ".safetensors" else read_pickled(file)
    if not isinstance(found, Mapping):
        raise ValueError(f"{file} holds a {type(found).__name__}, wanted a dict of tensors")
    return found


def _unwrapped(inner: Mapping[Any, Any], *, prefers_ema: bool) -> dict[str, Tensor]:
    """Return the state dict inside its wrapping, with clean names."""
    order = ("ema", *WRAPPINGS) if prefers_ema else WRAPPINGS
    while wrapped := next((inner[name] for name in order if isinstance(inner.get(name), Mapping)), None):
        inner = wrapped
    state = {}
    for name, tensor in inner.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"entry {str(name)[:60]!r} is a {type(tensor).__name__}, wanted a tensor")
        name = name.replace("_fsdp_wrapped_module.", "")  # which FSDP puts at every wrapped module
        while name.startswith(WRAPPER_PREFIXES):
            name = name.split(".", 1)[1]
        # rotary table and decoding cache: recomputed, never weights
        if name != "freqs_cis" and ".kv_cache." not in name:
            state[name] = tensor.detach()
    return state


def _from_arguments(arguments: Any) -> dict[str, Any]:
    """Read the grid, and the heads of a named size, from the arguments that a training run recorded."""
    if not isinstance(arguments, argparse.Namespace | Mapping):
        return {}
    given = arguments if isinstance(arguments, Mapping) else vars(arguments)
    known: dict[str, Any] = {}
    image, factor = given.get("image_size"), given.get("downsample_size", 16)
    if isinstance(image, int) and isinstance(factor, int) and factor > 0 and image % factor == 0:
        known["block_size"] = (image // factor) ** 2
    size = str(given.get("gpt_model", "")).removeprefix("GPT-")
    if size in SIZES:
        known["n_head"] = SIZES[size]["n_head"]
    return known


def _transformer(state: dict[str, Tensor], known: dict[str, Any], kind: Kind) -> Checkpoint:
    state = _target_state(state)
    vocab_size, dim = _shape(state, "tok_embeddings.weight", 2)
    n_layer, hidden = count_entries(state, "layers"), _shape(state, "layers.0.feed_forward.w1.weight", 2)[0]
    fields = {"dim": dim, "n_layer": n_layer, "vocab_size": vocab_size, "model_type": kind}
    fields |= {"multiple_of": _multiple_of(dim, hidden)} | _heads(dim, n_layer)
    if kind == "c2i":
        fields["num_classes"] = _shape(state, "cls_embedding.embedding_table.weight", 2)[0] - 1
    else:
        fields["cls_token_num"], fields["caption_dim"] = _shape(state, "cls_embedding.uncond_embedding", 2)
    known.pop("bias", None)
    config = build_config(TransformerConfig, _complete(fields | known), source="config")
    if config.n_layer != n_layer:
        raise ValueError(f"config has n_layer {config.n_layer}, the file {n_layer} layers")
    _check(state, lambda: Transformer(config))
    return Checkpoint(kind, asdict(config), state)


def _drafter(state: dict[str, Tensor], known: dict[str, Any]) -> Checkpoint:
    """Recognise an EAGLE-1 drafter: `fc` over [embedding; feature], one layer without input norm, no final norm.

    It reads both guidance rows, padding included. `embed_tokens` is its own: those of released drafters differ from
    their target's.
    """
    if any(".self_attn.q_norm." in name for name in state):  # which norm queries and keys
        raise ValueError("this is a drafter for Chameleon (Anole, Lumina-mGPT), wanted one for LlamaGen")
    state = _target_state(state)
    vocab_size, dim = _shape(state, "embed_tokens.weight", 2)
    hidden = _shape(state, "layers.0.feed_forward.w1.weight", 2)[0]
    known = _complete({"norm_eps": 1e-6} | _heads(dim) | known)
    irrelevant = ("n_layer", "n_kv_head", "caption_dim", "num_classes")
    config = {name: value for name, value in known.items() if name not in irrelevant}
    config |= {"dim": dim, "ffn_dim": hidden, "vocab_size": vocab_size}
    # the drafter pairs a feature with the token after it, hence one conditioning slot fewer than the target
    config["cls_token_num"] = config.get("cls_token_num", 120) - 1
    config["has_fc_bias"] = config.pop("bias", True)
    config |= {"has_input_norm": False, "sees_padding": True, "kind": "eagle1", "form": "rows"}
    kind: Any = ADD_ONS[DRAFTER]
    _check(state, lambda: kind.module(build_config(kind.config, config, source="config")))
    return Checkpoint("drafter", config, state)


def vq_fields(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields of `VQConfig` that the tensors of a VQ tokenizer imply; ValueError where one is missing."""
    codebook_size, width = _shape(state, "quantize.embedding.weight", 2)
    ch = _shape(state, "encoder.conv_in.weight", 4)[0]
    levels = range(count_entries(state, "encoder.conv_blocks"))
    return {
        "codebook_size": codebook_size,
        "codebook_embed_dim": width,
        "encoder_ch_mult": [_shape(state, f"encoder.conv_blocks.{i}.res.0.conv1.weight", 4)[0] // ch for i in levels],
        # the decoder's first block is the lowest resolution
        "decoder_ch_mult": [
            _shape(state, f"decoder.conv_blocks.{i}.res.0.conv1.weight", 4)[0] // ch for i in reversed(levels)
        ],
        "z_channels": _shape(state, "encoder.conv_out.weight", 4)[0],
        "ch": ch,
        "num_res_blocks": count_entries(state, "encoder.conv_blocks.0.res"),
    }


def _vq(state: dict[str, Tensor], known: dict[str, Any]) -> Checkpoint:
    known.pop("block_size", None)
    config = build_config(VQConfig, vq_fields(state) | known, source="config")
    if CODEBOOK_USED not in state:  # a usage diagnostic, empty in what was never trained further
        state[CODEBOOK_USED] = torch.zeros(65536)
    _check(state, lambda: VQVAE(config))
    return Checkpoint("vq", asdict(config), state)


def _shape(state: Mapping[str, Tensor], name: str, axes: int) -> tuple[int, ...]:
    if name not in state:
        raise ValueError(f"tensor {name!r} is missing")
    if state[name].ndim != axes or not state[name].numel():
        raise ValueError(f"tensor {name!r} has shape {list(state[name].shape)}, wanted {axes} axes, none empty")
    return tuple(state[name].shape)


def count_entries(state: Mapping[str, Tensor], prefix: str) -> int:
    """Count the numbered entries `prefix.0.`, `prefix.1.`, ... of a state dict."""
    return len({found[1] for name in state if (found := re.match(rf"{re.escape(prefix)}\.(\d+)\.", name))})


def _heads(dim: int, n_layer: int | None = None) -> dict[str, int]:
    """Return the number of heads of the released size with this width (and depth); shapes do not determine it."""
    sizes = [size for size in SIZES.values() if size["dim"] == dim and n_layer in (None, size["n_layer"])]
    return {"n_head": sizes[0]["n_head"]} if sizes else {}


def _multiple_of(dim: int, hidden: int) -> int:
    """Find a rounding under which a feed-forward of this width is `hidden` wide, the released one first."""
    unrounded = int(2 * 4 * dim / 3)
    roundings = (multiple for multiple in (256, 128, 64, 32, 16, 8, 4, 2, 1) if hidden % multiple == 0)
    return next((m for m in roundings if -(-unrounded // m) * m == hidden), max(hidden, 1))


def _complete(fields: dict[str, Any]) -> dict[str, Any]:
    """Raise an error if heads or picture size are known from neither tensors, file nor caller."""
    if fields.get("n_head") is None:
        raise ValueError('shapes do not determine the number of heads; give --config, a JSON file with {"n_head": N}')
    if fields.get("block_size") is None:
        raise ValueError("does not record its image size; give --image-size (256, 384, 512) or --grid")
    return fields


def _check(state: Mapping[str, Tensor], build: Callable[[], nn.Module]) -> None:
    """Compare names and shapes with those of the real module, built without memory."""
    try:
        with torch.device("meta"):
            expected = build().state_dict()
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        raise ValueError(f"config: {one_line(error)}") from error
    check_state(state, expected, source="weights")
    check_finite(state, source="weights")


def _target_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename LANTERN's tensors and fuse its projections, rows [q | k | v]; other names, LlamaGen's among them, stay.

    ValueError for an incomplete triple.
    """
    fused, queries = {_renamed(name, _NAMES): tensor for name, tensor in state.items()}, "self_attn.q_proj.weight"
    for layer in [name.removesuffix(queries) for name in fused if name.endswith(f".{queries}")]:
        parts = [f"{layer}self_attn.{letter}_proj.weight" for letter in "qkv"]
        if absent := [part for part in parts if part not in fused]:
            raise ValueError(f"tensor {absent[0]!r} is missing")
        fused[f"{layer}attention.wqkv.weight"] = torch.cat([fused.pop(part) for part in parts])
    return fused


def _reference_config(values: Mapping[str, Any]) -> dict[str, Any]:
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


def foreign_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a LlamaGen target's tensors in LANTERN's names, from which `read_checkpoint` makes them again."""
    found = {}
    for name, tensor in state.items():
        is_fused = name.endswith(".attention.wqkv.weight")
        for letter, part in zip("qkv", tensor.chunk(3), strict=True) if is_fused else [("", tensor)]:
            found[_renamed(name.replace("attention.wqkv", f"self_attn.{letter}_proj"), _FOREIGN)] = part
    return found


def foreign_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a LlamaGen target's config in LANTERN's field names, from which `read_checkpoint` reads it."""
    found = {old: values[new] for old, new in _FIELDS.items() if values.get(new) is not None}
    return {"model_type": "llamagen"} | found | {name: values[name] for name in _SAME_FIELDS if name in values}
