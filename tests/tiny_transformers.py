"""Tiny random models of transformers' real classes, with processors, saved in the layout of their releases."""

import json
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lantern.models.transformers.chameleon import PREFIX, VQDecoder
from lantern.models.transformers.components import Components
from lantern.models.transformers.emu3 import NEGATIVE
from lantern.models.transformers.loading import FAMILIES
from lantern.models.transformers.simplear import UNCONDITIONAL

TEMPLATE = (
    "{% for message in messages %}<bos>User: {% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
    " Assistant:{% endfor %}"
)
WORDS = ["<unk>", "<bos>", "<pad>", "<eos>", "<boi>", "<eoi>", "<image>", "User:", "Assistant:"]
WORDS += ["a", "red", "blue", "apple", "ring", "of", "the", "sky"]
# sizes that the families share
HEADS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4}
BODY: dict[str, Any] = HEADS | {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2}
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "pad_token_id": 2, "eos_token_id": 3}
VQ: dict[str, Any] = {"latent_channels": 32, "base_channels": 32, "num_res_blocks": 1}


def randomise(model: torch.nn.Module, seed: int = 0) -> Any:
    """Give matrices weights large enough for tokens to depend on each other."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0, 1.4 * parameter.shape[1] ** -0.5, generator=generator)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.weight.data.normal_(generator=generator)
    return model.eval()


def tokenizer(words: list[str], **special: str) -> Any:
    """A tokenizer of whole words; `special` are its special tokens by name."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own = {name: special.pop(name) for name in ("bos_token", "pad_token", "eos_token") if name in special}
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", extra_special_tokens=special, **own)


def tiny_janus(seed: int = 0) -> Any:
    """Janus with 40 tokens in a grid of 4 x 4."""
    from transformers import (
        JanusConfig,
        JanusForConditionalGeneration,
        JanusVisionConfig,
        JanusVQVAEConfig,
        LlamaConfig,
    )

    text = LlamaConfig(vocab_size=32, max_position_embeddings=128, **BODY)
    vision = JanusVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=2, num_image_tokens=16
    )
    widths: dict[str, Any] = {"channel_multiplier": [1, 1], "projection_dim": 32, "image_token_embed_dim": 32}
    vq = JanusVQVAEConfig(num_embeddings=40, **VQ, **widths)
    config = JanusConfig(text_config=text, vision_config=vision, vq_config=vq, image_token_id=6)
    model = randomise(JanusForConditionalGeneration(config), seed)
    calls = model.generation_config
    vars(calls).update(SPECIAL)
    calls._from_model_config = False  # else own fields are not read again
    calls.guidance_scale, calls.generation_kwargs = 5.0, {"boi_token_id": 4}
    return model


def janus_processor() -> Any:
    """The processor of `tiny_janus`."""
    from transformers import JanusImageProcessor, JanusProcessor

    names = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    words = tokenizer(WORDS, bos_token="<bos>", pad_token="<pad>", eos_token="<eos>", **names)
    return JanusProcessor(JanusImageProcessor(), words, chat_template=TEMPLATE, num_image_tokens=16)


def janus_tokens(model: Any, processor: Any, prompt: str) -> torch.Tensor:
    """Greedy tokens of the library, as its documentation makes images."""
    message = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    text = processor.apply_chat_template(message, add_generation_prompt=True)
    inputs = processor(text=text, generation_mode="image", return_tensors="pt")
    return model.generate(**inputs, generation_mode="image", do_sample=False)[0]


def tiny_emu3(seed: int = 0) -> Any:
    """Emu3 with 24 tokens, whose tokens are not in order, and grids of any size."""
    from transformers import Emu3Config, Emu3ForConditionalGeneration, Emu3TextConfig, Emu3VQVAEConfig

    text = Emu3TextConfig(vocab_size=64, **BODY, **SPECIAL)
    own: dict[str, Any] = {"hidden_size": 32, "attn_resolutions": [3], "temporal_downsample_factor": 2}
    sizes = {name: VQ[name] for name in ("base_channels", "num_res_blocks")}
    vq = Emu3VQVAEConfig(codebook_size=24, channel_multiplier=[1, 1, 1, 1], **sizes, **own)
    config = Emu3Config(text_config=text, vq_config=vq, vocabulary_map=emu3_words())
    return randomise(Emu3ForConditionalGeneration(config), seed)


