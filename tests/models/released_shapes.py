"""Configs of the sizes of released models, as their folders have them."""

import json
from pathlib import Path
from typing import Any


def janus(width: int, inner: int, layers: int, heads: int) -> Any:
    """Janus-Pro."""
    from transformers import JanusConfig, JanusVisionConfig, JanusVQVAEConfig, LlamaConfig

    text = LlamaConfig(
        vocab_size=102400,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=16384,
    )
    vq = JanusVQVAEConfig(projection_dim=width, image_token_embed_dim=width)
    return JanusConfig(text_config=text, vision_config=JanusVisionConfig(projection_dim=width), vq_config=vq)


def emu3() -> Any:
    """Emu3-Gen."""
    from transformers import Emu3Config, Emu3TextConfig, Emu3VQVAEConfig

    words = {f"<|visual token {token:06d}|>": 151854 + token for token in range(32768)}
    words |= {"<image>": 151859, "<|extra_200|>": 151846}
    return Emu3Config(text_config=Emu3TextConfig(), vq_config=Emu3VQVAEConfig(), vocabulary_map=words)


def chameleon(positions: int) -> Any:
    """Anole, and Lumina-mGPT with more `positions`."""
    from transformers import ChameleonConfig

    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    words = {f"IMGIMG{str(token).translate(letters)}Z": 4 + token for token in range(8192)}
    words |= {"<image>": 8711, "<reserved08799>": 8803}
    return ChameleonConfig(vocabulary_map=words, max_position_embeddings=positions)


def liquid() -> Any:
    """Liquid 7B, on Gemma."""
    from transformers import GemmaConfig

    return GemmaConfig(vocab_size=256_000 + 8192 + 2)


def simplear(width: int, inner: int, layers: int, heads: int) -> Any:
    """SimpleAR, on Qwen2.5."""
    from transformers import Qwen2Config

    sizes: dict[str, Any] = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 151_665 + 64_000, "max_position_embeddings": 32768, "tie_word_embeddings": True}
    return Qwen2Config(hidden_size=width, intermediate_size=inner, **sizes)


def glm_image() -> Any:
    """GLM-Image."""
    from transformers import GlmImageConfig

    rotary = {"rope_theta": 10000, "rope_type": "default", "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
    return GlmImageConfig(text_config={"rope_parameters": rotary})


# model -> the config, its class, and a token of its tokenizer by which it is known
SHAPES: dict[str, Any] = {
    "Janus-Pro-1B": (lambda: janus(2048, 5632, 24, 16), "JanusForConditionalGeneration", None),
    "Janus-Pro-7B": (lambda: janus(4096, 11008, 30, 32), "JanusForConditionalGeneration", None),
    "Emu3-Gen": (emu3, "Emu3ForConditionalGeneration", None),
    "Anole": (lambda: chameleon(4096), "ChameleonForConditionalGeneration", None),
    "Lumina-mGPT": (lambda: chameleon(10240), "ChameleonXLLMXForConditionalGeneration", None),
    "Liquid 7B": (liquid, "GemmaForCausalLM", "<boi>"),
    "SimpleAR 0.5B": (lambda: simplear(896, 4864, 24, 14), "Qwen2ForCausalLM", "<|t2i|>"),
    "SimpleAR 1.5B": (lambda: simplear(1536, 8960, 28, 12), "Qwen2ForCausalLM", "<|t2i|>"),
    "GLM-Image": (glm_image, "GlmImageForConditionalGeneration", None),
}


def save(name: str, folder: Path) -> Path:
    """Write the config of a model, and the token that names its family."""
    make, kind, token = SHAPES[name]
    config = make()
    config.architectures = [kind]
    config.save_pretrained(folder)
    if token is not None:
        (folder / "added_tokens.json").write_text(json.dumps({token: 5}))
    return folder
