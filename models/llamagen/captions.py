"""Cleaning of captions as LlamaGen's text-conditional models were trained with it.

The rules come from the captions of web images: addresses, file names, article numbers and shop phrases do not
describe the picture. `clean_caption` applies the whole set twice, like LlamaGen.
"""

import html
import re
from html.entities import html5
from html.parser import HTMLParser
from urllib.parse import unquote_plus

_DOMAIN = r"[.](?:com|co|ru|net|org|edu|gov|it)"
_HOST = rf"[a-zA-Z0-9.\-]+{_DOMAIN}[\w/-]*\b/?(?!@)"
_FILE_TYPE = r"(?:png|jpe?g|bmp|webp|eps|pdf|apk|mp4)"
_DASHES = (
    "\\-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0"
    "\ufe31\ufe32\ufe58\ufe63\uff0d"
)

_Rules = tuple[tuple[re.Pattern[str], str], ...]


def _rules(*pairs: tuple[str, str]) -> _Rules:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


HAS_ADDRESS = re.compile(rf"https?:|www:|{_DOMAIN}")
ADDRESSES = _rules(
    (rf"\b(?:https?:(?:/{{1,3}}|[a-zA-Z0-9%])|{_HOST})", ""),
    (rf"\b(?:www:(?:/{{1,3}}|[a-zA-Z0-9%])|{_HOST})", ""),
)
SYMBOLS = _rules(
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
SHOP_PHRASES = _rules(
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
ENDS = _rules(
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


def _apply(rules: _Rules, text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _clean_once(text: str) -> str:
    import ftfy

    text = unquote_plus(text).strip().lower().replace("<person>", "person")
    # Addresses hold no spaces; looking only into words that could be one keeps long garbage cheap.
    text = re.sub(r"\S+", lambda word: _apply(ADDRESSES, word[0]) if HAS_ADDRESS.search(word[0]) else word[0], text)
    text = without_markup(text)
    text = _apply(SYMBOLS, text)
    # More than three hyphens or underscores are a file name's spaces.
    if len(JOINERS.findall(text)) > 3:
        text = JOINERS.sub(" ", text)
    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return _apply(ENDS, _apply(SHOP_PHRASES, text)).strip()


def clean_caption(text: str) -> str:
    """Return the caption as input of LlamaGen's text encoder: lower case, cleaned twice.

    May return the empty string. Deletes Chinese characters, sizes such as `100x200`, and words such as `jpg`.
    """
    return _clean_once(_clean_once(text))