def emu3_words() -> dict[str, int]:
    """The vocabulary of `tiny_emu3`: words, then image tokens in another order than their numbers."""
    words = [*WORDS, "<img>", "<eof>", "<|extra_200|>", "3*4", "lowres,"]
    tokens = [f"<|visual token {token * 7 % 24:06d}|>" for token in range(24)]
    return {word: i for i, word in enumerate([*words, *tokens])}


def emu3_processor() -> Any:
    """The processor of `tiny_emu3`."""
    from transformers import Emu3ImageProcessor, Emu3Processor

    names = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>", "eof_token": "<eof>"}
    own = {"bos_token": "<bos>", "pad_token": "<pad>", "eos_token": "<eos>", "image_wrapper_token": "<img>"}
    return Emu3Processor(Emu3ImageProcessor(), tokenizer(list(emu3_words()), **own, **names))


def emu3_tokens(model: Any, processor: Any, prompt: str) -> torch.Tensor:
    """Greedy tokens of the library, as its documentation makes images, of 3 rows of 4 tokens."""
    rows, columns, size = 3, 4, {"ratio": "4:3", "image_area": 12 * 64}
    inputs, negative = (
        processor(text=[text], return_for_image_generation=True, return_tensors="pt", **size)
        for text in (prompt, NEGATIVE)
    )
    visual, newline = model.vocabulary_mapping.image_tokens, emu3_words()["<|extra_200|>"]
    start = inputs["input_ids"].shape[1]

    def allowed(_: int, seen: torch.Tensor) -> list[int]:
        return [newline] if (len(seen) - start + 1) % (columns + 1) == 0 else visual

    found = greedy(model, inputs["input_ids"], negative["input_ids"], allowed, count=rows * (columns + 1), guidance=3.0)
    return model.vocabulary_mapping.convert_bpe2img(found.view(-1, rows, columns + 1)).flatten()


CHAMELEON_VQ: dict[str, Any] = VQ | {
    "embed_dim": 8,
    "num_embeddings": 24,
    "resolution": 8,
    "channel_multiplier": [1, 2],
}
CHAMELEON = ["<racm3:break>", "<eoss>", "<reserved08706>", "<reserved08799>", "<reserved08801>", "<reserved08802>"]


def chameleon_words() -> dict[str, int]:
    """The vocabulary of `tiny_chameleon`: words, then image tokens in another order than their numbers."""
    tokens = [f"IMGIMG{chr(65 + token // 10)}{chr(65 + token % 10)}Z" for token in (7 * i % 24 for i in range(24))]
    words = [*WORDS, *CHAMELEON, "Generate", "an", "image", "8x4", "according", "to", "following", "prompt:"]
    return {word: i for i, word in enumerate([*words, *tokens])}


