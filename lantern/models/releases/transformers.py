"""Released layouts of Janus and Chameleon that transformers does not load: `convert_release` writes the one it does.

    Janus      config.json (multi_modality), pytorch_model*.bin or model*.safetensors, tokenizer.json
    Chameleon  models/7b/{params.json, consolidated.pth}, tokenizer/{text_tokenizer.json, vqgan.yaml, vqgan.ckpt}

Queries and keys of Chameleon rotate adjacent pairs as released, and halves of a head in transformers: their rows, and
the scales and shifts of their norms, are permuted.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantern.core.config import one_line, read_json_object
from lantern.core.io import CONFIG_NAME, check_finite, check_state, save_checksums
from lantern.core.process import quiet
from lantern.models.releases.llamagen import count_entries, read_weights, vq_fields, weight_files
from lantern.models.transformers.chameleon import PREFIX, checkpoint_state, decoder_of, own_raster, save_decoder
from lantern.models.transformers.loading import FAMILIES, MOST_BYTES, RELEASED, assembled, family_of

SHARD = "5GB"  # largest file of weights
PARAMS = ("models/7b/params.json", "params.json")
MANY_SHARDS = "models/*/consolidated.*.pth"
# released names of Janus and those of transformers, the first that matches; None is not part of the model
JANUS_NAMES: Mapping[str, str | None] = {
    r"language_model\.model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": None,
    r"language_model\.model\.(.+)": r"model.language_model.\1",
    r"language_model\.lm_head\.weight": "lm_head.weight",
    r"gen_embed\.weight": "model.generation_embeddings.weight",
    r"gen_head\.output_mlp_projector\.(.+)": r"model.generation_head.proj_out.\1",
    r"gen_head\.vision_head\.(.+)": r"model.generation_head.vision_head.\1",
    r"gen_vision_model\.quantize\.codebook_used": None,
    r"gen_vision_model\.encoder\.conv_blocks\.(\d+)\.(.+)": r"model.vqmodel.encoder.down.\1.\2",
    r"gen_vision_model\.decoder\.conv_blocks\.(\d+)\.(.+)": r"model.vqmodel.decoder.up.\1.\2",
    r"gen_vision_model\.(.+)": r"model.vqmodel.\1",
    r"vision_model\.vision_tower\.attn_pool\..+": None,
    r"vision_model\.vision_tower\.patch_embed\.proj\.(.+)": r"model.vision_model.embeddings.patch_embedding.\1",
    r"vision_model\.vision_tower\.pos_embed": "model.vision_model.embeddings.position_embedding.weight",
    r"vision_model\.vision_tower\.norm\.(.+)": r"model.vision_model.post_layernorm.\1",
    r"vision_model\.vision_tower\.blocks\.(\d+)\.norm(\d\..+)": r"model.vision_model.encoder.layers.\1.layer_norm\2",
    r"vision_model\.vision_tower\.blocks\.(\d+)\.mlp\.(.+)": r"model.vision_model.encoder.layers.\1.mlp.\2",
    r"vision_model\.vision_tower\.blocks\.(\d+)\.attn\.proj\.(.+)": (
        r"model.vision_model.encoder.layers.\1.self_attn.projection_layer.\2"
    ),
    r"vision_model\.vision_tower\.blocks\.(\d+)\.attn\.qkv\.(.+)": (
        r"model.vision_model.encoder.layers.\1.self_attn.{}_proj.\2"
    ),
}
VQ_NAMES = {".res.": ".block.", ".mid.0.": ".mid.block_1.", ".mid.1.": ".mid.attn_1.", ".mid.2.": ".mid.block_2."}
# what a prompt of Janus becomes; the tokenizer puts the first token before it
JANUS_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|User|>: ' if message['role'] == 'user' else '<|Assistant|>: ' }}"
    "{%- for part in message['content'] -%}"
    "{{ '<image_placeholder>\n' if part['type'] == 'image' else part['text'] }}"
    "{%- endfor -%}"
    "{{ '\n\n' if message['role'] == 'user' else eos_token }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|Assistant|>:' }}{%- endif -%}"
)
JANUS_TOKENS = {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}
JANUS_PADDING = "<\uff5c\u2581pad\u2581\uff5c>"
VISION_HEAD = 64  # channels of a head of the vision tower, SigLIP's
CHAMELEON_NAMES = {
    r"tok_embeddings\.weight": "model.embed_tokens.weight",
    r"norm\.weight": "model.norm.weight",
    r"output\.weight": "lm_head.weight",
    r"layers\.(\d+)\.attention\.w([qkvo])\.weight": r"model.layers.\1.self_attn.\2_proj.weight",
    r"layers\.(\d+)\.attention\.([qk])_normalization\.(weight|bias)": r"model.layers.\1.self_attn.\2_norm.\3",
    r"layers\.(\d+)\.feed_forward\.w1\.weight": r"model.layers.\1.mlp.gate_proj.weight",
    r"layers\.(\d+)\.feed_forward\.w2\.weight": r"model.layers.\1.mlp.down_proj.weight",
    r"layers\.(\d+)\.feed_forward\.w3\.weight": r"model.layers.\1.mlp.up_proj.weight",
    r"layers\.(\d+)\.attention_norm\.weight": r"model.layers.\1.input_layernorm.weight",
    r"layers\.(\d+)\.ffn_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight",
    r"rope\.freqs": None,
}
CHAMELEON_TOKENS = {"image_token": "<image>", "boi_token": "<racm3:break>", "eoi_token": "<eoss>"}
CHAMELEON_SPECIAL = {
    **{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"},
    "sep_token": "<reserved08706>",
}
IMAGE_WORD = "<reserved08707>"  # transformers needs a token for a given picture, which the release does not have
VQGAN_FIELDS = {
    **{"base_channels": "ch", "channel_multiplier": "ch_mult", "latent_channels": "z_channels"},
    **{"double_latent": "double_z", "attn_resolutions": "attn_resolutions", "resolution": "resolution"},
    **{"in_channels": "in_channels", "num_res_blocks": "num_res_blocks", "dropout": "dropout"},
}


@dataclass(frozen=True)
class Release:
    """A released model as transformers reads it: `state` has the names of the class `model`, which has no values."""

    kind: str
    model: Any
    state: Mapping[str, Tensor]
    processor: Any
    source: Path
    decoder: Any = None


def convert_release(found: Release, folder: Path, *, dtype: torch.dtype | None = None) -> int:
    """Write a release to a folder that transformers and lantern load; return the number of values.

    `dtype` converts the weights, but not those of a VQ decoder of ours. ValueError names file and tensor where names or
    shapes differ from those of the class, and the part that images need where one is missing.
    """
    made = assembled(found.source.parent, FAMILIES[found.kind], found.model, found.processor, None)
    if made.text is None or not made.text.rows("a red apple")[0]:
        raise ValueError(f"{found.source.parent}: the tokenizer makes no tokens of a prompt")
    check_state(found.state, found.model.state_dict(), source=found.source)
    check_finite(found.state, source=found.source)
    state = {name: tensor.to(dtype or tensor.dtype).contiguous() for name, tensor in found.state.items()}
    found.model.load_state_dict(state, assign=True)
    with quiet():
        found.model.save_pretrained(folder, max_shard_size=SHARD)
        found.processor.save_pretrained(folder)
    if found.decoder is not None:
        save_decoder(found.decoder, folder)
    save_checksums(folder)
    return sum(tensor.numel() for tensor in state.values())


def read_release(path: Path) -> Release | None:
    """Read a released model, None where a path holds none; only names, shapes and configs are looked at.

    ValueError names the file, and the tensor that is not known or the field that is missing.
    """
    if not path.is_dir():
        return None
    params = next((path / name for name in PARAMS if (path / name).is_file()), None)
    try:
        if params is not None:
            return _chameleon(path, params)
        if (path / CONFIG_NAME).is_file():
            config = read_json_object(path / CONFIG_NAME, most=MOST_BYTES)
            return _janus(path, config) if config.get("model_type") in RELEASED else None
    except (LookupError, AttributeError, TypeError, ArithmeticError) as error:  # as of no heads, which divide the width
        raise ValueError(f"{path} lacks what its layout has ({type(error).__name__}: {one_line(error)})") from error
    if shards := sorted(path.glob(MANY_SHARDS)):
        raise ValueError(f"{shards[0]} is one of {len(shards)} parts of a model, wanted consolidated.pth in models/7b")
    return None


def add_decoder(checkpoint: Path, folder: Path) -> int:
    """Write the VQ decoder of `vqgan.ckpt` into a folder of Chameleon or Lumina-mGPT; return its number of values.

    ValueError for a folder of another family.
    """
    from transformers import ChameleonConfig

    if not (folder / CONFIG_NAME).is_file() or family_of(folder).model != "ChameleonForConditionalGeneration":
        raise ValueError(f"{folder} holds no Chameleon or Lumina-mGPT, whose VQ decoder {checkpoint.name} has")
    config = ChameleonConfig.from_pretrained(folder, local_files_only=True).vq_config
    decoder = decoder_of(checkpoint_state(checkpoint), config, source=checkpoint)
    save_decoder(decoder, folder)
    return sum(weight.numel() for weight in decoder.parameters())


def _janus(path: Path, config: Mapping[str, Any]) -> Release:
    import transformers

    raw, files = _weights(path)
    state = {name: tensor for key, tensor in raw.items() for name, tensor in _of_janus(key, tensor, files[key])}
    vq = {key.removeprefix("gen_vision_model."): tensor for key, tensor in raw.items() if key.startswith("gen_vision")}
    sizes, language = vq_fields(vq), dict(config["language_config"])
    aligner, head = (config[name]["params"] for name in ("gen_aligner_config", "gen_head_config"))
    tokenizer = _janus_tokenizer(path)
    patches = state["model.vision_model.embeddings.patch_embedding.weight"]
    count = len(state["model.vision_model.embeddings.position_embedding.weight"])
    width, side = len(patches), patches.shape[-1]
    names = transformers.LlamaConfig().to_dict()
    made = transformers.JanusConfig(
        text_config={
            **{name: value for name, value in language.items() if name in names and name != "dtype"},
            **_special(tokenizer),
        },
        vision_config={
            "hidden_size": width,
            "num_hidden_layers": count_entries(state, "model.vision_model.encoder.layers"),
            "num_attention_heads": max(width // VISION_HEAD, 1),
            "mlp_ratio": len(state["model.vision_model.encoder.layers.0.mlp.fc1.bias"]) / width,
            "patch_size": side,
            "image_size": round(count**0.5) * side,
            "num_image_tokens": count,
            "projection_dim": len(state["model.aligner.fc1.bias"]),
            "depth": config["aligner_config"]["params"]["depth"],
        },
        vq_config={
            "embed_dim": sizes["codebook_embed_dim"],
            "num_embeddings": sizes["codebook_size"],
            "latent_channels": sizes["z_channels"],
            "base_channels": sizes["ch"],
            "channel_multiplier": sizes["encoder_ch_mult"],
            "num_res_blocks": sizes["num_res_blocks"],
            "projection_dim": aligner["n_embed"],
            "num_hidden_layers": aligner["depth"],
            "image_token_embed_dim": head["image_token_embed"],
        },
        image_token_id=tokenizer.convert_tokens_to_ids(JANUS_TOKENS["image_token"]),
        tie_word_embeddings=torch.equal(state["lm_head.weight"], state["model.language_model.embed_tokens.weight"]),
    )
    model = _on_meta(transformers.JanusForConditionalGeneration, made)
    call = model.generation_config
    call.update(**_special(tokenizer))
    call._from_model_config = False  # else the fields above are not read again
    call.guidance_scale = 5.0
    call.generation_kwargs = {"boi_token_id": tokenizer.convert_tokens_to_ids(JANUS_TOKENS["boi_token"])}
    source = path / "pytorch_model.bin.index.json"
    source = source if source.is_file() else next(iter(files.values()))
    listed = read_json_object(path / "preprocessor_config.json")
    fields = ("do_normalize", "image_mean", "image_std", "min_size", "rescale_factor")
    images = {name: listed[name] for name in fields if name in listed}
    size = {"height": listed["image_size"], "width": listed["image_size"]}
    template = {"chat_template": JANUS_TEMPLATE, "num_image_tokens": count}
    pictures = transformers.JanusImageProcessor(size=size, **images)
    processor = transformers.JanusProcessor(pictures, tokenizer, **template)
    return Release("janus", model, state, processor, source)


def _of_janus(key: str, tensor: Tensor, source: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield what a released tensor becomes; ValueError for a name that is not known."""
    if found := re.fullmatch(r"(gen_)?aligner\.layers\.(\d*[02468])\.(weight|bias)", key):
        name = "model.generation_aligner" if found[1] else "model.aligner"
        place = int(found[2]) // 2
        yield f"{name}.{f'hidden_layers.{place - 1}' if place else 'fc1'}.{found[3]}", tensor
        return
    name = _renamed(key, JANUS_NAMES, source)
    if name is None:
        return
    if name.startswith(PREFIX):
        for old, new in VQ_NAMES.items():
            name = name.replace(old, new)
    if "{}" in name:  # queries, keys and values in one
        for letter, part in zip("qkv", tensor.chunk(3), strict=True):
            yield name.format(letter), part
    else:
        yield name, tensor[0] if key.endswith(".pos_embed") else tensor


