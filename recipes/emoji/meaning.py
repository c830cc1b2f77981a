"""Target embeddings of captions: a teacher's embeddings with synonyms moved together and attributes as directions.

The meaning of a caption is the sum of its things and of the directions of their colours, counts and styles, so that
words which a sentence encoder nearly ignores have weight. A direction is the mean change of the teacher's embedding of
an object when the word is added.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from recipes.emoji.captions import plural
from recipes.emoji.lexicon import Lexicon
from recipes.emoji.phrases import Caption, attributes


@dataclass(frozen=True)
class MeaningConfig:
    """How targets are made. whitening: 0 keeps the teacher's spectrum, 1 makes it flat.

    synonym_pull: how far synonyms move together. attribute_norm: length of a direction, where that of a concept is 1.
    """

    width: int = 256
    whitening: float = 0.25
    synonym_pull: float = 1.2
    attribute_norm: float = 0.45


@dataclass(frozen=True)
class Meanings:
    """concepts: a unit vector each. values: (attribute, value) -> direction."""

    concepts: Float[Tensor, "n c"]
    values: dict[tuple[str, str], Float[Tensor, " c"]]

    def of(self, captions: list[Caption]) -> Float[Tensor, "b c"]:
        """Return the unit vector of each caption, the normalised sum of its parts."""
        rows = torch.zeros(len(captions), self.concepts.shape[1])
        for row, caption in zip(rows, captions, strict=True):
            for part in caption.parts:
                row += self.concepts[part.concept]
                for value in part.values:
                    row += self.values[value]
        return F.normalize(rows, dim=-1)


def mean_over(hidden: Float[Tensor, "b t c"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, "b c"]:
    """Return the mean over valid tokens."""
    weight = mask[..., None].to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1)


def teacher_embeddings(folder: Path, phrases: list[str], *, batch: int = 256) -> Float[Tensor, "n c"]:
    """Return unit mean-pooled embeddings of a BERT sentence encoder (arXiv:1908.10084); phrases run sorted by length.

    Raises ValueError naming the missing file.
    """
    from tokenizers import Tokenizer
    from tqdm import tqdm
    from transformers import BertModel

    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing; give the folder of a BERT sentence encoder")
    model = BertModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(64)
    tokenizer.no_padding()
    lengths = [len(one.ids) for one in tokenizer.encode_batch(phrases)]
    order = sorted(range(len(phrases)), key=lengths.__getitem__)
    tokenizer.enable_padding()
    out = torch.empty(len(phrases), model.config.hidden_size)
    for at in tqdm(range(0, len(order), batch), desc="teacher", unit="batch", disable=None):
        rows = order[at : at + batch]
        some = tokenizer.encode_batch([phrases[i] for i in rows])
        tokens, mask = torch.tensor([one.ids for one in some]), torch.tensor([one.attention_mask for one in some])
        with torch.no_grad():
            hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        out[rows] = F.normalize(mean_over(hidden, mask), dim=-1)
    return out


def retrofit(
    vectors: Float[Tensor, "n c"], pulls: tuple[tuple[int, int, float], ...], strength: float, *, rounds: int = 3
) -> Float[Tensor, "n c"]:
    """Move each concept towards its synonyms (Faruqui et al. 2015, https://aclanthology.org/N15-1184).

    Synonyms of a dictionary (weight 1) count in full; other relations are weighed by the similarity of the vectors.
    """
    unit = F.normalize(vectors, dim=-1)
    child, parent = torch.tensor([p[:2] for p in pulls]).T
    weight = torch.tensor([p[2] for p in pulls])
    agree = (((unit[child] * unit[parent]).sum(-1) - 0.1) / 0.3).clamp(0.3, 1)
    weight = torch.where(weight < 1, weight * agree, weight)
    total = torch.zeros(len(unit)).index_add_(0, child, weight)
    now = unit
    for _ in range(rounds):
        sums = torch.zeros_like(unit).index_add_(0, child, weight[:, None] * now[parent])
        # The pull is at most `strength` for any number of synonyms.
        now = F.normalize(unit + strength * sums / total.clamp_min(1)[:, None], dim=-1)
    return now


def build_meanings(config: MeaningConfig, lexicon: Lexicon, teacher: Path) -> Meanings:
    """Return meanings of all concepts and attribute values from the teacher's embeddings."""
    plain = [lexicon.concepts[i] for i in lexicon.objects[:1000:20]]
    changed = {}  # the objects described with the first phrase of each value
    for kind, values in attributes().items():
        named = [plural(name) if kind == "count" else name for name in plain]
        for value, (way, *_) in values.items():
            changed[kind, value] = [way.format(name) if "{}" in way else f"{way} {name}" for name in named]
    every = teacher_embeddings(teacher, [*lexicon.concepts, *plain, *(p for group in changed.values() for p in group)])
    # 1) A basis in which the objects' variance is nearly the same in every direction.
    seen = every[list(lexicon.objects)]
    centre = seen.mean(0)
    variance, axes = torch.linalg.eigh((seen - centre).T @ (seen - centre) / len(seen))
    scale = variance[-config.width :].clamp_min(1e-6) ** (-config.whitening / 2)
    projected = (every - centre) @ (axes[:, -config.width :] * scale)
    vectors, rest = projected[: len(lexicon.concepts)], F.normalize(projected[len(lexicon.concepts) :], dim=-1)
    # 2) A value's direction; the difference from the attribute's mean direction counts fourfold.
    before, after = rest[: len(plain)].mean(0), rest[len(plain) :].view(len(changed), len(plain), -1).mean(1)
    shift = dict(zip(changed, after - before, strict=True))
    directions = {}
    for kind in attributes():
        mean = torch.stack([v for key, v in shift.items() if key[0] == kind]).mean(0)
        for key in (key for key in shift if key[0] == kind):
            directions[key] = config.attribute_norm * F.normalize(0.5 * mean + 2 * (shift[key] - mean), dim=0)
    # 3) Synonyms move together.
    return Meanings(retrofit(vectors, lexicon.pulls, config.synonym_pull), directions)
