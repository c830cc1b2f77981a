"""The words of a model's training captions and the names of what it generates: their files, and prompts in other words.

A prompt of words that the training captions never had is read as the name of the nearest meaning.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from lantern.core.config import one_line
from lantern.core.io import write_text
from lantern.models.llamagen.text import TextEncoder

WORDS_NAME, NAMES_NAME, RECOGNISED_NAME = "words.txt", "names.txt", "recognised.txt"
CLASSES_NAME = "classes.json"  # names of the classes of a class-conditional target, in the order of their numbers
WORD = re.compile(r"[^\W_]+(?:['-][^\W_]+)*")
SHORT = 2  # words of so many letters or fewer ("a", "of", "3d") mean nothing by themselves
LEAST_COSINE = 0.45  # chosen on the synonyms of assets/prompts
BATCH, SLOTS = 32, 32  # texts encoded at a time, and tokens of a text that count


class Names:
    """The names that a model was trained on, and the words of its training captions, in lower case.

    The text encoder's mean output of a text must be near that of texts of the same meaning, as `lantern train text`
    trains it.
    """

    def __init__(self, text: TextEncoder, words: Collection[str], names: Sequence[str]) -> None:
        self.text, self.words, self.names = text, frozenset(words), tuple(names)
        self._nouns = frozenset(WORD.findall(name)[-1] for name in self.names)

    def reading(self, prompt: str) -> str:
        """Return a prompt whose unknown words are replaced by the name of the nearest meaning.

        A prompt is left as it is if no word is unknown, if one of its words is the last one of a name (it has a
        subject then), and if no name is near.
        """
        found = list(WORD.finditer(prompt.lower()))
        unknown = [word for word in found if len(word[0]) > SHORT and word[0] not in self.words]
        if not unknown or any(word[0] in self._nouns for word in found):
            return prompt
        cosines = (self._mean([" ".join(word[0] for word in unknown)]) @ self._means.T)[0]
        if cosines.max() < LEAST_COSINE:
            return prompt
        parts, end = [], 0
        for i, word in enumerate(unknown):
            parts += [prompt[end : word.start()], "" if i else self.names[int(cosines.argmax())]]
            end = word.end()
        return " ".join("".join([*parts, prompt[end:]]).split())

    @cached_property
    def _means(self) -> Float[Tensor, "n c"]:
        return self._mean(self.names)

    def _mean(self, texts: Sequence[str]) -> Float[Tensor, "n c"]:
        """Return the mean outputs of texts, of length 1."""
        embeddings, mask = self.text.encode(texts, slots=SLOTS, batch_size=BATCH)
        weights = mask[..., None].float()
        return normalize((embeddings.float() * weights).sum(1) / weights.sum(1), dim=-1)


def read_words(folder: Path) -> list[str]:
    """Return the words of the captions that a model was trained on; ValueError where its folder does not list them."""
    path = folder / WORDS_NAME
    if not path.is_file():
        raise ValueError(f"{path} is missing: the words of the training captions are not recorded for this model")
    return _text_of(path).split()


def read_names(path: Path) -> list[str]:
    """Return the names of a file with one a line, in lower case; ValueError if it holds none or is no text."""
    names = list(dict.fromkeys(filter(None, map(str.strip, _text_of(path).lower().splitlines()))))
    if not names or not all(WORD.search(name) for name in names):
        raise ValueError(f"{path} has {'a line without a word' if names else 'no names'}, wanted a name on each line")
    return names


def list_names(folder: Path) -> list[str]:
    """Return the names whose images are recognised, or all names where they were not measured.

    ValueError for a model folder without either list.
    """
    for name in (RECOGNISED_NAME, NAMES_NAME):
        if (folder / name).is_file():
            return read_names(folder / name)
    raise ValueError(f"{folder / NAMES_NAME} is missing: the names of what this model generates are not recorded")


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {one_line(error)}") from error


def write_names(path: Path, names: Iterable[str]) -> None:
    """Write names or words, one a line."""
    write_text(path, "".join(f"{name}\n" for name in names))


def write_words(folder: Path, captions: Iterable[str]) -> None:
    """Write the distinct words of captions, in lower case and sorted, one a line."""
    write_names(folder / WORDS_NAME, sorted({word for caption in captions for word in WORD.findall(caption.lower())}))