def tiny_chameleon(seed: int = 0) -> Any:
    """Chameleon with 24 tokens, whose tokens are not in order, in a grid of 4 x 4, and a decoder beside it."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration, ChameleonVQVAEConfig

    how: dict[str, Any] = {"vq_config": ChameleonVQVAEConfig(**CHAMELEON_VQ), "vocabulary_map": chameleon_words()}
    config = ChameleonConfig(vocab_size=72, **BODY | {"num_key_value_heads": 4}, **how, **SPECIAL)
    return randomise(ChameleonForConditionalGeneration(config), seed)


def chameleon_tokenizer() -> Any:
    """The tokenizer of `tiny_chameleon`, as released for Lumina-mGPT."""
    names = {"image_token": "<image>", "boi_token": CHAMELEON[0], "eoi_token": CHAMELEON[1], "sep_token": CHAMELEON[2]}
    others = {f"other_{i}_token": word for i, word in enumerate(CHAMELEON[3:])}
    own = {"bos_token": "<bos>", "pad_token": "<pad>", "eos_token": "<eos>"}
    return tokenizer(list(chameleon_words()), **own, **names, **others)


def chameleon_processor() -> Any:
    """The processor of `tiny_chameleon`, as released for Anole."""
    from transformers import ChameleonImageProcessor, ChameleonProcessor

    return ChameleonProcessor(ChameleonImageProcessor(), chameleon_tokenizer(), image_seq_length=16)


def chameleon_tokens(model: Any, processor: Any, prompt: str) -> torch.Tensor:
    """Greedy tokens of the library with the logits of tokens left in, with guidance 3."""
    ids = [1, *processor(text=prompt)["input_ids"][0].tolist(), processor.image_start_token_id]
    return _chameleon_grid(model, ids, [1, processor.image_start_token_id], guidance=3.0)


def lumina_tokens(model: Any, words: Any, prompt: str) -> torch.Tensor:
    """Greedy tokens of the library for an image of 2 x 4 tokens, with newlines and guidance 4."""
    text = f"Generate an image of 8x4 according to the following prompt:\n{prompt}<reserved08706>"
    begin = words.convert_tokens_to_ids(["<racm3:break>", "<reserved08801>", "<reserved08802>"])
    ids = [1, *words.encode(text, add_special_tokens=False), *begin]
    return _chameleon_grid(model, ids, begin, guidance=4.0, columns=4, rows=2)


def _chameleon_grid(
    model: Any, ids: list[int], negative: list[int], *, guidance: float, columns: int = 0, rows: int = 0
) -> torch.Tensor:
    """Greedy tokens; with `columns` a newline follows each row."""
    mapping = model.model.vocabulary_mapping
    visual, newline = list(mapping.image_tokens), chameleon_words()["<reserved08799>"]

    def allowed(_: int, seen: torch.Tensor) -> list[int]:
        is_end = columns and (len(seen) - len(ids) + 1) % (columns + 1) == 0
        return [newline] if is_end else visual

    mapping.__dict__["image_tokens"] = []  # else the class masks the logits of tokens
    try:
        count = rows * (columns + 1) or 16
        found = greedy(model, torch.tensor([ids]), torch.tensor([negative]), allowed, count=count, guidance=guidance)
    finally:
        mapping.__dict__["image_tokens"] = visual
    return torch.tensor([mapping.bpe2img[token] for token in found.tolist() if token != newline])


LIQUID = [*WORDS, "Generate", "an", "image", "based", "on", "this", "description.", "<unconditional>"]
LIQUID += ["<|endoftext|>"]  # which Qwen2 always has
SIMPLEAR = ["<unk>", "<pad>", "<|endoftext|>", "<|t2i|>", "<|soi|>", *WORDS[9:]]
SIMPLEAR += ["A", "highly", "realistic", "image", "An"]


def tiny_liquid(seed: int = 0, *, kv_heads: int = 1) -> Any:
    """Gemma with 24 tokens behind its words and three unused tokens behind them, in a grid of 4 x 4."""
    from transformers import GemmaConfig, GemmaForCausalLM

    sizes: dict[str, Any] = BODY | {"vocab_size": len(LIQUID) + 27, "head_dim": 8, "num_key_value_heads": kv_heads}
    config: Any = GemmaConfig(**sizes)
    config.vq_config = dict(CHAMELEON_VQ)
    model = randomise(GemmaForCausalLM(config), seed)
    model.lm_head.weight.data.mul_(0.1)  # and the words, which are the same
    return model


def liquid_tokenizer() -> Any:
    """The tokenizer of `tiny_liquid`."""
    names = {"boi_token": "<boi>", "eoi_token": "<eoi>", "unconditional_token": "<unconditional>"}
    return tokenizer(LIQUID, bos_token="<bos>", pad_token="<pad>", eos_token="<eos>", **names)


def liquid_tokens(model: Any, words: Any, prompt: str) -> torch.Tensor:
    """Greedy tokens of the library, with guidance 7."""
    texts = f"{prompt} Generate an image based on this description.<boi>", "<unconditional><boi>"
    return _causal_grid(model, words, texts, tokens=24, count=16, guidance=7.0)


def tiny_simplear(seed: int = 0) -> Any:
    """Qwen2 with 24 tokens of three digits behind its words."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config: Any = Qwen2Config(vocab_size=len(SIMPLEAR) + 24, **BODY)
    config.vq_config = {"levels": [4, 3, 2]}
    return randomise(Qwen2ForCausalLM(config), seed)


