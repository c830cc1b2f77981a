"""The target as a teacher: images by plain decoding, with the features of the target along them."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.decoding.plain import generate
from lantern.decoding.prompt import read_codes, start
from lantern.drafters.examples import fused_layers
from lantern.models.llamagen.transformer import Transformer
from lantern.models.transformers.components import Prompts
from lantern.models.transformers.target import TransformersTarget
from lantern.training.features import Captions
from lantern.training.loop import step_seed

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Source(Protocol):
    """A source of images by number; image i is the same from every source of one teacher."""

    def read(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return codes, rows and other fields of `Examples` of these images."""
        ...


@torch.no_grad()
def read_pictures(
    target: Transformer,
    words: Float[Tensor, "m t e"],
    mask: Bool[Tensor, "m t"],
    codes: Int[Tensor, "m n"],
    *,
    reads: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return the features that predict each code, conditional and unconditional: `rows`, and the extras in `reads`.

    Padding attends to padding alone, as in the prefill of decoding.
    """
    slots, layers = words.shape[1], fused_layers(target.config.n_layer)
    valid = torch.nn.functional.pad(mask, (0, codes.shape[1] - 1), value=True)
    seen = torch.tril(valid[:, None] | ~valid[:, :, None])
    first = target.config.cls_token_num - slots
    positions = torch.arange(first, first + valid.shape[1], device=codes.device)[None]
    parts: dict[str, list[Tensor]] = {"rows": [], "prompt": [], "layers": []}
    for embed in (target.cls_embedding, target.cls_embedding.unconditional):
        inputs = torch.cat([embed(words), target.tok_embeddings(codes[:, :-1])], dim=1)
        entered = dict.fromkeys(layers, inputs)
        out = target.features(inputs, positions, seen, entered=entered)
        parts["rows"].append(out[:, slots - 1 :])
        parts["prompt"].append(out[:, : slots - 1])
        parts["layers"].append(torch.stack([entered[layer][:, slots - 1 :] for layer in layers], dim=1))
    return {name: torch.stack(rows, dim=1) for name, rows in parts.items() if name == "rows" or name in reads}


class TokenTeacher:
    """A target of transformers as a teacher: images by number, as `Teacher` makes them.

    ValueError for `sampling` without guidance, and for extras other than `layers`: rows of guidance have prompts of
    their own, which are not given slot by slot.
    """

    slots = 0

    def __init__(
        self,
        target: TransformersTarget,
        prompts: Prompts,
        texts: Sequence[str],
        *,
        sampling: Sampling,
        seed: int,
        reads: Collection[str] = (),
    ) -> None:
        if sampling.rows != 2:
            raise ValueError(f"guidance is {sampling.guidance}, wanted above 1: the drafter reads both guidance rows")
        if others := sorted(set(reads) - {"layers"}):
            raise ValueError(f"the drafter reads {others[0]}, which targets of transformers do not give: train another")
        self.target, self.prompts, self.texts = target, prompts, list(texts)
        self.sampling, self.seed, self.reads = sampling, seed, frozenset(reads)
        self._layers = fused_layers(target.config.n_layer) if self.reads else ()

    def read(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Generate these images on the target's device."""
        texts = [self.texts[step_seed(self.seed, number, 0) % len(self.texts)] for number in numbers]
        keys = [(self.seed, number) for number in numbers]
        condition = self.prompts.condition(texts)
        codes = generate(self.target, condition, sampling=self.sampling, keys=keys).codes
        how: dict[str, Any] = {"sampling": self.sampling, "keys": keys, "stage": 0, "taps": self._layers}
        begun = start(self.target, condition.to(codes.device), **how)
        read = read_codes(self.target, begun.cache, begun.prefix, codes[:, :-1], taps=self._layers)
        found = {"codes": codes.int(), "rows": torch.cat([begun.features[:, :, -1:], read.features], 2).bfloat16()}
        if read.fused is not None and begun.fused is not None:
            fused = torch.cat([begun.fused[:, :, -1:], read.fused], 2)
            found["layers"] = fused.unflatten(-1, (len(self._layers), -1)).transpose(2, 3).bfloat16()
        return found

    def shapes(self) -> Shapes:
        """Return shape and dtype of one image's tensors."""
        config = self.target.config
        size, half = (config.block_size, config.dim), torch.bfloat16
        layers: Shapes = {"layers": ((2, len(self._layers), *size), half)} if self._layers else {}
        return {"codes": ((config.block_size,), torch.int32), "rows": ((2, *size), half), **layers}


class Teacher:
    """Generates image number i with a caption and noise that depend on the seed and i alone, not on the batch.

    `texts` are the captions to choose from; `reads` names the extra fields that a drafter reads. A drafter that reads
    the prompt gets every slot of it, padding included. Features are in bf16, as in a feature cache.
    """

    def __init__(
        self,
        target: Transformer,
        captions: Captions,
        texts: Sequence[str],
        *,
        sampling: Sampling,
        seed: int,
        reads: Collection[str] = (),
    ) -> None:
        self.target, self.sampling, self.seed, self.reads = target, sampling, seed, frozenset(reads)
        self._captions = captions
        self._rows = torch.tensor([captions.index[text] for text in texts])
        config = target.config
        self.slots = config.cls_token_num if "prompt" in self.reads else captions.features.shape[1]

    def read(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Generate these images on the target's device."""
        chosen = self._rows[[step_seed(self.seed, number, 0) % len(self._rows) for number in numbers]]
        device = self.target.tok_embeddings.weight.device
        missing = self.slots - self._captions.features.shape[1]
        words = torch.nn.functional.pad(self._captions.features[chosen].float(), (0, 0, missing, 0)).to(device)
        mask = torch.nn.functional.pad(self._captions.mask[chosen], (missing, 0)).to(device)
        keys = [(self.seed, number) for number in numbers]
        codes = generate(self.target, Condition(embeddings=words, mask=mask), sampling=self.sampling, keys=keys).codes
        teacher_features = read_pictures(self.target, words, mask, codes, reads=self.reads)
        kept = {name: x.bfloat16() for name, x in {**teacher_features, "words": words}.items()}
        return {"codes": codes.int(), "mask": mask, **kept}

    def shapes(self) -> Shapes:
        """Return shape and dtype of one image's tensors."""
        config, half = self.target.config, torch.bfloat16
        found: Shapes = {
            "codes": ((config.block_size,), torch.int32),
            "mask": ((self.slots,), torch.bool),
            "words": ((self.slots, config.caption_dim), half),
            "rows": ((2, config.block_size, config.dim), half),
        }
        if "prompt" in self.reads:
            found["prompt"] = ((2, self.slots - 1, config.dim), half)
        if "layers" in self.reads:
            found["layers"] = ((2, 3, config.block_size, config.dim), half)
        return found


AnyTeacher = Teacher | TokenTeacher
