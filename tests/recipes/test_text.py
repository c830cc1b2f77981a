"""Training of the text encoder on archives and a teacher of toy size, and new words for a trained one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.decoding.plain import generate
from lantern.models.llamagen.text import TextEncoder
from lantern.training.loop import LoopConfig, run_loop
from recipes.emoji import card, text_encoder
from recipes.emoji.card import copies, logits_of, nats, retrieval
from recipes.emoji.lexicon import Lexicon, Named, Nouns, build_lexicon, everyday_words, read_emojis, read_nouns
from recipes.emoji.meaning import MeaningConfig, Meanings, retrofit
from recipes.emoji.packages import archives
from recipes.emoji.phrases import Caption, Composer, Part, attributes
from recipes.emoji.text_encoder import TextConfig, TextTask, WordsConfig, exchange, prepare, train, train_tokenizer
from tests.refusals import refused
from tests.tiny import tiny_condition, tiny_target
from tests.training.drawings import logged, packed

EMOJIS = [
    {"label": "cat", "emoji": "C", "tags": ["kitty", "pet"], "group": 3, "subgroup": 34},
    {"label": "dog", "emoji": "D", "tags": ["puppy", "pet", "Good Dog"], "group": 3, "subgroup": 34},
    {"label": "woman\u2019s hat", "emoji": "H", "tags": ["clothes"], "group": 7, "subgroup": 65},
    {"label": "flag: Chad", "emoji": "F", "tags": ["td"], "group": 9, "subgroup": 98},
]
# Offset, file of nouns, kind, number of words, words with ids, number of pointers, pointers | gloss
DATA_NOUN = """  1 the licence
00000001 05 n 02 cat 0 true_cat 0 001 @ 00000003 n 0000 | a feline
00000002 05 n 01 tabby 0 001 @ 00000001 n 0000 | a striped cat
00000003 05 n 01 Felidae 0 000 | a family
00000004 14 n 01 crowd 0 000 | not concrete
"""
# Lemma, kind, number of senses, pointers, number of senses, number of annotated senses, offsets
INDEX_NOUN = """  1 the licence
cat n 1 1 @ 1 1 00000001
true_cat n 1 1 @ 1 0 00000001
tabby n 1 1 @ 1 0 00000002
crowd n 1 0 1 0 00000004
"""
NO_NOUNS = Nouns({}, {}, {}, frozenset())
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "##s", "a", "cat", "dog", "red", "kitty", "paris", "hats", "hat"]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Archives of the true names with toy content, and the hashes to match."""
    nouns = dict.fromkeys(("index.verb", "index.adj", "index.adv"), "")
    nouns |= {"data.noun": DATA_NOUN, "index.noun": INDEX_NOUN}
    files: dict[str, Any] = {"labels": {"en/data.json": json.dumps(EMOJIS)}}
    files["keywords"] = {"dist/emoji-en-US.json": '{"C": ["cat", "mouser"]}'}
    files["wordnet"] = {f"dict/{name}": text for name, text in nouns.items()}
    return packed(tmp_path / "packages", files, monkeypatch)


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertModel

    folder = tmp_path / "teacher"
    sizes: Any = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(VOCABULARY), **sizes)).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    return folder


def tiny_config(steps: int) -> TextConfig:
    loop = LoopConfig(steps=steps, warmup=2, precision="fp32", evaluate_every=100, log_every=1)
    sizes: dict[str, Any] = {"vocabulary": 400, "layers": 1, "heads": 2, "hidden": 16, "batch": 12}
    return TextConfig(loop, MeaningConfig(width=16), **sizes)


def toy_lexicon() -> Lexicon:
    named = [Named("cat", ("kitty", "pet"), 3), Named("dog", ("puppy", "pet"), 3)]
    return build_lexicon(named, NO_NOUNS, ["a", "cat", "ship"])


def test_emojis_have_the_keywords_of_both_packages_and_nouns_their_first_senses(packages: Path) -> None:
    found = read_emojis(packages)
    assert [n.label for n in found] == ["cat", "dog", "woman's hat"]
    assert found[0].tags == ("kitty", "pet", "mouser")
    nouns = read_nouns(packages)
    assert nouns.synsets["00000001"].lemmas == ("cat", "true cat")
    assert nouns.synsets["00000003"].lemmas == ()
    assert nouns.first == {"cat": "00000001", "true cat": "00000001", "tabby": "00000002"}
    assert nouns.uses["cat"] == 1 and "crowd" in nouns.lemmas


def test_everyday_words_are_words_of_the_dictionary() -> None:
    vocabulary = ["[PAD]", "##s", *("the" for _ in range(400)), "cats", "baked", "paris"]
    assert everyday_words(vocabulary, frozenset({"cat", "bake"}))[400:] == ["cats", "baked"]


