"""Cleaning of captions."""

import json
import sys
from pathlib import Path

import ftfy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lantern.models.llamagen.text import _repaired, clean_caption, without_markup

TABLE = json.loads((Path(__file__).parents[1] / "data" / "captions_clean.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("caption", "cleaned"), TABLE, ids=range(len(TABLE)))
def test_cleaning_agrees_with_the_reference(caption: str, cleaned: str) -> None:
    assert clean_caption(caption) == cleaned


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(), max_size=60))
def test_any_text_is_cleaned_to_a_stripped_text(text: str) -> None:
    cleaned = clean_caption(text)
    assert cleaned == cleaned.strip()


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60))
def test_printable_ascii_needs_no_repair(text: str) -> None:
    assert _repaired(text) == ftfy.fix_text(text)


def test_plain_ascii_is_cleaned_without_ftfy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    assert clean_caption("A red apple, on a table!") == "a red apple, on a table!"
    with pytest.raises(ImportError, match="ftfy"):
        clean_caption("a café")


@pytest.mark.parametrize(
    "unit", ["a", "a.", "-", "<", '"', "\ud800\x00x", "&", " ", "1", "1.", "<![", "%ff", "猫", "x.png"]
)
def test_ten_thousand_characters_are_cleaned(unit: str) -> None:
    assert len(clean_caption(unit * (10_000 // len(unit)))) <= 20_000


def test_markup_leaves_its_text() -> None:
    assert without_markup("a <b>red</b> &lt;cat<!-- x --><script>y</script>&xb;") == "a red <cat&xb"
    assert "cat" in without_markup("cat <![x dog")
