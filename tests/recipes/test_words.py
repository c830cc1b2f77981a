"""Facts about teaching new words to a trained text encoder."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lantern.models.llamagen.text import TextEncoder
from lantern.training.loop import LoopConfig
from lantern.training.loop import train as run_loop
from lantern.training.stages import read_config
from recipes.emoji.lexicon import Lexicon, Named, Nouns, build_lexicon
from recipes.emoji.meaning import MeaningConfig, Meanings
from recipes.emoji.phrases import ATTRIBUTES
from recipes.emoji.text_encoder import TextConfig, TextTask, WordsConfig, WordsTask, exchange, renamed, train_tokenizer


@pytest.fixture
def text() -> TextTask:
    """An untrained encoder whose tokenizer has the verb `refuse` but not the thing `hamster`."""
    config = TextConfig(
        LoopConfig(steps=1, precision="fp32"), MeaningConfig(width=16), vocabulary=400, layers=1, heads=2, hidden=16
    )
    named = [Named("cat", ("kitty",), 3), Named("dog", ("puppy",), 3)]
    words = [*(f"word{c}" for c in "abc"), "refuse"]
    lexicon = build_lexicon(named, Nouns({}, {}, {}, frozenset()), words)
    tokenizer = train_tokenizer(lexicon, 400)
    grown = build_lexicon(named, Nouns({}, {}, {}, frozenset()), [*words, "hamster"])
    return TextTask(config, grown, tokenizer, random_meanings(grown))


def random_meanings(lexicon: Lexicon) -> Meanings:
    torch.manual_seed(0)
    values = {(kind, v): 0.3 * torch.randn(16) / 4 for kind, options in ATTRIBUTES.items() for v in options}
    return Meanings(F.normalize(torch.randn(len(lexicon.concepts), 16), dim=-1), values)


def likeness(encoder: TextEncoder, caption: str, want: Float[Tensor, " c"]) -> float:
    embeddings, mask = encoder.encode([caption], slots=8)
    mean = embeddings.sum(1) / mask.sum()
    return float(F.cosine_similarity(mean[0], want, dim=0))


def test_most_needed_missing_words_replace_the_least_needed_ones() -> None:
    vocab = {w: i for i, w in enumerate(["</s>", "##s", "horse", "ox", "edict", "treaty", "kept_word"])}
    needed = ["horse", "zebra", "yak", "ox", "edict", "treaty", "kept_word"]
    assert exchange(vocab, needed, required=3, count=9, keep={"kept_word"}) == {"zebra": "treaty", "yak": "edict"}
    assert exchange(vocab, needed, required=3, count=1, keep=set()) == {"zebra": "kept_word"}


def test_kept_words_are_not_added() -> None:
    assert exchange({"treaty": 0}, ["zebra", "yak", "treaty"], required=2, count=9, keep={"zebra"}) == {"yak": "treaty"}


def test_renamed_tokenizer_gives_the_old_id_to_the_new_word(text: TextTask) -> None:
    tokenizer = renamed(text.tokenizer, {"hamster": "refuse"})
    row = text.tokenizer.get_vocab()["refuse"]
    assert tokenizer("hamster")["input_ids"] == [row, 1]
    assert tokenizer("two cats")["input_ids"] == text.tokenizer("two cats")["input_ids"]
    assert len(tokenizer) == len(text.tokenizer)


def test_new_word_gets_its_meaning_and_other_captions_are_unchanged(text: TextTask, tmp_path: Path) -> None:
    loop = LoopConfig(steps=60, warmup=1, precision="fp32", evaluate_every=1000)
    encoder = TextEncoder(text.encoder.to(torch.bfloat16).float(), text.tokenizer)
    before = encoder.encode(["two red cats", "kitty"], slots=8)
    want = text.meanings.concepts[text.lexicon.concepts.index("hamster")]
    before_training = likeness(encoder, "hamster", want)
    config = WordsConfig(loop, batch=8, learning_rate=0.1)
    run_loop(WordsTask(config, encoder, text, {"hamster": "refuse"}), loop, out=tmp_path)
    trained = TextEncoder.from_pretrained(tmp_path / "encoder", tmp_path / "tokenizer")
    after = trained.encode(["two red cats", "kitty"], slots=8)
    assert torch.equal(before[0], after[0])
    assert likeness(trained, "hamster", want) > max(0.5, before_training + 0.2)


def test_config_of_the_embedded_model_loads() -> None:
    path = Path(__file__).parents[2] / "recipes" / "emoji" / "configs" / "words-emoji.json"
    config = read_config(WordsConfig, path)
    assert read_config(TextConfig, config.encoder).meaning.width == 256
