"""The emoji training set: plain pictures of every concept and style, and composites of them, with captions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from lantern.training.captions import (
    check_reserved,
    colour_captions,
    count_captions,
    pair_captions,
    plain_captions,
    read_reserved,
    words_of,
)
from lantern.training.compositing import (
    LAYOUTS,
    Colouring,
    arrange,
    copies,
    find_colour,
    on_white,
    other_colours,
    recolour,
    shifted,
)
from lantern.training.data import DataConfig, Record, Writer, share_of
from lantern.training.emoji import (
    PACKAGES,
    Concept,
    read_concepts,
    read_pictures,
    read_tags,
)

# Share of combinations (a colour, a number or a neighbour of a thing) that is kept from training.
COMPOSITES_HELD_OUT = 0.04
Drawn = tuple[UInt8[np.ndarray, "h w 3"], Record]


@dataclass(frozen=True)
class Cell:
    """One concept in one style: its RGBA picture, its one colour if it has one, its words, its split."""

    concept: Concept
    style: str
    picture: UInt8[np.ndarray, "h w 4"]
    colouring: Colouring | None
    tags: tuple[str, ...]
    split: str

    @property
    def key(self) -> str:
        """What everything drawn by lot for this cell is seeded with."""
        return f"{self.concept.hexcode}/{self.style}"

    @property
    def colours(self) -> list[str]:
        """The colours that the picture can be given, in an order of its own."""
        colouring, name = self.colouring, self.concept.name
        if colouring is None or not colouring.is_vivid or name == "orange":
            return []
        if self.concept.flags & {"scene", "text"}:
            return []
        order = {colour: share_of(f"{self.key}/{colour}") for colour in other_colours(colouring)}
        # Black hides what a thing looks like inside, so it comes late in the order.
        return sorted(order, key=lambda c: order[c] + 0.15 * (c == "black"))

    @property
    def can_repeat(self) -> bool:
        """Whether copies of it make sense: a name that counts, and a picture that is an object."""
        return not self.concept.flags & {"scene", "plural", "mass"}

    @property
    def may_mirror(self) -> bool:
        """Whether the mirror image is as good a picture."""
        return "text" not in self.concept.flags


def write_emoji(
    config: DataConfig, writer: Writer, *, packages: Path, progress: Callable[[int, int], None]
) -> tuple[list[str], list[dict[str, str]]]:
    """Write all pictures: originals first, then mirrors, shifts, colours, counts and pairs.

    Returns the cells that no package has and the packages used. Raises ValueError for a word that is both in a
    concept's name and in the evaluation prompts.
    """
    concepts = [c for path in config.concepts for c in read_concepts(Path(path))]
    check_unique(concepts)
    reserved = read_reserved(Path(config.reserved)) if config.reserved else frozenset()
    check_reserved((n for c in concepts for n in (c.name, *c.synonyms)), reserved)
    cells, missing = read_cells(config, concepts, reserved, packages=packages)
    train = [cell for cell in cells if cell.split == "train"]
    total = len(cells) * (1 + config.mirrors + config.shifts)
    total += config.colours + config.counts + config.pairs
    drawn = chain(
        map(draw_plain, cells),
        (draw_mirror(cell) for cell in train if config.mirrors and cell.may_mirror),
        (draw_shift(cell, n, config.seed) for cell in train for n in range(config.shifts)),
        draw_colours(train, config.colours),
        draw_counts(train, config.counts),
        draw_pairs(train, config.pairs, seed=config.seed),
    )
    for picture, record in drawn:
        check_reserved((text for text, _ in record.captions), reserved)
        writer.add(picture, record)
        progress(len(writer.records), total)
    names = (*config.styles, "labels", "keywords")
    used = [
        {"name": p.name, "version": p.version, "sha256": p.sha256, "licence": p.licence}
        for p in (PACKAGES[name] for name in names)
    ]
    return missing, used


def check_unique(concepts: list[Concept]) -> None:
    """Raise ValueError when two lists hold the same thing."""
    seen: set[str] = set()
    for concept in concepts:
        if seen & {concept.name, concept.hexcode}:
            raise ValueError(f"{concept.hexcode} {concept.name!r} is in two lists: remove it from one")
        seen |= {concept.name, concept.hexcode}


def read_cells(
    config: DataConfig, concepts: list[Concept], reserved: frozenset[str], *, packages: Path
) -> tuple[list[Cell], list[str]]:
    """All cells, by concept and then style, and the names of those that no package has."""
    words = read_tags(packages)
    pictures = {
        (index, style): picture
        for style in config.styles
        for index, picture in read_pictures(style, concepts, packages, size=config.size)
    }
    cells, missing = [], []
    for index, concept in enumerate(concepts):
        styles = [style for style in config.styles if (index, style) in pictures]
        missing += [f"{concept.name} ({s})" for s in config.styles if s not in styles]
        held = held_out_style(concept, styles, config.held_out)
        for style in styles:
            picture = pictures[index, style]
            tags = usable_tags(concept, style, words.get(concept.hexcode, []), reserved)
            split = "heldout" if style == held else "train"
            cells.append(Cell(concept, style, picture, find_colour(picture), tags, split))
    return cells, missing


def held_out_style(concept: Concept, styles: list[str], share: float) -> str | None:
    """The style in which the concept is kept from training, if any: at most one, and two must remain."""
    if len(styles) < 3:
        return None
    drawn = [style for style in styles if share_of(f"{concept.hexcode}/{style}") < share]
    return min(drawn, key=lambda style: share_of(f"{concept.hexcode}/{style}"), default=None)


def usable_tags(concept: Concept, style: str, tags: list[str], reserved: frozenset[str]) -> tuple[str, ...]:
    """Up to three of the first eight short tags that add a word and hold no reserved one; other ones in each style."""
    taken = set(words_of(" ".join((concept.name, *concept.synonyms))))
    new = [t for t in tags if not taken & set(words_of(t)) and not reserved & set(words_of(t))]
    short = [tag for tag in new if len(tag.split()) <= 2][:8]
    return tuple(sorted(short, key=lambda tag: share_of(f"{concept.hexcode}/{style}/{tag}"))[:3])


def draw_plain(cell: Cell) -> Drawn:
    """The picture as the package has it, on white."""
    colour = cell.colouring.name if cell.colouring else None
    captions = plain_captions(cell.concept, cell.style, cell.tags, colour=colour)
    record = Record(
        image=0,
        captions=captions,
        kind="plain",
        concepts=(cell.concept.name,),
        style=cell.style,
        split=cell.split,
        may_mirror=cell.may_mirror,
    )
    return on_white(cell.picture), record


def draw_mirror(cell: Cell) -> Drawn:
    """The mirror image of a plain picture."""
    picture, record = draw_plain(cell)
    return picture[:, ::-1].copy(), replace(record, variant="mirror")


def draw_shift(cell: Cell, number: int, seed: int) -> Drawn:
    """The picture a little smaller, somewhere else."""
    rng = np.random.default_rng([seed, int(share_of(cell.key) * 2**32), number])
    return shifted(cell.picture, rng), replace(draw_plain(cell)[1], variant="shift")


def draw_colours(cells: list[Cell], number: int) -> Iterator[Drawn]:
    """Recoloured pictures: every cell that can be turned gets its first colour before any gets its second."""
    turns = [(rank, share_of(cell.key), cell, colour) for cell in cells for rank, colour in enumerate(cell.colours)]
    for _, _, cell, colour in sorted(turns, key=lambda turn: turn[:2])[:number]:
        assert cell.colouring is not None
        picture = on_white(recolour(cell.picture, cell.colouring, colour))
        captions = colour_captions(cell.concept, cell.style, colour)
        yield picture, composite(cell, captions, number=1, colour=colour)


def draw_counts(cells: list[Cell], number: int) -> Iterator[Drawn]:
    """Two, three or four of one thing; one in four recoloured where it can be."""
    able = sorted((c for c in cells if c.can_repeat), key=lambda c: share_of(f"count/{c.key}"))
    for turn in range(number):
        cell = able[turn % len(able)]
        repeat = turn // len(able)
        draw = share_of(f"number/{cell.key}")
        many = 2 + (int(3 * draw) + repeat) % 3
        colours = cell.colours if share_of(f"tint/{cell.key}/{repeat}") < 0.25 else []
        colour = colours[repeat % len(colours)] if colours else None
        picture = cell.picture
        if colour is not None and cell.colouring is not None:
            picture = recolour(picture, cell.colouring, colour)
        captions = count_captions(cell.concept, cell.style, many, colour=colour)
        yield copies(picture, many), composite(cell, captions, number=many, colour=colour)


def draw_pairs(cells: list[Cell], number: int, *, seed: int) -> Iterator[Drawn]:
    """Two different things of one style side by side; every thing gets its turn before any gets another."""
    rng = np.random.default_rng(seed)
    styles = sorted({cell.style for cell in cells})
    waiting: dict[str, list[Cell]] = {style: [] for style in styles}
    for turn in range(number):
        style = styles[turn % len(styles)]
        if len(waiting[style]) < 2:
            able = [c for c in cells if c.style == style and not c.concept.flags & {"scene"}]
            waiting[style] = [able[i] for i in rng.permutation(len(able))]
        left, right = waiting[style].pop(), waiting[style].pop()
        picture = arrange([left.picture, right.picture], list(LAYOUTS[2]))
        captions = pair_captions(left.concept, right.concept, style)
        names = (left.concept.name, right.concept.name)
        is_held = share_of("/".join(("pair", *names))) < COMPOSITES_HELD_OUT
        yield (
            picture,
            Record(
                image=0,
                captions=captions,
                kind="pair",
                concepts=names,
                style=style,
                split="heldout" if is_held else "train",
                may_mirror=left.may_mirror and right.may_mirror,
                number=2,
            ),
        )


def composite(cell: Cell, captions: tuple[tuple[str, float], ...], *, number: int, colour: str | None) -> Record:
    """The record of a composite of one cell; one in twenty-five is held out."""
    kind = "count" if number > 1 else "colour"
    key = f"{kind}/{cell.key}/{number}/{colour}"
    return Record(
        image=0,
        captions=captions,
        kind=kind,
        concepts=(cell.concept.name,),
        style=cell.style,
        split="heldout" if share_of(key) < COMPOSITES_HELD_OUT else "train",
        may_mirror=cell.may_mirror,
        colour=colour or "",
        number=number,
    )
