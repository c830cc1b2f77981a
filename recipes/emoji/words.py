"""New whole words for a trained text encoder: only their rows of the embedding table are learned.

The embedding of every caption without such a word is unchanged bit for bit, so a picture model trained on the encoder
needs no further training. The size of the tokenizer is unchanged: a new word replaces one that captions need least.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.models.llamagen.text import TextEncoder
from lantern.training.loop import LoopConfig, Task
from lantern.training.loop import train as run_loop
from lantern.training.stages import read_config
from recipes.emoji.captions import plural
from recipes.emoji.meaning import mean_over
from recipes.emoji.phrases import Composer
from recipes.emoji.text_encoder import TextConfig, TextTask, distances, prepare, tokens_of, whole_words


@dataclass(frozen=True)
class WordsConfig:
    """Settings for new words.

    encoder: the encoder's config. count: words to exchange at most. required: number of the
    most important words that the vocabulary must hold.
    """

    loop: LoopConfig
    encoder: Path = Path("text-emoji.json")
    count: int = 2000
    required: int = 10000
    batch: int = 192
    learning_rate: float = 0.02
    temperature: float = 0.07


def exchange(vocab: dict[str, int], needed: list[str], *, required: int, count: int, keep: set[str]) -> dict[str, str]:
    """Return the token that each new word replaces: the most needed missing words replace the least needed whole words.

    needed: words, most needed first; the first `required` shall be in the vocabulary. keep: words whose tokens are
    unchanged. Short words are kept too, since other words consist of them, and no new word is a prefix of
    one of `keep`.
    """
    begun = {word[:n] for word in keep for n in range(1, len(word) + 1)}
    inside = set(needed[:required])
    missing = [w for w in needed[:required] if w not in vocab and w not in begun]
    rank = {w: i for i, w in enumerate(needed)}
    spare = [w for w in vocab if len(w) >= 5 and w in rank and w not in inside | keep]
    spare.sort(key=lambda w: -rank[w])
    return dict(zip(missing[:count], spare, strict=False))


def caption_tokens(text: TextTask, tokenizer: Any) -> set[str]:
    """Return the words of pictures' names and keywords, singular and plural, and their tokens."""
    names = [text.lexicon.concepts[i] for label, tags in text.lexicon.named for i in (label, *tags)]
    words = {w for name in names for w in f"{name} {plural(name)}".split()}
    return words | {token for word in words for token in tokenizer.tokenize(word)}


def renamed(tokenizer: Any, places: dict[str, str]) -> Any:
    """Return the tokenizer with new words under the ids of those they replace."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    names = {old: new for new, old in places.items()}
    backend["model"]["vocab"] = {names.get(word, word): row for word, row in backend["model"]["vocab"].items()}
    backend["truncation"] = backend["padding"] = None
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)),
        padding_side="right",
        model_max_length=tokenizer.model_max_length,
        **{name: getattr(tokenizer, name) for name in ("pad_token", "eos_token", "unk_token")},
    )


class WordsTask(Task):
    """The embedding rows of the new words, trained on captions that contain them; the rest is frozen."""

    def __init__(self, config: WordsConfig, encoder: TextEncoder, text: TextTask, places: dict[str, str]) -> None:
        super().__init__()
        self.config, self.text, self.encoder = config, text, encoder
        self.places = places
        vocab, index = encoder.tokenizer.get_vocab(), {c: i for i, c in enumerate(text.lexicon.concepts)}
        self.tokenizer = renamed(encoder.tokenizer, places)
        self.concepts = [index[word] for word in places]
        self.rows = torch.tensor([vocab[old] for old in places.values()])
        meanings = text.meanings.concepts
        self.words = nn.Parameter(meanings[self.concepts] * meanings.shape[1] ** 0.5)
        self.composer = Composer(text.lexicon, seed=config.loop.seed)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return Adam on the rows."""
        return [torch.optim.Adam([self.words], self.config.learning_rate)]

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return tokens, mask and meanings of captions of new words."""
        captions = self.composer.about(self.concepts, step * 4096 + rank, self.config.batch)
        tokens = tokens_of(self.tokenizer, [c.text for c in captions], self.text.config.max_tokens)
        return tuple(part.to(device) for part in (*tokens, self.text.meanings.of(captions)))

    def table(self) -> Float[Tensor, "v c"]:
        """Return the embedding table with the new words' rows."""
        table = self.encoder.model.get_input_embeddings().weight
        return table.index_copy(0, self.rows.to(table.device), self.words.to(table.dtype))

    def forward(
        self, ids: Int[Tensor, "b t"], mask: Bool[Tensor, "b t"], meaning: Float[Tensor, "b c"]
    ) -> dict[str, Tensor]:
        """Return the cosine loss to the meaning and the loss of similarities within the batch."""
        embedded = F.embedding(ids, self.table())
        hidden = self.encoder.model(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
        unit = F.normalize(mean_over(hidden, mask).float(), dim=-1)
        found = distances(unit, meaning, self.config.temperature)
        return {"loss": 3 * found["cosine"] + found["relation"], **found}

    def export(self, folder: Path) -> None:
        """Write encoder/ (bf16) and tokenizer/."""
        with torch.no_grad():
            self.encoder.model.get_input_embeddings().weight.copy_(self.table())
        TextEncoder(self.encoder.model.to(torch.bfloat16), self.tokenizer).save_pretrained(
            folder / "encoder", folder / "tokenizer"
        )


def train(
    config: WordsConfig, *, out: Path, text_encoder: Path, packages: Path, teacher: Path, tokenizer: Path | None = None
) -> None:
    """Train new words of the encoder in `text_encoder`; `out` then holds the new encoder/ and tokenizer/."""
    text = prepare(read_config(TextConfig, config.encoder), out, packages, teacher)
    encoder = TextEncoder.from_pretrained(text_encoder, tokenizer)
    known = set(text.lexicon.concepts)
    needed = [w for w in dict.fromkeys(whole_words(text.lexicon)) if w in known]
    vocab = encoder.tokenizer.get_vocab()
    keep = caption_tokens(text, encoder.tokenizer)
    places = exchange(vocab, needed, required=config.required, count=config.count, keep=keep)
    run_loop(WordsTask(config, encoder, text, places), config.loop, out=out)