def test_lexicon_pulls_words_to_labels_and_hardly_labels_to_words(packages: Path) -> None:
    lexicon = build_lexicon(read_emojis(packages), read_nouns(packages), ["true", "cat"])
    pulls = {(lexicon.concepts[a], lexicon.concepts[b]): w for a, b, w in lexicon.pulls}
    assert pulls["kitty", "cat"] == 0.9 and pulls["true cat", "cat"] == 1.0
    assert pulls["tabby", "cat"] == 0.4 and pulls["cat", "true cat"] == 0.2
    assert [lexicon.concepts[i] for i in lexicon.near] == ["cat", "true cat", "tabby"]


def test_captions_are_a_function_of_seed_and_step_and_rivals_use_the_same_words_in_another_order() -> None:
    lexicon, seen = toy_lexicon(), 0
    one, two = (Composer(lexicon, seed=1) for _ in range(2))
    one.batch(0, 16)
    assert one.batch(7, 16) == two.batch(7, 16) != two.batch(8, 16)
    for step in range(20):
        rows = one.batch(step, 32)
        for caption in (row for row in rows if row.rival >= 0):
            assert sorted(caption.text.split()) == sorted(rows[caption.rival].text.split())
            seen += 1
    assert seen


def test_meanings_are_sums_and_synonyms_move_to_their_concepts() -> None:
    meanings = Meanings(torch.eye(4)[:2], {("colour", "red"): torch.eye(4)[2], ("style", "3d"): torch.eye(4)[3]})
    caption = Caption("3d red cat", (Part(0, (("colour", "red"), ("style", "3d"))),))
    torch.testing.assert_close(meanings.of([caption])[0], F.normalize(torch.tensor([1.0, 0, 1, 1]), dim=0))
    vectors = F.normalize(torch.tensor([[1.0, 0, 0], [0.8, 0.6, 0], [0, 0, 1]]), dim=-1)
    moved = retrofit(vectors, ((1, 0, 1.0),), 1.0)
    assert moved[1] @ moved[0] > 0.94 > vectors[1] @ vectors[0]
    torch.testing.assert_close(moved[[0, 2]], vectors[[0, 2]])


def test_labels_name_the_value_and_skip_captions_of_two_things() -> None:
    single = Caption("red cat", (Part(0, (("colour", "red"),)),))
    double = Caption("cat and dog", (Part(0), Part(1)), rival=0)
    labels, rivals = text_encoder.labels_and_rivals([single, double])
    assert labels[0].tolist() == [1, 0, 0, 0, 0, 0] and labels[1].eq(-100).all()
    assert rivals.tolist() == [[1, 0]]


def test_tokenizer_is_deterministic_and_keeps_names_whole() -> None:
    lexicon = toy_lexicon()
    one, two = (train_tokenizer(lexicon, 400) for _ in range(2))
    assert one.get_vocab() == two.get_vocab()
    assert one.tokenize("Two RED kitty") == ["two", "red", "kitty"]
    assert one("cat")["input_ids"][-1] == one.eos_token_id == 1 and one.pad_token_id == 0


def test_means_do_not_depend_on_the_batch(packages: Path, teacher: Path, tmp_path: Path) -> None:
    task = prepare(tiny_config(1), tmp_path / "out", packages, teacher)
    alone = task.means(*task.tokens(["red cat"]))
    together = task.means(*task.tokens(["a dog and a cat", "red cat", "hat", "a", "a cat"]))
    torch.testing.assert_close(alone[0], together[1])


def test_training_lowers_the_loss_and_gives_unit_embeddings(packages: Path, teacher: Path, tmp_path: Path) -> None:
    train(tiny_config(40), out=tmp_path, packages=packages, teacher=teacher)
    found = [line["loss"] for line in logged(tmp_path, "loss")]
    assert sum(found[-5:]) < 0.8 * sum(found[:5])
    encoder = TextEncoder.from_pretrained(tmp_path / "encoder", tmp_path / "tokenizer")
    embeddings, mask = encoder.encode(["cat", "dog", "woman's hat"], slots=8)
    means = embeddings.sum(1) / mask.sum(1, keepdim=True)
    assert encoder.width == 16
    assert means.square().mean().sqrt().item() == pytest.approx(1.0, abs=0.05)


