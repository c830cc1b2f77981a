import xml.etree.ElementTree as ET

from lantern.generation.demo import MARK, SHADES, draw_map


def test_every_token_is_shaded_by_its_run() -> None:
    root = ET.fromstring(draw_map((1, 2, 4, 1, 8), [1], 4, "data:,", title='a "cat" & more'))
    paths = {path.get("fill"): path.get("d", "") for path in root.iter("path")}
    assert set(paths) == {shade.colour for shade in SHADES[1:]}
    assert paths[SHADES[1].colour] == "M10 0h10v10h-10zM20 0h10v10h-10z"
    # a run over the end of a row
    assert paths[SHADES[2].colour].startswith("M30 0h10v10h-10zM0 10h10")
    assert paths[SHADES[3].colour].count("M") == 8
    assert [(dot.get("cx"), dot.get("cy")) for dot in root.iter("circle")] == [("15", "5")]
    assert root.find("title") is not None and root.find("g").get("fill") == MARK  # type: ignore[union-attr]


def test_shades_are_those_of_their_legend() -> None:
    for run, shade in ((2, 1), (3, 1), (4, 2), (7, 2), (8, 3), (64, 3)):
        (path,) = ET.fromstring(draw_map([run], [], 64, "data:,", title="a")).iter("path")
        assert path.get("fill") == SHADES[shade].colour
    assert not list(ET.fromstring(draw_map([1] * 4, [], 2, "data:,", title="a")).iter("path"))
