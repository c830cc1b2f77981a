"""Tiny random models of transformers' real classes, with processors, saved in the layout of their releases."""

import json
import re
from base64 import b64encode
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lantern.core.types import Raster
from lantern.models.llamagen.vqvae import CODEBOOK_USED, VQVAE, VQConfig
from lantern.models.transformers import emu35
from lantern.models.transformers.chameleon import PREFIX, VQDecoder
from lantern.models.transformers.components import Components
from lantern.models.transformers.emu3 import NEGATIVE
from lantern.models.transformers.janus import JanusTokens
from lantern.models.transformers.loading import FAMILIES
from lantern.models.transformers.target import TokenEmbedding, TokenHead, TransformersTarget
from lantern.models.transformers.tokens_only import SIMPLEAR_UNCONDITIONAL

DATA = Path(__file__).parent / "data"
# of each family: class, config, words and special tokens, and the options of its processor if it has more than words
MODELS = json.loads((DATA / "tiny_models.json").read_text())
MODELS["lumina"] = {name: value for name, value in MODELS["chameleon"].items() if name != "processor"}
# height and width of the images of families that have several
SIZES = {"emu3": (24, 32), "emu3.5": (6, 8), "lumina": (4, 8), "simplear": (48, 64), "glm_image": (64, 96)}
# patterns in names of tensors here, and what they are in releases and in other libraries
NAMES = json.loads((DATA / "released_names.json").read_text())


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


def word_ids(family: str) -> dict[str, int]:
    return {word: i for i, word in enumerate(MODELS[family]["words"])}


