"""The real classes at toy size, with weights that give distributions of high entropy."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, TypeVar

import pytest
import torch
from torch import Tensor, nn

from lantern.core.types import Condition, Prompt
from lantern.drafters.eagle.networks import Eagle, EagleConfig
from lantern.models.llamagen.transformer import CaptionEmbedder, Transformer, TransformerConfig

if TYPE_CHECKING:
    from lantern.training.drafter import Teacher


needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed: extra eval or dev")
Module = TypeVar("Module", bound=nn.Module)


def tiny_config(**changes: object) -> TransformerConfig:
    """A text-conditional transformer of 4x4 tokens out of 24, six caption slots."""
    fields: dict[str, object] = {"dim": 32, "n_layer": 2, "n_head": 2, "multiple_of": 16}
    fields |= {"model_type": "t2i", "caption_dim": 8, "cls_token_num": 6, "vocab_size": 24, "block_size": 16}
    return TransformerConfig(**(fields | changes))  # type: ignore[arg-type]


def tiny_target(seed: int = 0, **changes: object) -> Transformer:
    """A target with random weights, larger than a fresh model's so that tokens depend on each other."""
    target = Transformer(tiny_config(**changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    target.init_weights(generator)
    for parameter in target.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0.0, 0.6 / parameter.shape[1] ** 0.5, generator=generator)
    target.output.weight.data.normal_(0.0, 0.4, generator=generator)
    target.tok_embeddings.weight.data.normal_(0.0, 1.0, generator=generator)
    if isinstance(target.cls_embedding, CaptionEmbedder):
        target.cls_embedding.uncond_embedding.normal_(0.0, 0.3, generator=generator)
    return target


def wide_target(seed: int = 0, **changes: object) -> Transformer:
    """A target of sizes that the engine `cpu` takes."""
    return tiny_target(seed, **({"dim": 64, "vocab_size": 32} | changes))


def loose_target() -> Transformer:
    """A target whose tokens are almost independent, so that the next pass nearly always repeats a window."""
    target = tiny_target()
    weight = target.tok_embeddings.weight.data
    weight.copy_(weight[:1] + 0.05 * (weight - weight[:1]))
    return target


def tiny_condition(lengths: tuple[int, ...] = (4,), slots: int = 6, seed: int = 0) -> Condition:
    """Left-padded captions with these numbers of words; caption i is the same in every batch."""
    rows = []
    for i in range(len(lengths)):
        generator = torch.Generator().manual_seed(seed * 1000 + i)
        rows.append(torch.randn(slots, 8, generator=generator) * 3)
    mask = torch.arange(slots) >= slots - torch.tensor(lengths)[:, None]
    return Condition(embeddings=torch.stack(rows) * mask[..., None], mask=mask)


def tiny_prompt(features: torch.Tensor, condition: Condition) -> Prompt:
    """What drafters read of a prompt with these features (b r t c)."""
    images, rows, slots, _ = features.shape
    none, first = torch.zeros(images, rows, 0), torch.zeros(images, rows, dtype=torch.long)
    is_used = torch.ones(images, slots, dtype=torch.bool)
    return Prompt(none, none, first, none, features, is_used, condition=condition)


def tiny_eagle(target: Transformer, seed: int = 1, **changes: object) -> Eagle:
    module = Eagle(EagleConfig.for_target(target.config, **changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0.0, 0.7 / parameter.shape[1] ** 0.5, generator=generator)
    module.fc.bias.data.zero_()
    return module


def initialised(module: Module) -> Module:
    """Give layers of a tokenizer random weights of the size of trained ones, offsets and factors included."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            scale = 1.0 if "embedding" in name else 1.5 / parameter[0].numel() ** 0.5
            nn.init.normal_(parameter, 0, scale, generator=generator)
        else:
            nn.init.normal_(parameter, float("norm" in name and "weight" in name), 0.1, generator=generator)
    return module.eval()


def tiny_teacher(target: Transformer, reads: Collection[str] = ()) -> "Teacher":
    """A teacher with five captions of one to four words, at guidance 3."""
    from lantern.core.sampling import Sampling
    from lantern.training.drafter import Teacher
    from lantern.training.features import Conditions

    condition = tiny_condition((4, 2, 3, 1, 4))
    texts = ["a", "b", "c", "d", "e"]
    index = {text: i for i, text in enumerate(texts)}
    captions = Conditions(index, condition.embeddings[:, 2:].bfloat16(), condition.mask[:, 2:])
    return Teacher(target, captions.of, texts, sampling=Sampling(guidance=3.0), seed=0, reads=reads)


@torch.no_grad()
def uncached(
    target: Transformer,
    condition: Condition,
    tokens: Tensor,
    of: Literal["logits", "features", "tapped"] = "logits",
    *,
    rows: int = 2,
    seen: Tensor | None = None,
    taps: tuple[int, ...] = (),
) -> Tensor:
    """Return logits, features or inputs of layers at the slots of the prompt and at each token, `(b rows slots+n c)`.

    The passes have no cache, no tree and no collapsed prompt. `seen (n n)` tells which tokens each token sees, by
    default itself and those before it. Padding sees padding.
    """
    words, mask = condition.embeddings, condition.mask
    assert words is not None and mask is not None
    slots = words.shape[1]
    valid = torch.cat([mask, torch.ones_like(tokens, dtype=torch.bool)], 1)
    sees = torch.tril(valid[:, None] | ~valid[:, :, None])
    if seen is not None:
        sees[:, slots:, slots:] = seen
    positions = torch.arange(valid.shape[1]).expand(len(tokens), -1)
    prompts = (target.cls_embedding(words), target.cls_embedding.unconditional(words))[:rows]
    inputs = (torch.cat([prompt, target.tok_embeddings(tokens)], 1) for prompt in prompts)
    return torch.stack([getattr(target(x, positions, sees, taps=taps), of) for x in inputs], 1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Set the number of threads to one: sums of torch's products may depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
