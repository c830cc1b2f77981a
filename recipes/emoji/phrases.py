"""Captions made of concepts and attributes, with their content: the training data of the text encoder."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from lantern.core.config import read_json_object
from recipes.emoji.captions import article, plural
from recipes.emoji.lexicon import Lexicon

FRAMES = ("a photo of {}", "a picture of {}", "an image of {}", "an emoji of {}", "an icon of {}", "a drawing of {}")
# Share of the things in training captions that have a value of the attribute.
ODDS = {"colour": 0.5, "count": 0.3, "style": 0.4, "size": 0.12, "place": 0.1, "ground": 0.12}


@cache
def attributes() -> dict[str, dict[str, list[str]]]:
    """Return the values of each attribute and the phrases for each, "{}" in them for the thing.

    The direction of a value is measured with its first phrase.
    """
    return read_json_object(Path(__file__).with_name("attributes.json"))


@dataclass(frozen=True)
class Part:
    """One thing in a caption: a concept and (attribute, value) pairs."""

    concept: int
    values: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Caption:
    """A caption and its content. `rival` is the row of the batch to separate it from, or -1."""

    text: str
    parts: tuple[Part, ...]
    rival: int = -1


def spell(name: str, values: dict[str, str], rng: np.random.Generator) -> str:
    """Return a phrase for a thing with its attributes, such as "two small red apples, 3d"."""

    def pick(kind: str) -> str:
        ways = attributes()[kind][values[kind]]
        return ways[0] if rng.random() < 0.5 else ways[rng.integers(len(ways))]

    text = plural(name) if "count" in values else name
    before = ["colour", "size"]
    if "count" in values:
        # "two 3d cats" has the meaning of "two cats, 3d".
        if "style" in values and rng.random() < 0.3:
            text = f"{values['style']} {text}"
            values = {k: v for k, v in values.items() if k != "style"}
        before.append("count")
    for kind in before:
        if kind in values:
            text = f"{pick(kind)} {text}"
    framed = [kind for kind in ("place", "ground", "style") if kind in values]
    if "count" not in values and rng.random() < 0.4:
        text = f"the {text}" if rng.random() < 0.2 else article(text)
    for kind in framed:
        text = pick(kind).format(text)
    return FRAMES[rng.integers(len(FRAMES))].format(text) if rng.random() < 0.15 else text


class Composer:
    """Makes the captions of a step: a function of (seed, step) alone, so that a resumed run repeats them."""

    def __init__(self, lexicon: Lexicon, *, seed: int) -> None:
        self.lexicon = lexicon
        self.seed = seed
        near = set(lexicon.near)
        self.alike = [(a, b) for a, b, weight in lexicon.pulls if weight >= 0.9]
        self.alike_near = [pair for pair in self.alike if near & set(pair)] or self.alike

    def batch(self, step: int, size: int) -> list[Caption]:
        """Return `size` captions: concepts, synonyms, names with keywords, and neighbours that differ by one value."""
        rng = np.random.default_rng([self.seed, step])
        makers = (self._concepts, self._synonyms, self._keywords, self._neighbours, self._two)
        rows: list[Caption] = []
        while len(rows) < size:
            rows += makers[rng.choice(5, p=(0.16, 0.24, 0.16, 0.32, 0.12))](rng, len(rows))
        return rows[:size]

    def about(self, concepts: list[int], step: int, size: int) -> list[Caption]:
        """Return `size` captions of single things among `concepts`, half of them with attributes."""
        rng = np.random.default_rng([self.seed, step])
        chosen = rng.choice(concepts, size=size)
        return [self._caption(int(c), self._values(rng) if rng.random() < 0.5 else {}, rng) for c in chosen]

    def _caption(self, concept: int, values: dict[str, str], rng: np.random.Generator) -> Caption:
        text = spell(self.lexicon.concepts[concept], values, rng)
        return Caption(text, (Part(concept, tuple(values.items())),))

    def _thing(self, rng: np.random.Generator) -> int:
        if rng.random() < 0.6:
            return self.lexicon.named[rng.integers(len(self.lexicon.named))][0]
        return int(rng.choice(self.lexicon.objects))

    def _values(self, rng: np.random.Generator) -> dict[str, str]:
        kinds = [kind for kind, odds in ODDS.items() if rng.random() < odds]
        return {kind: str(rng.choice(list(attributes()[kind]))) for kind in kinds}

    def _concepts(self, rng: np.random.Generator, at: int) -> list[Caption]:
        which = rng.random()
        if which < 0.4 and self.lexicon.near:
            chosen = rng.choice(self.lexicon.near, size=4)
        else:
            chosen = rng.integers(self.lexicon.common if which < 0.8 else len(self.lexicon.concepts), size=4)
        return [self._caption(int(c), {}, rng) for c in chosen]

    def _synonyms(self, rng: np.random.Generator, at: int) -> list[Caption]:
        pairs = self.alike_near if rng.random() < 0.6 else self.alike
        values = self._values(rng) if rng.random() < 0.3 else {}
        return [self._caption(c, values, rng) for c in pairs[rng.integers(len(pairs))]]

    def _keywords(self, rng: np.random.Generator, at: int) -> list[Caption]:
        label, tags = self.lexicon.named[rng.integers(len(self.lexicon.named))]
        values = self._values(rng) if rng.random() < 0.5 else {}
        some = [int(t) for t in rng.permutation(tags)[: rng.integers(1, 5)]]
        plain, again = self._caption(label, values, rng), self._caption(label, values, rng)
        # Keywords repeat the content: the caption has the meaning of its label.
        listed = ", ".join([again.text, *(self.lexicon.concepts[t] for t in some)])
        return [plain, Caption(listed, again.parts)]

    def _neighbours(self, rng: np.random.Generator, at: int) -> list[Caption]:
        concept, values = self._thing(rng), self._values(rng)
        kind = ("colour", "count", "style", "colour", "count", "ground")[rng.integers(6)]
        options = rng.permutation(list(attributes()[kind]))[:2]
        return [self._caption(concept, {**values, kind: str(v)}, rng) for v in options]

    def _two(self, rng: np.random.Generator, at: int) -> list[Caption]:
        things = [self._thing(rng), self._thing(rng)]
        names = [self.lexicon.concepts[t] for t in things]
        colours = [str(c) for c in rng.permutation(list(attributes()["colour"]))[:2]]
        style = str(rng.choice(list(attributes()["style"]))) if rng.random() < 0.4 else ""
        has_article, frame = rng.random() < 0.6, rng.integers(3)
        rows = []
        # The same words with the colours exchanged describe another picture.
        for order in (colours, colours[::-1]) if rng.random() < 0.3 else (("", ""),):
            each = [f"{c} {n}".strip() for c, n in zip(order, names, strict=True)]
            text = " and ".join(article(e) if has_article else e for e in each)
            text = attributes()["style"][style][2 * frame].format(text) if style and frame < 2 else text
            used = style if style and frame < 2 else ""
            parts = tuple(
                Part(t, tuple(p for p in (("colour", c), ("style", used)) if p[1]))
                for t, c in zip(things, order, strict=True)
            )
            rows.append(Caption(text, parts, rival=at if rows else -1))
        return rows