def test_missing_and_altered_files_are_named(packages: Path, teacher: Path, tmp_path: Path) -> None:
    config = replace(tiny_config(1), concepts=(tmp_path / "no.txt",))
    assert "no.txt is missing; it is named under concepts" in refused(prepare, config, tmp_path, packages, teacher)
    (teacher / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused(prepare, tiny_config(1), tmp_path, packages, teacher)
    path = packages / archives()["labels"].file_name
    path.write_bytes(path.read_bytes() + b"x")
    assert "sha256" in refused(read_emojis, packages)


@pytest.fixture
def text() -> TextTask:
    """An untrained encoder whose tokenizer has the verb `refuse` but not the thing `hamster`."""
    named = [Named("cat", ("kitty",), 3), Named("dog", ("puppy",), 3)]
    words = [*(f"word{c}" for c in "abc"), "refuse"]
    lexicon, grown = (build_lexicon(named, NO_NOUNS, some) for some in (words, [*words, "hamster"]))
    torch.manual_seed(0)
    values = {(kind, v): 0.3 * torch.randn(16) / 4 for kind, options in attributes().items() for v in options}
    meanings = Meanings(F.normalize(torch.randn(len(grown.concepts), 16), dim=-1), values)
    return TextTask(tiny_config(1), grown, train_tokenizer(lexicon, 400), meanings)


def likeness(encoder: TextEncoder, caption: str, want: Float[Tensor, " c"]) -> float:
    embeddings, mask = encoder.encode([caption], slots=8)
    mean = embeddings.sum(1) / mask.sum()
    return float(F.cosine_similarity(mean[0], want, dim=0))


def test_most_needed_words_replace_the_least_needed_ones() -> None:
    vocab = {w: i for i, w in enumerate(["</s>", "##s", "horse", "ox", "edict", "treaty", "kept_word"])}
    needed = ["horse", "zebra", "yak", "ox", "edict", "treaty", "kept_word"]
    assert exchange(vocab, needed, required=3, count=9, keep={"kept_word"}) == {"zebra": "treaty", "yak": "edict"}
    assert exchange(vocab, needed, required=3, count=1, keep=set()) == {"zebra": "kept_word"}
    assert exchange({"treaty": 0}, ["zebra", "yak", "treaty"], required=2, count=9, keep={"zebra"}) == {"yak": "treaty"}


def test_new_word_gets_its_meaning_and_other_captions_are_unchanged(text: TextTask, tmp_path: Path) -> None:
    loop = LoopConfig(steps=60, warmup=1, precision="fp32", evaluate_every=1000)
    encoder = TextEncoder(text.encoder.to(torch.bfloat16).float(), text.tokenizer)
    before = encoder.encode(["two red cats", "kitty"], slots=8)
    want = text.meanings.concepts[text.lexicon.concepts.index("hamster")]
    before_training = likeness(encoder, "hamster", want)
    config = WordsConfig(loop, batch=8, lr=0.1)
    run_loop(text_encoder.WordsTask(config, encoder, text, {"hamster": "refuse"}), loop, out=tmp_path)
    trained = TextEncoder.from_pretrained(tmp_path / "encoder", tmp_path / "tokenizer")
    after = trained.encode(["two red cats", "kitty"], slots=8)
    assert torch.equal(before[0], after[0])
    assert likeness(trained, "hamster", want) > max(0.5, before_training + 0.2)


def test_the_loss_of_more_probable_tokens_is_smaller() -> None:
    target, condition = tiny_target(), tiny_condition((4, 2))
    made = generate(target, condition, sampling=Sampling(temperature=0.0), keys=[(0, 0), (0, 1)])
    (greedy, without), (other, _) = (
        nats(logits_of(target, condition, tokens), tokens).unbind(1) for tokens in (made.tokens, (made.tokens + 1) % 24)
    )
    assert greedy.mean() < other.mean()
    assert without.shape == (2, 16) and not torch.equal(without, greedy)


def test_a_copy_is_nearer_than_one_and_a_half_times_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "encode", lambda vq, pictures, batch: pictures)
    monkeypatch.setattr(card, "decode", lambda vq, tokens, batch: tokens + 2)  # an error of 2 in every byte
    training = torch.randint(100, 200, (3, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    near, far = training[:2] + 2, training[2:] + 4
    vq: Any = None
    assert copies(vq, torch.cat([near, far]), training) == pytest.approx(2 / 3)


def test_a_concept_is_found_if_no_other_is_more_similar() -> None:
    similar = torch.eye(8) + torch.arange(8) / 4  # the last are the most similar to all
    found = retrieval(similar, torch.arange(8) < 6)
    assert [part[bound]["value"] for part in found.values() for bound in ("top1", "top5")] == [5 / 8, 1, 3 / 6, 1]
    assert found["recognised"]["images"] == 6 and found["recognised"]["top1"]["low"] < 3 / 6
