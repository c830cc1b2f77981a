"""Pictures that are made of others: recoloured, and several on one ground."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.emoji.compositing import copies, find_colour, recolour, to_hsv, to_rgb
from tests.training.drawings import disc


def test_recolouring_changes_the_object_and_not_white() -> None:
    picture = disc((220, 30, 30))
    colouring = find_colour(picture)
    assert colouring is not None and colouring.name == "red" and colouring.is_vivid
    for colour in ("green", "blue", "yellow", "purple"):
        turned = find_colour(recolour(picture, colouring, colour))
        assert turned is not None and turned.name == colour
    half = picture.copy()
    half[:32, :, :3] = 255
    kept = recolour(half, colouring, "blue")
    assert (kept[:32] == half[:32]).all()


@given(st.lists(st.tuples(*[st.integers(0, 255)] * 3), min_size=1, max_size=20))
def test_hsv_and_back_is_the_identity(colours: list[tuple[int, int, int]]) -> None:
    picture = np.array([colours], np.uint8)
    assert np.abs(to_rgb(to_hsv(picture)).astype(int) - picture.astype(int)).max() <= 1


@pytest.mark.parametrize("number", [2, 3, 4])
def test_copies_show_as_many_separate_objects(number: int) -> None:
    ink = (copies(disc((0, 0, 200)), number).sum(-1) < 600).astype(int)
    regions, left = 0, ink.copy()
    while left.any():
        regions += 1
        stack = [tuple(np.argwhere(left)[0])]
        while stack:
            y, x = stack.pop()
            if 0 <= y < 64 and 0 <= x < 64 and left[y, x]:
                left[y, x] = 0
                stack += [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
    assert regions == number