def simplear_tokenizer() -> Any:
    """The tokenizer of `tiny_simplear`."""
    return tokenizer(list(dict.fromkeys(SIMPLEAR)), pad_token="<pad>", t2i_token="<|t2i|>", soi_token="<|soi|>")


def simplear_tokens(model: Any, words: Any, prompt: str) -> torch.Tensor:
    """Greedy tokens of the library for an image of 3 rows of 4 tokens, with guidance 6."""
    texts = f"<|t2i|>A highly realistic image of {prompt}<|soi|>", UNCONDITIONAL
    return _causal_grid(model, words, texts, tokens=24, count=12, guidance=6.0)


GLM_IMAGE = [f"<|image {token}|>" for token in range(24)]
GLM_IMAGE += ["<boi>", "<eoi>", "<unused>", "<grid>", "</grid>", *WORDS[:4], *WORDS[6:], "2", "3", "13", "19"]


def tiny_glm_image(seed: int = 0) -> Any:
    """GLM-Image with 24 tokens, which are its first words."""
    from transformers import GlmImageConfig, GlmImageForConditionalGeneration

    rotary = {"rope_theta": 100.0, "rope_type": "default", "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}
    size: dict[str, Any] = {"vocab_size": len(GLM_IMAGE), "vision_vocab_size": 27, "hidden_size": 64}
    text = HEADS | size | {"intermediate_size": 48, "num_key_value_heads": 2, "rope_parameters": rotary}
    config = GlmImageConfig(
        text_config=text | {"pad_token_id": GLM_IMAGE.index("<pad>"), "eos_token_id": 25},
        vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "image_size": 64, "intermediate_size": 16},
        vq_config={"embed_dim": 8, "num_embeddings": 24, "latent_channels": 16},
        image_start_token_id=24,
        image_end_token_id=25,
        image_token_id=GLM_IMAGE.index("<image>"),
    )
    return randomise(GlmImageForConditionalGeneration(config), seed)


def glm_image_processor() -> Any:
    """The processor of `tiny_glm_image`."""
    from transformers import GlmImageImageProcessor, GlmImageProcessor

    names = {"image_token": "<image>", "grid_bos_token": "<grid>", "grid_eos_token": "</grid>"}
    words = tokenizer(GLM_IMAGE, bos_token="<boi>", pad_token="<pad>", eos_token="<eos>", **names)
    return GlmImageProcessor(GlmImageImageProcessor(), words, chat_template=TEMPLATE.replace("<bos>", ""))


def glm_image_tokens(model: Any, processor: Any, prompt: str) -> torch.Tensor:
    """Greedy tokens of the library for an image of 2 x 3 tokens, behind those of the small grid of 13 x 19."""
    message = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    how: dict[str, Any] = {"target_h": 64, "target_w": 96, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template([message], tokenize=True, **how)
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 3], [1, 13, 19]]
    found = model.generate(
        **inputs,
        max_new_tokens=13 * 19 + 2 * 3,
        do_sample=False,
        prefix_allowed_tokens_fn=lambda *_: list(range(24)),
    )
    return found[0, inputs["input_ids"].shape[1] :]


