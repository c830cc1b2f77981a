"""New whole words for a trained text encoder: only their rows of the embedding table are learned.

Every caption without such a word keeps its embedding bit for bit, so a picture model that was trained on the encoder
needs no further training. The tokenizer's size stays: a word takes the place of one that captions need least.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.config import build_config, read_json_object
from lantern.models.llamagen.text import TextEncoder
from lantern.training.captions import plural
from lantern.training.loop import LoopConfig, Task, with_overrides
from lantern.training.loop import train as run_loop
from lantern.training.meaning import mean_over, pad
from lantern.training.phrases import Composer
from lantern.training.text import TextConfig, TextTask, cut_tokens, prepare, whole_words


@dataclass(frozen=True)
class WordsConfig:
    """How many words to exchange at most, how to learn them, and the config (beside this one) of the encoder."""

    loop: LoopConfig
    encoder: str = "text-emoji.json"
    count: int = 2000
    wanted: int = 10000
    batch: int = 192
    learning_rate: float = 0.02
    temperature: float = 0.07
    text: TextConfig | None = None

    @classmethod
    def load(cls, path: Path) -> "WordsConfig":
        """Read a JSON config; an unknown or misfit field is a ValueError."""
        raw = read_json_object(path)
        raw["loop"] = build_config(LoopConfig, raw.get("loop", {}), source=path)
        config = build_config(cls, raw, source=path)
        return with_overrides(config, text=TextConfig.load(path.parent / config.encoder))


def exchange(vocab: dict[str, int], needed: list[str], *, wanted: int, count: int, keep: set[str]) -> dict[str, str]:
    """Which token each new word replaces: the most needed words that are missing, for the whole words least needed.

    needed: words, most needed first; the first `wanted` shall be in. keep: words whose tokens stay as they are.
    Short words stay too, since other words are pieced together from them, and no new word begins one of `keep`.
    """
    begun = {word[:n] for word in keep for n in range(1, len(word) + 1)}
    inside = set(needed[:wanted])
    missing = [w for w in needed[:wanted] if w not in vocab and w not in begun]
    rank = {w: i for i, w in enumerate(needed)}
    spare = [w for w in vocab if len(w) >= 5 and w in rank and w not in inside | keep]
    spare.sort(key=lambda w: -rank[w])
    return dict(zip(missing[:count], spare, strict=False))


def caption_tokens(text: TextTask, tokenizer: Any) -> set[str]:
    """Words of pictures' names and keywords, singular and plural, and the tokens that they fall into."""
    names = [text.lexicon.concepts[i] for label, tags in text.lexicon.named for i in (label, *tags)]
    words = {w for name in names for w in f"{name} {plural(name)}".split()}
    return words | {token for word in words for token in tokenizer.tokenize(word)}


def renamed(tokenizer: Any, places: dict[str, str]) -> Any:
    """The tokenizer with new words under the ids of those they replace."""
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
    """The rows of the new words, trained until captions with them mean what they should; the rest is frozen."""

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
        """Adam on the rows."""
        return [torch.optim.Adam([self.words], self.config.learning_rate)]

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        """Tokens, mask and meanings of captions of new words."""
        captions = self.composer.about(self.concepts, step * 4096 + rank, self.config.batch)
        tokens = cut_tokens(self.tokenizer, [c.text for c in captions], self.text.config.max_tokens)
        return tuple(part.to(device) for part in (*pad(tokens), self.text.meanings.of(captions)))

    def table(self) -> Float[Tensor, "v c"]:
        """The embedding table with the new words' rows."""
        table = self.encoder.model.get_input_embeddings().weight
        return table.index_copy(0, self.rows.to(table.device), self.words.to(table.dtype))

    def forward(
        self, ids: Int[Tensor, "b t"], mask: Bool[Tensor, "b t"], want: Float[Tensor, "b c"]
    ) -> dict[str, Tensor]:
        """Cosine to the meaning, and likeness to the meanings of the batch."""
        embedded = F.embedding(ids, self.table())
        hidden = self.encoder.model(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
        unit = F.normalize(mean_over(hidden, mask).float(), dim=-1)
        likeness = F.log_softmax(want @ want.T / self.config.temperature, dim=-1)
        found = F.log_softmax(unit @ want.T / self.config.temperature, dim=-1)
        cosine = 1 - (unit * want).sum(-1).mean()
        relation = F.kl_div(found, likeness, log_target=True, reduction="batchmean")
        return {"loss": 3 * cosine + relation, "cosine": cosine, "relation": relation}

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
    """Teach new words to the encoder in `text_encoder`; `out` then holds encoder/ and tokenizer/ in its place."""
    assert config.text is not None
    text = prepare(config.text, out, packages, teacher)
    encoder = TextEncoder.from_pretrained(text_encoder, tokenizer)
    known = set(text.lexicon.concepts)
    needed = [w for w in dict.fromkeys(whole_words(text.lexicon)) if w in known]
    vocab = encoder.tokenizer.get_vocab()
    keep = caption_tokens(text, encoder.tokenizer)
    places = exchange(vocab, needed, wanted=config.wanted, count=config.count, keep=keep)
    run_loop(WordsTask(config, encoder, text, places), config.loop, out=out)
