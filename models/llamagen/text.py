"""Text conditioning: a prompt becomes the left-padded embeddings and the mask that a LlamaGen transformer reads.

LlamaGen (arXiv:2406.06525) conditions on FLAN-T5-XL. Any T5-type encoder folder loads here, the small encoder of the
embedded model included; only the width of the embeddings and the number of `slots` differ.

Captions are cleaned first, as LlamaGen's models were trained with it. The rules come from the captions of web images:
addresses, file names, article numbers and shop phrases do not describe the picture. `clean_caption` applies the whole
set twice, like LlamaGen.

A model may record the words of its training captions and the names of what it generates. A prompt of words that the
captions never had is then read as the name of the nearest meaning (`Names`).
"""

import html
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from html.entities import html5
from html.parser import HTMLParser
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import unquote_plus

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import normalize, pad

from lantern.core.config import one_line, read_json_object
from lantern.core.io import check_finite, is_there, read_header, write_text
from lantern.core.process import quiet
from lantern.core.types import Condition
from lantern.core.weights import WeightCache, outside_modes
from lantern.models.llamagen import t5

_DOMAIN = r"[.](?:com|co|ru|net|org|edu|gov|it)"
_HOST = rf"[a-zA-Z0-9.\-]+{_DOMAIN}[\w/-]*\b/?(?!@)"
_FILE_TYPE = r"(?:png|jpe?g|bmp|webp|eps|pdf|apk|mp4)"
_DASHES = (
    "\\-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0"
    "\ufe31\ufe32\ufe58\ufe63\uff0d"
)
# A config past these is a damaged file, not a model: refused before anything is allocated.
LIMITS = {
    **{"num_layers": 256, "num_decoder_layers": 256, "num_heads": 1024, "d_kv": 1 << 12, "d_model": 1 << 16},
    **{"d_ff": 1 << 18, "vocab_size": 1 << 21, "relative_attention_num_buckets": 1 << 12},
}
EMOJI_MODIFIERS = {"\ufe0e", "\ufe0f", "\u200d", *map(chr, range(0x1F3FB, 0x1F400))}
T5_TYPES = ("t5", "mt5", "umt5")
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER_FILES = ("tokenizer.json", "spiece.model")
TOKENIZER_CONFIGS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
MAX_TOKENIZER_BYTES = 1 << 27
WIDE = 1 << 24  # most parameters of an encoder that computes in fp64
WORDS_NAME, NAMES_NAME, RECOGNISED_NAME = "words.txt", "names.txt", "recognised.txt"
CLASSES_NAME = "classes.json"  # names of the classes of a class-conditional target, in the order of their numbers
WORD = re.compile(r"[^\W_]+(?:['-][^\W_]+)*")
PLURAL = re.compile(r"[^su]s$")  # not "octopus" and "dress"
SHORT = 2  # words of so many letters or fewer ("a", "of", "3d") mean nothing by themselves
STOP_WORDS = {
    *("the", "this", "that", "which", "who", "some", "all", "its", "his", "her", "their", "and", "with", "without"),
    *("from", "for", "next", "not", "are", "very", "image", "icon", "please", "show", "make", "want"),
}
LEAST_COSINE = 0.45  # chosen on the synonyms of assets/prompts
BATCH, SLOTS = 32, 32  # texts encoded at a time, and tokens of a text that count
HAS_ADDRESS = re.compile(rf"https?:|www:|{_DOMAIN}")
ADDRESSES = (
    (rf"\b(?:https?:(?:/{{1,3}}|[a-zA-Z0-9%])|{_HOST})", ""),
    (rf"\b(?:www:(?:/{{1,3}}|[a-zA-Z0-9%])|{_HOST})", ""),
)
SYMBOLS = (
    (r"@\w+\b", ""),  # nicknames
    (r"[\u31c0-\u4dff\u4e00-\u9fff]+", ""),  # CJK strokes, enclosed forms and ideographs; kana stay
    (rf"[{_DASHES}]+", "-"),
    ("[`\u00b4«»\u201c\u201d¨]", '"'),
    ("[\u2018\u2019]", "'"),
    (r"&quot;?", ""),
    (r"&amp", ""),
    (r"\d{1,3}(?:\.\d{1,3}){3}", " "),  # internet addresses
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    # A name with a file type. The look-behind keeps a long line without spaces from costing quadratic time.
    (rf"(?<!\S)\S+\.{_FILE_TYPE}", ""),
    (r"[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡~()\[\]{}|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
JOINERS = re.compile(r"[-_]")
SHOP_PHRASES = (
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # jc6640
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),  # jc6640vc
    (r"\b\d+[a-zA-Z]+\d+\b", ""),  # 6640vc231
    (r"(?:worldwide\s+)?(?:free\s+)?shipping", ""),
    (r"(?:free\s)?download(?:\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b{_FILE_TYPE}(?:\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),  # j2d1a2a
    (r"\b\d+\.?\d*[x\u0445\u00d7]\d+\.?\d*\b", ""),  # 100x200, with a Latin or Cyrillic x or a times sign
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
)
ENDS = (
    (r"^[\"']([\w\W]+)[\"']$", r"\1"),
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)


class _Text(HTMLParser):
    """Collects the text between tags; scripts and style sheets are not text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.pieces: list[str] = []

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is None:
            self.pieces.append(data)

    def handle_charref(self, name: str) -> None:
        self.pieces.append(html.unescape(f"&#{name};"))

    def handle_entityref(self, name: str) -> None:
        # An unknown entity loses its semicolon, as it does in Beautiful Soup, through which the models' captions went.
        self.pieces.append(html5.get(f"{name};", f"&{name}"))


def without_markup(text: str) -> str:
    """Return the text of an HTML fragment, or the fragment itself if it cannot be parsed."""
    parser = _Text()
    try:
        parser.feed(text)
        parser.close()
    except AssertionError:  # how html.parser refuses declarations such as `<![x`
        return text
    return "".join(parser.pieces)


def _apply(rules: Sequence[tuple[str, str]], text: str) -> str:
    for pattern, replacement in rules:  # whose compiled forms `re` keeps
        text = re.sub(pattern, replacement, text)
    return text


def _repaired(text: str) -> str:
    """Return text with wrongly decoded characters repaired; printable ASCII has none, and needs no ftfy."""
    if text.isascii() and text.isprintable() and "&" not in text:
        return text
    import ftfy

    return ftfy.fix_text(text)


def _clean_once(text: str) -> str:
    text = unquote_plus(text).strip().lower().replace("<person>", "person")
    # Addresses hold no spaces; looking only into words that could be one keeps long garbage cheap.
    text = re.sub(r"\S+", lambda word: _apply(ADDRESSES, word[0]) if HAS_ADDRESS.search(word[0]) else word[0], text)
    text = without_markup(text)
    text = _apply(SYMBOLS, text)
    # More than three hyphens or underscores are a file name's spaces.
    if len(JOINERS.findall(text)) > 3:
        text = JOINERS.sub(" ", text)
    text = html.unescape(html.unescape(_repaired(text))).strip()
    return _apply(ENDS, _apply(SHOP_PHRASES, text)).strip()


def clean_caption(text: str) -> str:
    """Return the caption as input of LlamaGen's text encoder: lower case, cleaned twice.

    May return the empty string. Deletes Chinese characters, sizes such as `100x200`, and words such as `jpg`.
    """
    return _clean_once(_clean_once(text))


def rotate_to_right(
    embeddings: Float[Tensor, "b t c"], mask: Bool[Tensor, "b t"]
) -> tuple[Float[Tensor, "b t c"], Bool[Tensor, "b t"]]:
    """Convert right-padded rows to left-padded ones, with zeros in the padding.

    With two valid of four slots, `[a b . .]` becomes `[0 0 a b]`; the encoder runs right-padded, because its
    relative positions were trained that way.
    """
    slots = mask.shape[1]
    count = mask.sum(1, keepdim=True)
    place = torch.arange(slots, device=mask.device)
    # Slot i of the result reads slot i + n of the source, around the end.
    source = (place + count) % slots
    rotated = embeddings.gather(1, source[..., None].expand_as(embeddings))
    right = place >= slots - count
    return rotated.masked_fill(~right[..., None], 0), right


def named_emoji(prompt: str, is_unknown: Callable[[str], bool]) -> str:
    """Replace emoji characters for which `is_unknown` holds by their Unicode names in lower case ("red apple").

    Skin tones, variation selectors and joiners are removed with them.
    """
    if prompt.isascii():
        return prompt
    parts = []
    for character in prompt:
        if unicodedata.category(character) == "So" and is_unknown(character):
            parts.append(f" {unicodedata.name(character, '').lower()} ")
        elif character not in EMOJI_MODIFIERS:
            parts.append(character)
    return "".join(parts)


def _check_vocabulary(tokenizer: Any, tokens: int, file: Path) -> None:
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= tokens:
        raise ValueError(f"{file} has tokens up to {highest}, the text encoder {tokens}: they do not fit")


_MEANS: WeightCache[dict[tuple[str, ...], Tensor]] = WeightCache(lambda _: {})  # of encoded names
_WIDE: WeightCache[Any] = WeightCache(t5.widened)
_TOKENIZING = Lock()  # a tokenizer of transformers keeps the lengths of its last call


class TextEncoder:
    """A T5-type encoder with its tokenizer: those of `lantern.models.llamagen.t5`, or of transformers."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self.model: Any = model.eval()
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype) -> "TextEncoder":
        """Load from local files without transformers, where they need none; see `from_pretrained`."""
        weights, words = checked_folders(folder, None)
        found = t5.load(weights, words, dtype=dtype)
        if found is None:
            return cls.from_pretrained(folder, dtype=dtype)
        _check_vocabulary(found[1], found[0].config.vocab_size, words / TOKENIZER_FILES[0])
        return cls(found[0].requires_grad_(False), found[1])

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, tokenizer_dir: str | Path | None = None, *, dtype: torch.dtype = torch.float32
    ) -> "TextEncoder":
        """Load from local files: an encoder folder that holds its tokenizer, or one with `tokenizer/` beside it.

        folder may also be the parent of `text_encoder/` and `tokenizer/` (the layout of diffusers). A folder with a
        whole T5 loads its encoder. Raises ValueError naming the file that is missing or damaged.
        """
        from transformers import AutoModelForTextEncoding, AutoTokenizer

        weights, words = checked_folders(Path(folder), None if tokenizer_dir is None else Path(tokenizer_dir))
        file = next(path for name in WEIGHT_FILES if is_there(path := weights / name))
        how: Any = {"local_files_only": True, "trust_remote_code": False, "dtype": dtype}
        try:
            if file.suffix == ".safetensors":
                read_header(file)
            with quiet():  # a whole T5's decoder weights are unused on purpose
                model, found = AutoModelForTextEncoding.from_pretrained(weights, output_loading_info=True, **how)
            if found["missing_keys"]:
                raise ValueError(f"{file}: tensor {min(found['missing_keys'])!r} is missing")
            check_finite(model.state_dict(), source=file)
        except Exception as error:  # transformers and the readers below it raise of every kind for damaged files
            text = one_line(error) if "weights_only" not in str(error) else "it is no file of plain tensors"
            known = str(error).startswith(str(file))
            raise ValueError(text if known else f"{file} holds no text encoder that loads: {text}") from error
        file = next(path for name in TOKENIZER_FILES if is_there(path := words / name))
        with t5.reading_words(file):
            with quiet():
                tokenizer = AutoTokenizer.from_pretrained(words, local_files_only=True, trust_remote_code=False)
            tokenizer("a", padding="max_length", max_length=2, truncation=True)  # batches need a padding token
            tokenizer.get_vocab()
        _check_vocabulary(tokenizer, model.config.vocab_size, file)
        return cls(model.requires_grad_(False), tokenizer)

    def save_pretrained(self, folder: str | Path, tokenizer_dir: str | Path | None = None) -> None:
        """Write model and tokenizer in the form that `from_pretrained` reads; one folder unless two are given."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder if tokenizer_dir is None else tokenizer_dir)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "TextEncoder":
        """Move the model; returns self."""
        self.model.to(device=device, dtype=dtype)
        return self

    @property
    def width(self) -> int:
        """Channels of an embedding (2048 for FLAN-T5-XL)."""
        return self.model.config.d_model

    def knows(self, prompt: str) -> bool:
        """Return whether the tokenizer knows any word of a prompt.

        Of tokenizers of whole words and word pieces a word is known if it is a single piece; of others (sentence
        pieces, which spell every word of their alphabet) if it has a piece at all. A plural counts by its singular,
        and words of one or two letters only where there are no others. Emoji characters count by their names
        (`named_emoji`).
        """
        if self.tokenizer.unk_token_id is None:
            return True
        words = clean_caption(self._named(prompt)).replace("-", " ").split()
        words = [word for word in words if len(word) > 2] or words
        spells = type(self.tokenizer.backend_tokenizer.model).__name__ in ("Unigram", "BPE")
        plurals = [word.removesuffix(end) for word in words for end in ("s", "es") if word.endswith(end)]
        for word in (*words, *plurals):
            ids = self._tokenized(word, add_special_tokens=False)["input_ids"]
            if any(piece != self.tokenizer.unk_token_id for piece in ids) and (spells or len(ids) == 1):
                return True
        return False

    def is_blank(self, prompt: str) -> bool:
        """Return whether cleaning leaves nothing of a prompt."""
        return not clean_caption(prompt).strip()

    def condition(self, prompts: Sequence[str], *, slots: int = 120) -> Condition:
        """Return the condition of prompts; see `encode`."""
        embeddings, mask = self.encode(prompts, slots=slots)
        return Condition(embeddings=embeddings, mask=mask)

    def unread(self, prompt: str, slots: int) -> int:
        """Return how many tokens of a prompt, its end included, do not fit into the slots."""
        return max(len(self._tokenized(self._caption(prompt), verbose=False)["input_ids"]) - slots, 0)

    def _tokenized(self, text: str | list[str], **how: Any) -> Any:
        with _TOKENIZING:
            self.tokenizer.padding_side = "right"
            return self.tokenizer(text, **how)

    def _named(self, prompt: str) -> str:
        """The prompt with each emoji character that the tokenizer does not know replaced by its name."""
        unknown, pieces = self.tokenizer.unk_token_id, partial(self._tokenized, add_special_tokens=False)
        return prompt if unknown is None else named_emoji(prompt, lambda one: unknown in pieces(one)["input_ids"])

    @outside_modes
    def encode(
        self, prompts: Sequence[str], *, slots: int = 120, batch_size: int = 1
    ) -> tuple[Float[Tensor, "b t c"], Bool[Tensor, "b t"]]:
        """Return embeddings of prompts, right-aligned in their slots, and the mask, on the model's device.

        The mask is true for words and the end token; where it is false, embeddings are zero.
        Long prompts are cut to `slots` tokens, the end token included. One prompt a pass keeps a prompt's embedding
        independent of its company, bit for bit; a larger `batch_size` is faster and agrees to rounding. On a CPU an
        encoder that `t5.widened` reads, with at most WIDE parameters, computes in fp64, without padding, so that its
        result, rounded to fp32, does not depend on the processor. A prompt of which cleaning leaves nothing is a
        ValueError.
        """
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"got {prompts!r} as prompts, wanted a list of at least one")
        if slots < 1 or batch_size < 1:
            raise ValueError(f"got slots={slots}, batch_size={batch_size}, wanted both at least 1")
        # lone surrogates are no text that a tokenizer takes
        plain = [self._caption(prompt).encode("utf-8", "replace").decode("utf-8") for prompt in prompts]
        cut: dict[str, Any] = {"max_length": slots, "padding": "max_length", "truncation": True}
        out = self._tokenized(plain, add_special_tokens=True, return_tensors="pt", **cut)
        ids, mask = (out[name].to(self.model.device) for name in ("input_ids", "attention_mask"))
        rows, mask = [], mask.bool()
        model, size = self.model, sum(map(torch.numel, self.model.parameters()))
        wide = _WIDE.get(model) if model.device.type == "cpu" and size <= WIDE else None
        model, dtype = (model, model.dtype) if wide is None else (wide, torch.float32)
        with torch.no_grad():
            for some, valid in zip(ids.split(batch_size), mask.split(batch_size), strict=True):
                read = slice(None if wide is None else int(valid.sum(1).max()))
                found = model(input_ids=some[:, read], attention_mask=valid[:, read].long())
                found = getattr(found, "last_hidden_state", found)  # of transformers
                rows.append(pad(found, (0, 0, 0, slots - found.shape[1])))
        return rotate_to_right(torch.cat(rows).to(dtype), mask)

    def _caption(self, prompt: str) -> str:
        caption = clean_caption(self._named(prompt))
        if not caption.strip():
            shown = prompt if len(prompt) <= 40 else prompt[:37] + "..."
            why = "is empty" if not prompt.strip() else "is empty once cleaned"
            raise ValueError(f"prompt {shown!r} {why}; give a few words, such as 'a red apple'")
        return caption


def checked_folders(folder: Path, tokenizer_dir: Path | None) -> tuple[Path, Path]:
    """Return the folders of weights and tokenizer.

    ValueError names a file that is missing or names code, and a size in the config that is no positive integer or
    beyond LIMITS.
    """
    folder = folder / "text_encoder" if (folder / "text_encoder").is_dir() else folder
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{config} is missing; give the folder of a T5-type encoder")
    values = read_json_object(config)
    if (kind := values.get("model_type")) not in T5_TYPES:
        raise ValueError(f"{config} has model_type {kind!r}, wanted one of {', '.join(T5_TYPES)}")
    if not any((folder / name).is_file() for name in WEIGHT_FILES):
        raise ValueError(f"{folder / WEIGHT_FILES[0]} is missing; the folder holds no weights")
    for name, most in LIMITS.items():
        value = values.get(name, 1)
        if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most):
            raise ValueError(f"{config}: {name} is {str(value)[:40]}, wanted from 1 to {most}")
    if "auto_map" in values:
        raise ValueError(f"{config} names code to run (auto_map), wanted a plain T5 encoder")
    beside = [tokenizer_dir] if tokenizer_dir else [folder, folder.parent / "tokenizer"]
    words = next((one for one in beside if any((one / name).is_file() for name in TOKENIZER_FILES)), None)
    if words is None:
        raise ValueError(f"{beside[-1] / TOKENIZER_FILES[0]} is missing; give the tokenizer's folder as well")
    for path in (words / name for name in TOKENIZER_CONFIGS):
        if is_there(path) and "auto_map" in read_json_object(path, most=MAX_TOKENIZER_BYTES):
            raise ValueError(f"{path} names code to run (auto_map), wanted a tokenizer of transformers")
    return folder, words


class Names:
    """The names that a model was trained on, and the words of its training captions, in lower case.

    The text encoder's mean output of a text must be near that of texts of the same meaning, as `lantern train text`
    trains it.
    """

    def __init__(self, text: TextEncoder, words: Collection[str], names: Sequence[str]) -> None:
        self.text, self.words, self.names = text, frozenset(words), tuple(names)
        self._nouns = frozenset(WORD.findall(name)[-1] for name in self.names)
        plurals = "|".join(map(re.escape, filter(PLURAL.search, self.names))) or "(?!)"
        self._pair = re.compile(rf"\b(?:an? +)?pair +of +(?=(?:[\w-]+ +)?(?:{plurals})(?![\w-]))", re.IGNORECASE)

    def reading(self, prompt: str) -> str:
        """Return a prompt whose unknown words are replaced by the name of the nearest meaning.

        Words stay if all are known, if one of them is the last one of a name (the prompt has a subject then), and if
        no name is near. "a pair of scissors" is one thing, and read as its name.
        """
        return self._pair.sub("", self._known(prompt))

    def _known(self, prompt: str) -> str:
        found = list(WORD.finditer(prompt.lower()))
        unknown = [word for word in found if len(word[0]) > SHORT and word[0] not in self.words]
        if not unknown or any(word[0] in self._nouns for word in found):
            return prompt
        cosines = (self._mean([" ".join(word[0] for word in unknown)]) @ self._means().T)[0]
        if cosines.max() < LEAST_COSINE:
            return prompt
        parts, end = [], 0
        for i, word in enumerate(unknown):
            parts += [prompt[end : word.start()], "" if i else self.names[int(cosines.argmax())]]
            end = word.end()
        return " ".join("".join([*parts, prompt[end:]]).split())

    def _means(self) -> Float[Tensor, "n c"]:
        means = _MEANS.get(self.text.model)
        if self.names not in means:
            means[self.names] = self._mean(self.names)
        return means[self.names]

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
