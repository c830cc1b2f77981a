"""The tokenizer: agreement with numbers of the reference implementation, shapes and refusals."""

import json
from pathlib import Path

import pytest
import torch

from lantern.models.llamagen.vqvae import VQVAE, VQConfig, to_uint8

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="module")
def vectors() -> dict:
    return torch.load(DATA / "vq_tiny_io.pt", weights_only=True)


@pytest.fixture(scope="module")
def vq(vectors: dict) -> VQVAE:
    given = vectors["config"]
    mult = tuple(given["ch_mult"])
    config = VQConfig(
        ch=given["ch"],
        encoder_ch_mult=mult,
        decoder_ch_mult=mult,
        z_channels=given["z_channels"],
        codebook_size=given["codebook_size"],
        codebook_embed_dim=given["codebook_embed_dim"],
    )
    model = VQVAE(config).eval()
    model.load_state_dict(torch.load(DATA / "vq_tiny_state.pt", weights_only=True), strict=True)
    return model


@torch.no_grad()
def test_encoder_agrees_with_the_reference(vq: VQVAE, vectors: dict) -> None:
    torch.testing.assert_close(vq.encoder(vectors["x"]), vectors["encoder_out"], atol=2e-5, rtol=0)
    torch.testing.assert_close(vq.latents(vectors["x"]), vectors["pre_quant"], atol=2e-5, rtol=0)


@torch.no_grad()
def test_codes_equal_the_reference(vq: VQVAE, vectors: dict) -> None:
    assert torch.equal(vq.encode(vectors["x"]), vectors["indices"])


@torch.no_grad()
def test_decoded_bytes_are_within_one_of_the_reference(vq: VQVAE, vectors: dict) -> None:
    decoded = vq.decode(vectors["codes"])
    torch.testing.assert_close(decoded, vectors["decoded"], atol=2e-4, rtol=0)
    assert (to_uint8(decoded).int() - vectors["decoded_uint8"].int()).abs().max() <= 1
    torch.testing.assert_close(vq.decode(vectors["indices"]), vectors["recon_from_indices"], atol=2e-4, rtol=0)


def test_codebook_is_normalised_when_used_and_not_when_stored(vq: VQVAE) -> None:
    stored = vq.quantize.embedding.weight.norm(dim=1)
    assert (stored - 1).abs().max() > 0.1
    torch.testing.assert_close(vq.quantize.codes().norm(dim=1), torch.ones_like(stored))


@pytest.mark.parametrize(("name", "count"), [("VQ-16", 71_883_403), ("VQ-8", 70_109_835)])
def test_released_sizes_have_the_released_shapes(name: str, count: int) -> None:
    with torch.device("meta"):
        model = VQVAE(VQConfig.named(name))
    assert sum(p.numel() for p in model.parameters()) == count
    table = DATA / "checkpoint_tables.json"
    expected = {k: shape for k, (shape, _) in json.loads(table.read_text())["tables"][f"{name}_full"].items()}
    assert {k: list(t.shape) for k, t in model.state_dict().items()} == expected


def test_number_of_codes_that_is_no_square_is_refused(vq: VQVAE) -> None:
    with pytest.raises(ValueError, match="got 15 codes a picture, wanted a square grid"):
        vq.decode(torch.zeros(1, 15, dtype=torch.long))


@pytest.mark.parametrize("changes", [{"ch": 20}, {"encoder_ch_mult": (1, 2)}, {"codebook_size": 0}])
def test_bad_configs_are_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match="wanted"):
        VQConfig(**changes)