def make(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model of about 24 tokens and two layers; `changes` are other fields of its config."""
    import transformers

    fields = MODELS[family]["config"] | changes
    if "vocabulary_map" in fields:
        fields["vocabulary_map"] = word_ids(family)
    config = transformers.AutoConfig.for_model(**fields)
    model = randomise(getattr(transformers, MODELS[family]["model"])(config), seed)
    if family == "janus":
        calls = model.generation_config
        vars(calls).update({"bos_token_id": 1, "pad_token_id": 2, "eos_token_id": 3})
        calls._from_model_config = False  # else own fields are not read again
        calls.guidance_scale, calls.generation_kwargs = 5.0, {"boi_token_id": 4}
    if family == "liquid":
        model.lm_head.weight.data.mul_(0.1)  # and the words, which are the same
    return model


def processor(family: str) -> Any:
    """The processor of a tiny model; Lumina-mGPT, Liquid and SimpleAR are released with a tokenizer alone."""
    import transformers

    made = MODELS[family]
    if family == "emu3.5":
        with TemporaryDirectory() as folder:
            save_ranks(Path(folder))
            return emu35.read_tokenizer(Path(folder))
    words = tokenizer(made["words"], **made["special"])
    if "processor" not in made:
        return words
    kind = made["model"].removesuffix("ForConditionalGeneration")
    images = getattr(transformers, f"{kind}ImageProcessor")()
    return getattr(transformers, f"{kind}Processor")(images, words, **made["processor"])


def janus_tokens(model: Any, processor: Any, prompt: str) -> list[int]:
    """Greedy tokens of the library, as its documentation makes images."""
    message = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    text = processor.apply_chat_template(message, add_generation_prompt=True)
    inputs = processor(text=[text], generation_mode="image", return_tensors="pt")
    return model.generate(**inputs, generation_mode="image", do_sample=False)[0].tolist()


def glm_image_tokens(model: Any, processor: Any, prompt: str) -> list[int]:
    """Greedy tokens of the library for an image of 2 x 3 tokens, behind those of the small grid of 13 x 19."""
    message = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    how: dict[str, Any] = {"target_h": 64, "target_w": 96, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template([message], tokenize=True, **how)
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 3], [1, 13, 19]]
    found = model.generate(
        **inputs, max_new_tokens=13 * 19 + 2 * 3, do_sample=False, prefix_allowed_tokens_fn=lambda *_: list(range(24))
    )
    return found[0, inputs["input_ids"].shape[1] :].tolist()


def emu3_tokens(model: Any, processor: Any, prompt: str) -> list[int]:
    """Greedy tokens of the library, as its documentation makes images, of 3 rows of 4 tokens."""
    how = {"return_for_image_generation": True, "ratio": "4:3", "image_area": 12 * 64}
    ids, negative = (processor(text=[text], **how)["input_ids"][0] for text in (prompt, NEGATIVE))
    return _mapped(model, list(ids), list(negative), rows=3, guidance=3.0, newline=word_ids("emu3")["<|extra_200|>"])


def chameleon_tokens(model: Any, processor: Any, prompt: str) -> list[int]:
    """Greedy tokens of the library with the logits of tokens left in, with guidance 3."""
    ids = [1, *processor(text=prompt)["input_ids"][0].tolist(), processor.image_start_token_id]
    return _mapped(model, ids, [1, processor.image_start_token_id], rows=4, guidance=3.0)


def lumina_tokens(model: Any, words: Any, prompt: str) -> list[int]:
    """Greedy tokens of the library for an image of 2 x 4 tokens, with newlines and guidance 4."""
    text = f"Generate an image of 8x4 according to the following prompt:\n{prompt}<reserved08706>"
    begin = words.convert_tokens_to_ids(["<racm3:break>", "<reserved08801>", "<reserved08802>"])
    ids = [1, *words.encode(text, add_special_tokens=False), *begin]
    return _mapped(model, ids, begin, rows=2, guidance=4.0, newline=word_ids("chameleon")["<reserved08799>"])


def _mapped(model: Any, ids: list[int], negative: list[int], **how: Any) -> list[int]:
    """Greedy tokens of a model whose vocabulary has those of images among its words."""
    mapping = model.model.vocabulary_mapping
    visual = list(mapping.image_tokens)
    mapping.__dict__["image_tokens"] = []  # else Chameleon's class masks the logits of tokens
    try:
        found = greedy(model, ids, negative, visual, **how)
    finally:
        mapping.__dict__["image_tokens"] = visual
    return [mapping.bpe2img[token] for token in found]


def liquid_tokens(model: Any, words: Any, prompt: str) -> list[int]:
    """Greedy tokens of the library, with guidance 7."""
    texts = f"{prompt} Generate an image based on this description.<boi>", "<unconditional><boi>"
    return _behind(model, words, texts, rows=4, guidance=7.0)


def simplear_tokens(model: Any, words: Any, prompt: str) -> list[int]:
    """Greedy tokens of the library for an image of 3 rows of 4 tokens, with guidance 6."""
    texts = f"<|t2i|>A highly realistic image of {prompt}<|soi|>", SIMPLEAR_UNCONDITIONAL
    return _behind(model, words, texts, rows=3, guidance=6.0)


def emu35_tokens(model: Any, words: Any, prompt: str) -> list[int]:
    """Greedy tokens of the library for an image of 3 rows of 4 tokens with newlines between them, with guidance 5."""
    image = " <|extra_100|><|image start|>3*4<|image token|>"
    texts = (
        f"<|extra_203|>You are a helpful assistant for t2i task. USER: {prompt} ASSISTANT:{image}",
        f"<|extra_203|>You are a helpful assistant. USER:  ASSISTANT:{image}",
    )
    return _behind(model, words, texts, rows=3, guidance=5.0, newline=words.convert_tokens_to_ids("<|extra_200|>"))


def _behind(model: Any, words: Any, texts: tuple[str, str], **how: Any) -> list[int]:
    """Greedy tokens of a model whose 24 tokens of images are behind its words."""
    ids, negative = (words(text)["input_ids"] for text in texts)
    found = greedy(model, ids, negative, list(range(len(words), len(words) + 24)), **how)
    return [token - len(words) for token in found]


def greedy(
    model: Any,
    ids: list[int],
    negative: list[int],
    visual: list[int],
    *,
    rows: int,
    guidance: float,
    newline: int | None = None,
) -> list[int]:
    """Greedy tokens of the library behind `ids`, of those in `visual`, in rows of four with newlines between them."""
    width, prompt, unconditional = 4 if newline is None else 5, torch.tensor([ids]), torch.tensor([negative])

    def allowed(_: int, seen: torch.Tensor) -> list[int]:
        return visual if newline is None or (len(seen) - len(ids) + 1) % width else [newline]

    found = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=rows * width,
        do_sample=False,
        guidance_scale=guidance,
        prefix_allowed_tokens_fn=allowed,
        negative_prompt_ids=unconditional,
        negative_prompt_attention_mask=torch.ones_like(unconditional),
    )
    return [token for token in found[0, len(ids) :].tolist() if token != newline]


def sequential(target: Any, prompt: torch.Tensor, tokens: list[int], **how: Any) -> tuple[Any, list[int]]:
    """What a target's decoder gives for a prompt and tokens without a cache, and where: behind each token's newline."""
    raster, inputs, ends = target.config.raster, [*target.words(prompt)], []
    for place, token in enumerate(tokens):
        inputs.append(target.tok_embeddings(torch.tensor(token)))
        if raster.newlines and (place + 1) % raster.columns == 0:
            inputs.append(target.words(torch.tensor(raster.newline)))
        ends.append(len(inputs) - 1)
    return target.body(inputs_embeds=torch.stack(inputs)[None], **how), ends


def assemble(family: str, model: Any = None, words: Any = None, size: tuple[int, int] | None = None) -> Components:
    """The components of a model in memory, by default of a new one, with a processor if one is given."""
    model = model or make(family)
    made = FAMILIES[family].assemble(model, words, size or SIZES.get(family))
    if family == "liquid":
        with TemporaryDirectory() as folder:
            save_vqgan(model, Path(folder))
            made.vq.read(Path(folder))
    if family == "emu3.5":
        with TemporaryDirectory() as folder:
            save_ibq(model, Path(folder))
            made.vq.read(Path(folder))
    return made


def save_ranks(folder: Path) -> None:
    """Write the words of a tiny Emu3.5 as they are released: bytes, and then longer ones, with their ranks."""
    words = [*(bytes([i]) for i in range(256)), *(word.encode() for word in MODELS["emu3.5"]["words"])]
    lines = [f"{b64encode(word).decode()} {rank}\n" for rank, word in enumerate(words)]
    (folder / emu35.WORDS_NAME).write_text("".join(lines))


def save_ibq(model: Any, folder: Path) -> None:
    """Write a VQ tokenizer for a tiny Emu3.5 as it is released."""
    torch.manual_seed(1)
    made = randomise(VQVAE(VQConfig(codebook_l2_norm=False, **model.config.vq_config)))
    state = {name: tensor for name, tensor in made.state_dict().items() if name != CODEBOOK_USED}
    torch.save({"state_dict": renamed(state, "vqgan")}, folder / emu35.PIXELS_NAME)


def save_vqgan(model: Any, folder: Path) -> None:
    """Write the VQ tokenizer of a tiny Liquid as it is released with Chameleon."""
    from transformers import ChameleonVQVAEConfig
    from transformers.models.chameleon.modeling_chameleon import ChameleonVQVAE

    config = ChameleonVQVAEConfig(**model.config.vq_config)
    torch.manual_seed(1)
    state = randomise(ChameleonVQVAE(config)).state_dict() | released(VQDecoder(config))
    torch.save({"state_dict": state}, folder / "vqgan.ckpt")


def save(family: str, folder: Path, model: Any = None) -> Path:
    """Write a model, by default a new one, and its processor as they are released."""
    model = model or make(family)
    model.save_pretrained(folder)
    if family == "emu3.5":  # whose class is their own
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "Emu3", "architectures": ["Emu3ForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config))
        save_ranks(folder)
        save_ibq(model, folder)
        return folder
    processor(family).save_pretrained(folder)
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
    torch.manual_seed(1)
    return VQDecoder(model.config.vq_config).eval()


def renamed(state: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """The tensors under the names of a layout of `NAMES`: its patterns are replaced one after the other."""
    for own, other in NAMES[layout].items():
        state = {re.sub(own, other, name): tensor for name, tensor in state.items()}
    return state


def released(decoder: VQDecoder) -> dict[str, torch.Tensor]:
    """The tensors of a decoder of two levels under VQGAN's names: levels begin with the highest resolution."""
    return renamed(decoder.state_dict(), "vqgan")


def llama(*, n_layer: int = 1, kept: int = 1, side: int = 3, has_tokens: bool = False) -> TransformersTarget:
    """Return Janus around a Llama with two heads, `kept` of keys and values; with `has_tokens` its tokens are words."""
    from transformers import LlamaConfig, LlamaModel

    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": n_layer}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": kept}
    body = randomise(LlamaModel(LlamaConfig(**sizes, **heads, max_position_embeddings=160)))
    inner, words = make("janus").model, body.embed_tokens
    embedding, head = JanusTokens(inner.generation_embeddings, inner.generation_aligner), inner.generation_head
    if has_tokens:
        tokens = torch.arange(31, 11, -1)
        embedding, head = TokenEmbedding(words, tokens), TokenHead(randomise(torch.nn.Linear(32, 32)), tokens)
    how: dict[str, Any] = {"tokens": 20 if has_tokens else 40, "family": "janus", "raster": Raster(side, side)}
    return TransformersTarget(body, words, embedding, head, **how)
