"""LlamaGen: the transformer against numbers of the reference implementation, the tokenizer against transformers."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Step
from lantern.decoding import plain
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.models.llamagen.vqvae import VQVAE, VQConfig, to_uint8
from tests import tiny_transformers as tiny
from tests.refusals import refused
from tests.tiny import initialised, tiny_condition, tiny_config, tiny_target

DATA = Path(__file__).parents[1] / "data"
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def vectors() -> dict:
    return torch.load(DATA / "gpt_t2i_io.pt", weights_only=True)


@pytest.fixture(scope="module")
def target(vectors: dict) -> Transformer:
    model = Transformer(TransformerConfig(**vectors["config"])).eval()
    model.load_state_dict(torch.load(DATA / "gpt_t2i_state.pt", weights_only=True))
    return model


def teacher_forced(target: Transformer, vectors: dict, captions: Tensor, mask: Tensor | None) -> Tensor:
    tokens = target.tok_embeddings(vectors["idx"][:, :-1])
    inputs = torch.cat([captions, tokens], 1)
    positions = torch.arange(inputs.shape[1]).expand(2, -1)
    seen = None if mask is None else mask[:, 0, : inputs.shape[1], : inputs.shape[1]]
    return target(inputs, positions, seen).logits[:, captions.shape[1] - 1 :]


@torch.no_grad()
def test_teacher_forced_logits_equal_the_reference(target: Transformer, vectors: dict) -> None:
    captions = target.cls_embedding(vectors["caption"])
    unconditional = target.cls_embedding.unconditional(vectors["caption"])
    with_mask = teacher_forced(target, vectors, captions, vectors["attn_mask"])
    without = teacher_forced(target, vectors, captions, None)
    guidance_row = teacher_forced(target, vectors, unconditional, vectors["attn_mask"])
    assert (with_mask - vectors["tf_logits"]).abs().max() <= TOLERANCE
    assert (without - vectors["tf_logits_nomask"]).abs().max() <= TOLERANCE
    assert (guidance_row - vectors["tf_logits_uncond"]).abs().max() <= TOLERANCE


@pytest.mark.parametrize(("name", "guidance"), [("greedy_cfg1", 1.0), ("greedy_cfg75", 7.5)])
def test_greedy_tokens_equal_the_reference(target: Transformer, vectors: dict, name: str, guidance: float) -> None:
    sampling, seen = Sampling(guidance=guidance, temperature=0), list[Tensor]()

    def remember(step: Step) -> None:
        seen.append(sampling.guide(step.scores.logits, step.start[:, None]))

    condition = Condition(embeddings=vectors["caption"], mask=vectors["emb_masks"].bool())
    made = plain.generate(target, condition, sampling=sampling, keys=[(0, 0), (0, 1)], callback=remember)
    assert torch.equal(made.tokens, vectors[f"{name}_tokens"].long())
    assert (torch.cat(seen, 1) - vectors[f"{name}_logits"]).abs().max() <= TOLERANCE * max(guidance, 1.0)


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
    for count in (15, 0):
        message = f"got {count} tokens an image, wanted a square grid"
        refused(vq.decode, torch.zeros(1, count, dtype=torch.long), match=message)
    changed: list[dict[str, Any]] = [{"ch": 20}, {"encoder_ch_mult": (1, 2)}, {"codebook_size": 0}, {"dropout_p": 2.0}]
    for name, multiple in product(("encoder_ch_mult", "decoder_ch_mult"), (0, -1, 999)):
        changed.append({name: (1, 1, 2, 2, multiple)})
    for changes in changed:
        refused(VQConfig, **changes, match="wanted")
    for name in ("token_dropout_p", "attn_dropout_p", "class_dropout_prob"):
        refused(lambda name=name: tiny_config(**{name: 1.5}), match=f"{name} is 1.5, wanted a number from 0 to 1")


def test_a_condition_of_another_kind_and_guidance_without_an_unconditional_class_are_refused() -> None:
    captions, labels = tiny_condition(), Condition(labels=torch.tensor([1]))
    tokens = Condition(tokens=torch.zeros(1, 2, 3, dtype=torch.long), mask=torch.ones(1, 2, 3, dtype=torch.bool))
    classes = Transformer(tiny_config(model_type="c2i", cls_token_num=1, class_dropout_prob=0.0)).eval()
    for target, takes, others in ((tiny_target(), "captions", labels), (classes, "class labels", captions)):
        for other in (others, tokens):
            refused(target.read, other, 1, match=f"takes {takes}, got another condition")
    assert len(classes.read(labels, 1).logits) == 1
    refused(classes.read, labels, 2, match="no unconditional class, which guidance needs: give guidance 1")