def _janus_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a release, which puts the first token before a prompt; ValueError without its tokens."""
    from tokenizers import processors

    values = read_json_object(path / "tokenizer_config.json")
    listed = {name: values.get(name) for name in ("bos_token", "eos_token")}  # texts or objects
    special = {name: str(word["content"] if isinstance(word, dict) else word) for name, word in listed.items()}
    file, special = path / "tokenizer.json", special | {"pad_token": JANUS_PADDING}
    own = _tokenizer(file, read_json_object(file, most=MOST_BYTES), special, JANUS_TOKENS)
    first = own.bos_token
    template = processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, own.bos_token_id)])
    own.backend_tokenizer.post_processor = template
    return own


def _chameleon(path: Path, params: Path) -> Release:
    import transformers

    values = read_json_object(params)
    values |= values.get("model", {})
    if (more := params.with_name("consolidate_params.json")).is_file():
        values |= read_json_object(more)
    source, words = params.with_name("consolidated.pth"), path / "tokenizer" / "text_tokenizer.json"
    raw = read_weights(source)
    heads = int(values["n_heads"])
    state = {}
    for key, tensor in raw.items():
        name = _renamed(str(key), CHAMELEON_NAMES, source)
        if name is not None:
            state[name] = _permuted(name, tensor, int(values["dim"]) // heads, heads, values.get("n_kv_heads") or heads)
    vqgan = path / "tokenizer" / "vqgan.ckpt"
    vq = checkpoint_state(vqgan)
    state |= {PREFIX + key: tensor for key, tensor in vq.items() if not key.startswith("decoder.")}
    theta, listed = float(values.get("rope_theta", 10_000.0)), _with_image_word(words)
    tokenizer = _tokenizer(words, listed, CHAMELEON_SPECIAL, CHAMELEON_TOKENS)
    config = transformers.ChameleonConfig(
        vocab_size=len(state["model.embed_tokens.weight"]),
        hidden_size=values["dim"],
        intermediate_size=len(state["model.layers.0.mlp.gate_proj.weight"]),
        num_hidden_layers=values["n_layers"],
        num_attention_heads=heads,
        num_key_value_heads=values.get("n_kv_heads") or heads,
        rms_norm_eps=values["norm_eps"],
        rope_parameters={"rope_theta": theta, "rope_type": "default"},
        max_position_embeddings=4096 if theta <= 10_000.0 else 16_384,
        swin_norm=bool(values.get("swin_norm", False)),
        vq_config=_vqgan_config(path / "tokenizer" / "vqgan.yaml"),
        vocabulary_map=listed["model"]["vocab"],
        **_special(tokenizer),
    )
    model = _on_meta(transformers.ChameleonForConditionalGeneration, config)
    vq_config: Any = config.vq_config
    tokens, images = own_raster(vq_config, None).tokens, transformers.ChameleonImageProcessor()
    processor = transformers.ChameleonProcessor(images, tokenizer, image_seq_length=tokens)
    return Release("chameleon", model, state, processor, source, decoder_of(vq, vq_config, source=vqgan))


def _permuted(name: str, tensor: Tensor, width: int, heads: int, key_heads: int) -> Tensor:
    """Return queries, keys and their norms with adjacent pairs of a head taken apart into halves.

    Norms are one vector for all heads as released, and one for each head in transformers.
    """
    found = re.search(r"\.self_attn\.([qk])_(proj|norm)\.", name)
    if found is None:
        return tensor
    count = heads if found[1] == "q" else key_heads
    if tensor.shape[0] != (width if found[2] == "norm" else width * count):
        raise ValueError(f"tensor {name!r} has {tensor.shape[0]} rows, which are not {count} heads of {width}")
    halves = tensor.reshape(-1, width // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    return halves.expand(count, -1) if found[2] == "norm" else halves


def _with_image_word(path: Path) -> dict[str, Any]:
    """Read a tokenizer's file, and give the token of a given image its name in transformers."""
    listed = read_json_object(path, most=MOST_BYTES)
    vocabulary, new = listed["model"]["vocab"], CHAMELEON_TOKENS["image_token"]
    vocabulary[new] = vocabulary.pop(IMAGE_WORD)
    for token in listed.get("added_tokens", []):
        token["content"] = new if token["content"] == IMAGE_WORD else token["content"]
    return listed


