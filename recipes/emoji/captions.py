"""Captions of pictures: articles, plurals, and weighted templates.

A caption is (text, weight); the weights of one picture sum to one. Captions hold no words reserved for evaluation.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from lantern.training.data import article
from recipes.emoji.packages import Concept

Captions = tuple[tuple[str, float], ...]

COLOURS = {"red", "orange", "yellow", "green", "blue", "purple", "pink", "black", "white", "brown"}
NUMBERS = {2: "two", 3: "three", 4: "four"}
STOP_WORDS = {"a", "an", "the", "of", "and", "with", "in", "on", "for", "to", "from"}
UNCHANGED = "sheep fish pufferfish jellyfish deer moose bison shrimp squid"
IRREGULAR = {word: word for word in UNCHANGED.split()} | {
    **{"mouse": "mice", "goose": "geese", "ox": "oxen", "wolf": "wolves", "knife": "knives", "leaf": "leaves"},
    **{"scarf": "scarves", "potato": "potatoes", "tomato": "tomatoes", "mango": "mangoes", "mosquito": "mosquitoes"},
    **{"volcano": "volcanoes", "snowman": "snowmen", "foot": "feet", "man": "men", "woman": "women"},
}
# The word before these is the one that is counted.
TAIL = re.compile(r" (?:of|with|from|over|behind|in|on|at|and) ")


def words_of(text: str) -> list[str]:
    """Return the words of a caption in lower case, with hyphens."""
    return re.findall(r"[a-z0-9'-]+", text.lower())


def read_reserved(path: Path) -> frozenset[str]:
    """Return the words and plurals of the evaluation prompts in a JSON list of {"prompt", "concept"}."""
    prompts = json.loads(path.read_text(encoding="utf-8"))
    words = {w for entry in prompts for w in words_of(entry["prompt"])} - STOP_WORDS
    return frozenset(words | {plural(word) for word in words})


def plural(name: str) -> str:
    """Return the plural of a name: "box" -> "boxes", "cup of tea" -> "cups of tea", "mouse" -> "mice"."""
    tail = TAIL.search(name)
    head, rest = (name[: tail.start()], name[tail.start() :]) if tail else (name, "")
    start, space, last = head.rpartition(" ")
    if last in IRREGULAR:
        last = IRREGULAR[last]
    elif re.search(r"(s|x|z|ch|sh)$", last):
        last += "es"
    elif re.search(r"[^aeiou]y$", last):
        last = last[:-1] + "ies"
    else:
        last += "s"
    return f"{start}{space}{last}{rest}"


def indefinite(name: str, concept: Concept) -> str:
    """Return the name with an article unless it is a plural or a mass."""
    return article(name) if concept.takes_article else name


def base_name(name: str) -> str:
    """Return the name without a leading colour: "red apple" -> "apple"."""
    first, _, rest = name.partition(" ")
    return rest if first in COLOURS and rest else name


def weighted(pairs: Iterable[tuple[str, float]]) -> Captions:
    """Merge equal texts and scale weights to sum to one, rounded for storage."""
    merged: dict[str, float] = {}
    for text, weight in pairs:
        merged[text] = merged.get(text, 0.0) + weight
    total = sum(merged.values())
    return tuple((text, round(weight / total, 4)) for text, weight in merged.items())


def styled(name: str, style: str, concept: Concept) -> list[tuple[str, float]]:
    """Return common phrases for one thing, plain and with its style; weights sum to one."""
    return [
        (name, 0.22),
        (indefinite(name, concept), 0.24),
        (f"an emoji of {indefinite(name, concept)}", 0.02),
        (f"a picture of {indefinite(name, concept)}", 0.02),
        (f"{style} {name}", 0.14),
        (indefinite(f"{style} {name}", concept), 0.10),
        (indefinite(f"{style} style {name}", concept), 0.08),
        (f"{name}, {style} style", 0.10),
        (f"{indefinite(name, concept)} in {style} style", 0.08),
    ]


def plain_captions(concept: Concept, style: str, tags: Sequence[str], *, colour: str | None) -> Captions:
    """Return captions of a single picture. `colour` is its natural colour, if it has a single one."""
    pairs = [(text, 0.66 * weight) for text, weight in styled(concept.name, style, concept)]
    for other in concept.other_names:
        share = 0.18 / len(concept.synonyms)
        pairs += [(text, share * weight) for text, weight in styled(other.name, style, other)]
    if colour is not None and base_name(concept.name) == concept.name != colour:
        name = f"{colour} {concept.name}"
        pairs += [(text, 0.08 * weight) for text, weight in styled(name, style, concept)]
    if tags:
        pairs.append((f"{concept.name}, {', '.join(tags[:2])}", 0.04))
        pairs.append((f"{style} {concept.name}, {tags[-1]}", 0.03))
        pairs.append((", ".join(tags[:3]), 0.02))
    return weighted(pairs)


def count_captions(concept: Concept, style: str, number: int, *, colour: str | None) -> Captions:
    """Return captions of `number` copies: "two red apples", "three 3d cats"."""
    single = f"{colour} {base_name(concept.name)}" if colour else concept.name
    word, many = NUMBERS[number], plural(single)
    pairs = [
        (f"{word} {many}", 0.50),
        (f"{number} {many}", 0.06),
        (f"{word} {style} {many}", 0.16),
        (f"{word} {many}, {style} style", 0.14),
        (f"{word} {many} in {style} style", 0.14),
    ]
    return weighted(pairs)


def pair_captions(left: Concept, right: Concept, style: str) -> Captions:
    """Return captions of two things side by side; most name the left one first."""
    one, two = indefinite(left.name, left), indefinite(right.name, right)
    pairs = [
        (f"{one} and {two}", 0.48),
        (f"{two} and {one}", 0.12),
        (f"{left.name} and {right.name}", 0.08),
        (f"{one} and {two}, {style} style", 0.16),
        (f"{one} and {two} in {style} style", 0.16),
    ]
    return weighted(pairs)


def check_reserved(names: Iterable[str], reserved: frozenset[str]) -> None:
    """Raise ValueError if a caption holds a word reserved for evaluation."""
    for name in names:
        clash = reserved & set(words_of(name))
        if clash:
            raise ValueError(
                f"{name!r} holds {sorted(clash)}, which is reserved for evaluation prompts: "
                "rename the concept or drop the prompt"
            )
