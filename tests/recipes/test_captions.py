"""Captions of emoji: plurals, articles, synonyms, and words that are kept back."""

import pytest

from recipes.emoji.captions import (
    article,
    base_name,
    check_reserved,
    count_captions,
    pair_captions,
    plain_captions,
    plural,
)
from recipes.emoji.packages import Concept


def test_a_reserved_word_in_a_name_is_an_error() -> None:
    check_reserved(["red apple"], frozenset({"kitty"}))
    with pytest.raises(ValueError, match="'kitty toy' holds \\['kitty'\\]"):
        check_reserved(["kitty toy"], frozenset({"kitty"}))


def test_plurals() -> None:
    many = {"red apple": "red apples", "cup of coffee": "cups of coffee", "face with mask": "faces with mask"}
    many |= {"mouse": "mice", "computer mouse": "computer mice", "sheep": "sheep", "cherry": "cherries", "key": "keys"}
    many |= {"fox": "foxes", "knife": "knives", "snowman": "snowmen"}
    assert {one: plural(one) for one in many} == many


def test_articles_depend_on_the_sound() -> None:
    names = ("apple", "unicorn", "hourglass", "urn", "house", "umbrella")
    assert [article(n).split()[0] for n in names] == ["an", "a", "an", "an", "a", "an"]


def test_captions_are_phrases_that_a_person_types() -> None:
    apple, cat = Concept("1", "red apple", ("apple",)), Concept("2", "cat")
    plain = dict(plain_captions(apple, "3d", ("fruit",), colour="red"))
    assert {"red apple", "a red apple", "3d red apple", "an apple", "a 3d style red apple"} <= set(plain)
    assert sum(plain.values()) == pytest.approx(1, abs=0.01)
    assert "two red apples" in dict(count_captions(apple, "flat", 2, colour=None))
    assert "three flat blue apples" in dict(count_captions(apple, "flat", 3, colour="blue"))
    assert "a red apple and a cat" in dict(pair_captions(apple, cat, "noto"))
    assert base_name("red apple") == "apple" and base_name("orange") == "orange"


def test_a_marked_synonym_changes_its_article() -> None:
    coffee = Concept("1", "cup of coffee", ("~coffee",))
    assert {"coffee", "3d coffee"} <= (captions := set(dict(plain_captions(coffee, "3d", (), colour=None))))
    assert "a coffee" not in captions
