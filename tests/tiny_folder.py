"""A whole model at toy size, as a folder: text or class in, 16 tokens, 8x8 pixels out."""

from pathlib import Path
from typing import Any

import torch

from lantern.core.io import save_component, weights_digest
from lantern.drafters.eagle.networks import Eagle, EagleConfig
from lantern.models.folder import write_index
from lantern.models.llamagen.text import TextEncoder
from lantern.models.llamagen.vqvae import VQVAE, VQConfig
from tests.tiny import tiny_target
from tests.tiny_parts import tiny_parts

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "apple", "blue", "cat", "and", "dog", "two"]
LEVELS: Any = {"encoder_ch_mult": (1, 1), "decoder_ch_mult": (1, 1)}
VQ = VQConfig(codebook_size=24, codebook_embed_dim=4, z_channels=32, ch=32, num_res_blocks=1, **LEVELS)


def tiny_text_encoder(width: int = 8) -> TextEncoder:
    """A T5 encoder of random weights over a dozen words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = T5Config(vocab_size=len(WORDS), d_model=width, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
        return TextEncoder(T5EncoderModel(config), fast)


def save_tiny_model(folder: Path, *, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write the folder; `changes` are the transformer's, such as model_type="c2i"."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = tiny_target(**changes)
        vq = VQVAE(VQ)
        drafter = Eagle(EagleConfig.for_target(target.config, target=weights_digest(target.state_dict())))
    drafter.init_weights(target.tok_embeddings.weight.data, torch.Generator().manual_seed(0))
    save_component(target.state_dict(), target.config, folder / "transformer")
    save_component(vq.state_dict(), vq.config, folder / "vqvae")
    save_component(drafter.state_dict(), drafter.config, folder / "drafter")
    for name, part in tiny_parts(target).items():
        save_component(part.state_dict(), part.config, folder / "parts" / name)  # type: ignore[arg-type]
    if target.config.model_type == "t2i":
        tiny_text_encoder().save_pretrained(folder / "text_encoder", folder / "tokenizer")
    write_index(folder, generation=generation or {"guidance": 3.0, "top_k": 12})
    return folder
