"""Names of what a model generates, for prompts in words that its training captions never had."""

import re
from collections.abc import Collection, Sequence
from functools import cached_property

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from lantern.models.llamagen.text import TextEncoder

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
