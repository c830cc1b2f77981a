"""Loads a folder in the layout of transformers: its class, its processor, and the family with its recipe.

With tensor parallelism the processes of `torchrun` share the layers of one model. Every process runs the same loop on
the same noise. Sums over processes are the same on all of them, so that all commit the same tokens. Queries, keys,
values and the inner channels of the feed-forward layers are divided; embeddings, heads and VQ tokenizers are whole on
every process.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lantern.core.config import one_line, read_json_object
from lantern.core.io import CONFIG_NAME, read_checksums, verify_files
from lantern.core.process import quiet
from lantern.models.transformers import chameleon, emu3, emu35, janus, tokens_only
from lantern.models.transformers.components import LOCAL, Components, Family, read_by

AUTO_PROCESSOR, AUTO_TOKENIZER = partial(read_by, "AutoProcessor"), partial(read_by, "AutoTokenizer")
# by name, mostly the model_type of config.json
FAMILIES = {
    "janus": Family("JanusForConditionalGeneration", AUTO_PROCESSOR, janus.assemble),
    "emu3": Family("Emu3ForConditionalGeneration", AUTO_PROCESSOR, emu3.assemble),
    "emu3.5": Family("Qwen3ForCausalLM", emu35.read_tokenizer, emu35.assemble),
    "chameleon": Family("ChameleonForConditionalGeneration", AUTO_PROCESSOR, chameleon.assemble),
    "lumina": Family("ChameleonForConditionalGeneration", AUTO_TOKENIZER, chameleon.assemble_lumina),
    "liquid": Family("GemmaForCausalLM", AUTO_TOKENIZER, chameleon.assemble_liquid, token="<boi>"),
    "simplear": Family(
        "Qwen2ForCausalLM", AUTO_TOKENIZER, tokens_only.assemble_simplear, token="<|t2i|>", has_pixels=False
    ),
    "glm_image": Family(
        "GlmImageForConditionalGeneration", AUTO_PROCESSOR, tokens_only.assemble_glm_image, has_pixels=False
    ),
}
TOKENIZERS = ("added_tokens.json", "tokenizer_config.json", "tokenizer.json")
MOST_BYTES = 1 << 26  # of a config, in which some models list their vocabulary
RELEASED = ("multi_modality",)  # layouts that transformers does not load
# class -> its decoder, whose linears have Llama's names; Chameleon and Emu3 have no plan in transformers
BODIES = {
    "JanusForConditionalGeneration": "model.language_model",
    "Emu3ForConditionalGeneration": "model.text_model",
    "ChameleonForConditionalGeneration": "model",
    "GemmaForCausalLM": "model",
    "Qwen2ForCausalLM": "model",
    "Qwen3ForCausalLM": "model",
}
DIVIDED = {
    **{f"self_attn.{letter}_proj": "colwise" for letter in "qkv"},
    "self_attn.o_proj": "rowwise",
    **{"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"},
}


def family_of(folder: Path) -> Family:
    """Return a folder's family; ValueError for a model of another kind."""
    config = read_json_object(folder / CONFIG_NAME, most=MOST_BYTES)
    kind = str(config.get("model_type"))
    if kind == "chameleon" and "XLLMX" in str(config.get("architectures")):
        kind = "lumina"  # whose own class is Chameleon's
    if kind == "Emu3" and "head_dim" in config:  # the class of the release, whose name Emu3's own had too
        kind = "emu3.5"
    if kind not in (*FAMILIES, *RELEASED) and causal_class(config):  # known by the tokens of its tokenizer
        files = (path for name in TOKENIZERS if (path := folder / name).is_file())
        words = b"".join(path.read_bytes() for path in files)
        known = (name for name, one in FAMILIES.items() if one.token and f'"{one.token}"'.encode() in words)
        kind = next(known, kind)
    if kind in FAMILIES:
        return FAMILIES[kind]
    if kind in RELEASED:
        raise ValueError(f"{folder} has the released layout {kind!r}: convert it first (lantern convert FOLDER OUT)")
    wanted = f"{', '.join(FAMILIES)}; lantern convert reads LlamaGen's and LANTERN's checkpoints"
    raise ValueError(f"{folder / CONFIG_NAME}: model_type is {kind[:40]!r}, wanted one of {wanted}")


