"""A whole model at toy size: the real classes with random weights, and the embedded model's text encoder."""

import shutil
from pathlib import Path

import torch

from lantern.core.io import read_config, save_component, weights_digest
from lantern.core.places import embedded_model
from lantern.drafters.eagle.eagle1 import Eagle, EagleConfig
from lantern.models.folder import write_index
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.models.llamagen.vqvae import VQVAE, VQConfig

TOKENS = 64  # of the codebook, and of a picture


def save_toy_model(folder: Path) -> Path:
    """Write the folder of a text-conditional model of 8 x 8 tokens, with a drafter; return the folder."""
    source = embedded_model()
    for part in ("text_encoder", "tokenizer"):
        shutil.copytree(source / part, folder / part, dirs_exist_ok=True)
    config = TransformerConfig(
        dim=64,
        n_layer=2,
        n_head=2,
        multiple_of=32,
        model_type="t2i",
        caption_dim=read_config(source / "transformer")["caption_dim"],
        cls_token_num=8,
        vocab_size=TOKENS,
        block_size=TOKENS,
    )
    small = (1, 1, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = Transformer(config)
        vq = VQVAE(
            VQConfig(TOKENS, 8, encoder_ch_mult=small, decoder_ch_mult=small, z_channels=32, ch=32, num_res_blocks=1)
        )
        drafter = Eagle(EagleConfig.for_target(config, target=weights_digest(target.state_dict())))
    save_component(target.state_dict(), config, folder / "transformer")
    save_component(vq.state_dict(), vq.config, folder / "vqvae")
    save_component(drafter.state_dict(), drafter.config, folder / "drafter")
    write_index(folder, generation={"guidance": 3.0, "top_k": 32})
    return folder