def _vqgan_config(path: Path) -> dict[str, Any]:
    """Return the sizes of a VQGAN in transformers' names; ValueError for a file that is no such config."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]["params"]
        sizes = values["ddconfig"]
        found = {name: sizes[old] for name, old in VQGAN_FIELDS.items() if old in sizes}
        found |= {"embed_dim": values["embed_dim"], "num_embeddings": values["n_embed"]}
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is no config of a VQGAN ({type(error).__name__}: {one_line(error)})") from error
    return found | {"attn_resolutions": found.get("attn_resolutions") or None}


def _tokenizer(path: Path, listed: Mapping[str, Any], special: Mapping[str, str], extra: Mapping[str, str]) -> Any:
    """Return a tokenizer of transformers from its file; ValueError where a special token is not in its vocabulary."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    try:
        backend = Tokenizer.from_str(json.dumps(listed))
    except Exception as error:  # the reader raises plain Exceptions
        raise ValueError(f"{path} is no tokenizer: {one_line(error)}") from error
    absent = [word for word in (*special.values(), *extra.values()) if backend.token_to_id(word) is None]
    if absent:
        raise ValueError(f"{path}: the vocabulary has no {absent[0]!r}")
    return PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=dict(extra), **special)


def _special(tokenizer: Any) -> dict[str, Any]:
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}


def _weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Path]]:
    """Return the tensors of a folder, and the file of each; ValueError where none or one of several is missing."""
    state: dict[str, Tensor] = {}
    files: dict[str, Path] = {}
    for file in weight_files(path):
        for key, tensor in read_weights(file).items():
            if not isinstance(key, str) or not isinstance(tensor, Tensor):
                raise ValueError(f"{file}: entry {str(key)[:60]!r} is a {type(tensor).__name__}, wanted a tensor")
            state[key], files[key] = tensor, file
    return state, files


def _renamed(key: str, names: Mapping[str, str | None], source: Path) -> str | None:
    for pattern, new in names.items():
        if found := re.fullmatch(pattern, key):
            return None if new is None else found.expand(new)
    raise ValueError(f"{source}: tensor {key[:80]!r} is not expected")


def _on_meta(kind: Any, config: Any) -> Any:
    with quiet(), torch.device("meta"):
        return kind(config).eval()