def causal_class(config: Mapping[str, Any]) -> str:
    """Return the name of transformers' class if a model is a causal language model, else "".

    A release may name a class of its own, as SimpleAR does: then it is that of its type.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    listed, own = config.get("architectures"), CAUSAL.get(str(config.get("model_type")))
    if isinstance(listed, list) and listed and listed[0] in CAUSAL.values():
        return listed[0]
    return str(own) if own in [one.model for one in FAMILIES.values() if one.token] else ""


def class_of(folder: Path, family: Family) -> Any:
    """Return transformers' class of a model: the family's, or that of another causal language model in its place."""
    import transformers

    another = causal_class(read_json_object(folder / CONFIG_NAME, most=MOST_BYTES)) if family.token else ""
    return getattr(transformers, another or family.model)


def load(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    parts: Collection[str],
    size: tuple[int, int] | None = None,
    verify: bool = True,
    processes: int = 1,
) -> Components:
    """Load the model of a folder; `size` is (height, width) in pixels, for models that make images of several.

    With `processes`, those that `torchrun` started, each loads its share of the layers (`plan_of`). Only local files
    are read, and no code from the folder is run. ValueError names what is missing or damaged.
    """
    family = family_of(folder)
    if verify:
        verify_files(folder, read_checksums(folder))
    kind = class_of(folder, family)
    share = {} if processes == 1 else {"distributed_config": plan_of(kind.__name__, processes)}
    try:
        with quiet():
            processor = family.processor(folder) if "text" in parts or family.token else None
            model, report = kind.from_pretrained(
                folder, dtype=dtype, attn_implementation="sdpa", output_loading_info=True, **LOCAL, **share
            )
    except Exception as error:  # transformers and the readers below it raise of every kind for damaged files
        why = one_line(error)
        what = "" if why.startswith(str(folder)) else f"{folder} holds no {kind.__name__} that loads: "
        raise ValueError(f"{what}{why}") from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{folder}: tensor {missing[0]!r} is missing, and {len(missing) - 1} more")
    made = assembled(folder, family, model.requires_grad_(False).to(device), processor, size)
    if processes > 1:
        divide_heads(made.target, processes)
    if "vq" in parts or ("codebook" in parts and made.vq.codebook.is_meta):
        made.vq.read(folder)
    if not made.vq.codebook.is_meta:
        made.vq.to(device)
    return made


def shape_of(folder: Path, size: tuple[int, int] | None = None) -> Components:
    """Return the model of a folder's config on the meta device, without prompts; no weights are read or allocated.

    ValueError for a config that the class does not accept.
    """
    family = family_of(folder)
    kind = class_of(folder, family)
    try:
        with quiet(), torch.device("meta"):
            config = kind.config_class.from_pretrained(folder, local_files_only=True)
            model = kind._from_config(config, attn_implementation="sdpa")
    except Exception as error:  # as above
        raise ValueError(f"{folder / CONFIG_NAME} is no config of {kind.__name__}: {one_line(error)}") from error
    made = assembled(folder, family, model, None, size)
    made.vq.outline()
    return made


def assembled(
    folder: Path, family: Family, model: Any, processor: Any | None, size: tuple[int, int] | None
) -> Components:
    """Return the parts of a model; ValueError where configs or vocabulary lack what images need."""
    try:
        return family.assemble(model, processor, size)
    except (KeyError, AttributeError, TypeError, IndexError) as error:
        lacking = f"{type(error).__name__}: {one_line(error)}"
        raise ValueError(f"{folder} lacks a part of {family.model} that images need ({lacking})") from error


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