def _causal_grid(
    model: Any, words: Any, texts: tuple[str, str], *, tokens: int, count: int, guidance: float
) -> torch.Tensor:
    """Greedy tokens of the library, which may take no other tokens."""
    ids, negative = (torch.tensor([words(text)["input_ids"]]) for text in texts)
    visual = list(range(len(words), len(words) + tokens))
    return greedy(model, ids, negative, lambda *_: visual, count=count, guidance=guidance) - len(words)


def greedy(
    model: Any, ids: torch.Tensor, negative: torch.Tensor, allowed: Any, *, count: int, guidance: float
) -> torch.Tensor:
    """Greedy tokens of the library behind `ids` (1 n), of those that `allowed` names."""
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        guidance_scale=guidance,
        prefix_allowed_tokens_fn=allowed,
        negative_prompt_ids=negative,
        negative_prompt_attention_mask=torch.ones_like(negative),
    )
    return found[0, ids.shape[1] :]


# family -> how its tiny model and its processor are made
FAMILY: dict[str, Any] = {
    "janus": (tiny_janus, janus_processor),
    "emu3": (tiny_emu3, emu3_processor),
    "chameleon": (tiny_chameleon, chameleon_processor),
    "lumina": (tiny_chameleon, chameleon_tokenizer),
    "liquid": (tiny_liquid, liquid_tokenizer),
    "simplear": (tiny_simplear, simplear_tokenizer),
    "glm_image": (tiny_glm_image, glm_image_processor),
}


def assemble(family: str, model: Any, processor: Any, size: tuple[int, int] | None = None) -> Components:
    """The components of a model in memory."""
    made = import_module(FAMILIES[family]).assemble(model, processor, size)
    if family == "liquid":
        with TemporaryDirectory() as folder:
            save_vqgan(model, Path(folder))
            made.vq.read(Path(folder))
    return made


def save_vqgan(model: Any, folder: Path) -> None:
    """Write the VQ tokenizer of a tiny Liquid as it is released with Chameleon."""
    from transformers import ChameleonVQVAEConfig
    from transformers.models.chameleon.modeling_chameleon import ChameleonVQVAE

    config = ChameleonVQVAEConfig(**model.config.vq_config)
    torch.manual_seed(1)
    state = randomise(ChameleonVQVAE(config)).state_dict() | released(VQDecoder(config))
    torch.save({"state_dict": state}, folder / "vqgan.ckpt")


def save(family: str, model: Any, processor: Any, folder: Path) -> Path:
    """Write model and processor as they are released."""
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    if family == "chameleon":  # the decoder is among the weights
        state = load_file(folder / "model.safetensors")
        own = {PREFIX + name: tensor for name, tensor in released(vq_decoder(model)).items()}
        save_file(state | own, folder / "model.safetensors", metadata={"format": "pt"})
    if family == "lumina":  # the decoder comes with Chameleon's release, the class is their own
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = ["ChameleonXLLMXForConditionalGeneration"]
        (folder / "config.json").write_text(json.dumps(config))
        torch.save({"state_dict": released(vq_decoder(model))}, folder / "vqgan.ckpt")
    if family == "liquid":
        save_vqgan(model, folder)
    return folder


def vq_decoder(model: Any) -> VQDecoder:
    """A decoder with random weights for a tiny Chameleon."""
    torch.manual_seed(1)
    return VQDecoder(model.config.vq_config).eval()


def released(decoder: VQDecoder) -> dict[str, torch.Tensor]:
    """The tensors of a decoder of two levels under VQGAN's names: levels begin with the highest resolution."""
    names = {"mid.0.": "mid.block_1.", "mid.1.": "mid.attn_1.", "mid.2.": "mid.block_2.", ".res.": ".block."}
    names |= {"conv_blocks.0.": "up.1.", "conv_blocks.1.": "up.0."}
    state = decoder.state_dict()
    for own, other in names.items():
        state = {name.replace(own, other): tensor for name, tensor in state.items()}
    return state
