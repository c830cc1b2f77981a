"""Emu3.5 (arXiv:2510.26583): Qwen3's layers, tokens at the end of the vocabulary, a newline token behind each row.

The unconditional row is a prompt without words. The release lets the model write text before an image and choose its
size; here the image begins at once, with its size given. Its words are in `emu3.tiktoken`, its VQ tokenizer, IBQ
(arXiv:2412.02692), is that of LlamaGen with other sizes and VQGAN's names.
"""

from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.types import Raster
from lantern.models.llamagen.vqvae import CODEBOOK_USED, VQVAE, VQConfig
from lantern.models.transformers.chameleon import checkpoint_state, fill, of_vqgan
from lantern.models.transformers.components import Components, PixelConfig, Pixels, TextPrompts, grid_of
from lantern.models.transformers.target import vocabulary_target

GENERATION = {"guidance": 5.0, "temperature": 1.0, "top_k": 5120, "method": "auto"}
SIZE = (1024, 1024)
WORDS_NAME, PIXELS_NAME = "emu3.tiktoken", "model.ckpt"
# how a text is divided into the pieces that are encoded each on its own, and the words behind those of the file
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
IMAGE = ("<|image token|>", "<|image start|>", "<|image end|>")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)), *IMAGE)
NEWLINE = SPECIAL.index("<|extra_200|>") - len(SPECIAL)  # from the first token of images
TEMPLATE = "<|extra_203|>You are a helpful assistant for t2i task. USER: {} ASSISTANT: <|extra_100|>"
UNCONDITIONAL = "<|extra_203|>You are a helpful assistant. USER:  ASSISTANT: <|extra_100|>"
VQ = VQConfig(codebook_size=131_072, codebook_embed_dim=256, codebook_l2_norm=False, ch=256, num_res_blocks=4)


def read_tokenizer(folder: Path) -> Any:
    """Read the words of a model's folder; ValueError where their file is missing or damaged."""
    from tokenizers import normalizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    path = folder / WORDS_NAME
    if not path.is_file():
        raise ValueError(f"{folder} holds no {WORDS_NAME}: copy it from src/tokenizer_emu3_ibq of Emu3.5's repository")

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            """Return the rank of each word; transformers' own reader needs another package."""
            lines = (line.split() for line in Path(tiktoken_url).read_bytes().splitlines() if line)
            return {b64decode(word, validate=True): int(rank) for word, rank in lines}

    try:
        made = Converter(str(path), PIECES, extra_special_tokens=SPECIAL).converted()
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no file of words and ranks: {error}") from error
    made.normalizer = normalizers.NFC()
    return PreTrainedTokenizerFast(tokenizer_object=made)


class Emu35Pixels(Pixels):
    """The VQ tokenizer, whose weights `read` takes from the folder. A vector's token is that of the largest product."""

    def __init__(self, config: VQConfig, raster: Raster) -> None:
        with torch.device("meta"):
            vq = VQVAE(config).eval().requires_grad_(False)
        super().__init__(vq, PixelConfig(config.codebook_size, config.downsample), raster, None)

    def read(self, folder: Path) -> None:
        """Read encoder, codebook and decoder; ValueError where the folder holds none."""
        source = folder / PIXELS_NAME
        if not source.is_file():
            raise ValueError(
                f"{folder} holds no VQ tokenizer: put {PIXELS_NAME} of Emu3.5-VisionTokenizer into it,"
                " or write the tokens only (--tokens)"
            )
        found = of_vqgan(checkpoint_state(source), len(self.vq.config.encoder_ch_mult))
        found[CODEBOOK_USED] = torch.zeros(self.vq.quantize.codebook_used.shape)
        fill(self.vq, found, source=source)

    def quantize(self, pixels: Float[Tensor, "b 3 h w"]) -> Int[Tensor, "b rows columns"]:
        """Encode pixels, a row of tokens at a time: their codebook is large."""
        rows = self.vq.latents(pixels).permute(0, 2, 3, 1).unbind(1)
        return torch.stack([(row @ self.codebook.T).argmax(-1) for row in rows], 1)

    def paint(self, grids: Int[Tensor, "b rows columns"]) -> Float[Tensor, "b 3 h w"]:
        """Decode grids."""
        return self.vq.decode_latents(self.codebook[grids].permute(0, 3, 1, 2))


def assemble(model: Any, tokenizer: Any | None, size: tuple[int, int] | None = None) -> Components:
    """Return the parts of an Emu3.5 for images of `size`, by default 1024 x 1024 pixels.

    Sizes of the VQ tokenizer other than the release's are `vq_config` in config.json.
    ValueError for a tokenizer whose words are not those before the tokens of images.
    """
    config, words = replace(VQ, **model.config.to_dict().get("vq_config", {})), model.get_input_embeddings()
    rows, columns = grid_of(size or SIZE, config.downsample)
    first = len(words.weight) - config.codebook_size
    if (known := first if tokenizer is None else len(tokenizer)) != first or first < len(SPECIAL):
        raise ValueError(f"{WORDS_NAME} has {known} words with the special ones, the model {first} before images")
    raster, tokens = Raster(rows, columns, newline=first + NEWLINE), torch.arange(first, len(words.weight))
    target = vocabulary_target(model.model, words, model.lm_head, tokens, family="emu3.5", raster=raster)
    begin = f"<|image start|>{rows}*{columns}<|image token|>"
    text = None if tokenizer is None else TextPrompts(tokenizer, TEMPLATE + begin, UNCONDITIONAL + begin)
    return Components(target, Emu35Pixels(config, raster), text, GENERATION)
