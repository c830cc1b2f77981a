"""The tokenizer: agreement with the implementation of transformers, shapes and refusals."""

from typing import Any

import pytest
import torch

from lantern.models.llamagen.vqvae import VQVAE, VQConfig, to_uint8
from tests import tiny_transformers as tiny
from tests.refusals import refused
from tests.tiny import initialised

SIZES: dict[str, Any] = {"ch": 32, "z_channels": 32, "codebook_size": 64, "codebook_embed_dim": 8}
MULTIPLES = (1, 1, 2)


@pytest.fixture(scope="module")
def vq() -> VQVAE:
    """A tokenizer with random weights, codebook vectors of any length, and outputs of the size of trained ones."""
    return initialised(VQVAE(VQConfig(encoder_ch_mult=MULTIPLES, decoder_ch_mult=MULTIPLES, **SIZES)))


@pytest.fixture(scope="module")
def reference(vq: VQVAE) -> Any:
    """The same weights in JanusVQVAE of transformers, which has the architecture of LlamaGen's tokenizer."""
    from transformers.models.janus.configuration_janus import JanusVQVAEConfig
    from transformers.models.janus.modeling_janus import JanusVQVAE

    config = JanusVQVAEConfig(
        embed_dim=SIZES["codebook_embed_dim"],
        num_embeddings=SIZES["codebook_size"],
        latent_channels=SIZES["z_channels"],
        base_channels=SIZES["ch"],
        channel_multiplier=list(MULTIPLES),
        num_patches=4,
    )
    model = JanusVQVAE(config).eval()
    state = {name: tensor for name, tensor in vq.state_dict().items() if "codebook_used" not in name}
    model.load_state_dict(tiny.renamed(state, "vqvae of transformers"))
    return model


@torch.no_grad()
def test_latents_are_those_of_transformers_and_tokens_have_the_largest_cosine(vq: VQVAE, reference: Any) -> None:
    pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
    latents = reference.quant_conv(reference.encoder(pixels))
    torch.testing.assert_close(vq.latents(pixels), latents, atol=2e-5, rtol=1e-5)
    cosines = torch.cosine_similarity(latents.flatten(2).mT[:, :, None], vq.quantize.embedding.weight, dim=-1)
    assert torch.equal(vq.encode(pixels), cosines.argmax(-1))


@torch.no_grad()
def test_decoded_bytes_are_those_of_transformers(vq: VQVAE, reference: Any) -> None:
    tokens = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(2))
    expected, decoded = reference.decode(tokens), vq.decode(tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(decoded, expected, atol=2e-5, rtol=1e-5)
    assert (to_uint8(decoded).int() - to_uint8(expected).int()).abs().max() <= 1


def test_bad_grids_and_configs_are_refused(vq: VQVAE) -> None:
    refused(vq.decode, torch.zeros(1, 15, dtype=torch.long), match="got 15 tokens an image, wanted a square grid")
    changed: list[dict[str, Any]] = [{"ch": 20}, {"encoder_ch_mult": (1, 2)}, {"codebook_size": 0}]
    for changes in changed:
        refused(VQConfig, **changes, match="wanted")
