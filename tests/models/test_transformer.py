"""The transformer and plain decoding against numbers of the reference implementation."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Generation, Step
from lantern.decoding import plain
from lantern.models.llamagen.transformer import Transformer, TransformerConfig

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


def decode(target: Transformer, vectors: dict, sampling: Sampling) -> tuple[Generation, Tensor]:
    seen: list[Tensor] = []

    def remember(step: Step) -> None:
        seen.append(sampling.guide(step.scores.logits, step.start[:, None]))

    condition = Condition(embeddings=vectors["caption"], mask=vectors["emb_masks"].bool())
    keys = [(0, 0), (0, 1)]
    return plain.generate(target, condition, sampling=sampling, keys=keys, callback=remember), torch.cat(seen, 1)


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
    made, logits = decode(target, vectors, Sampling(guidance=guidance, temperature=0))
    assert torch.equal(made.tokens, vectors[f"{name}_tokens"].long())
    assert (logits - vectors[f"{name}_logits"]).abs().max() <= TOLERANCE * max(guidance, 1.0)
