"""The emoji training set: plain pictures of every concept and style, and composites of them, with captions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

from lantern.training.data import ImagesConfig, Made, Record, Summary, share_of, write_prepared
from recipes.emoji import captions as texts
from recipes.emoji import compositing as drawing
from recipes.emoji.packages import Concept, archives, read_concepts, read_pictures, read_tags

# Share of combinations (a colour, a number or a neighbour of a thing) that is kept from training.
COMPOSITES_HELD_OUT = 0.04
STYLES = ("3d", "flat", "noto")


@dataclass(frozen=True)
class EmojiConfig(ImagesConfig):
    """What to prepare. Relative paths are resolved against the file that the config is loaded from.

    concepts: files with lists of concepts. styles: which art. reserved: the evaluation prompts whose words no caption
    may hold. held_out: share of cells (concept and style). mirrors: of plain pictures; shifts: number of shifted ones
    to add to each. colours, counts, pairs: number of composites of each kind. ValueError for another source, for values
    out of range, for unknown styles, and without concepts.
    """

    source: Literal["emoji"] = "emoji"
    concepts: tuple[Path, ...] = ()
    styles: tuple[str, ...] = STYLES
    reserved: Path | None = None
    shifts: int = 0
    colours: int = 0
    counts: int = 0
    pairs: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.seed, self.shifts, self.colours, self.counts, self.pairs) < 0:
            raise ValueError("seed, shifts, colours, counts and pairs must not be negative")
        if set(self.styles) - set(STYLES) or not self.styles:
            raise ValueError(f"styles are {list(self.styles)}, wanted some of {', '.join(STYLES)}")
        if not self.concepts:
            raise ValueError("concepts is empty, wanted at least one list such as concepts-core.txt")


@dataclass(frozen=True)
class Cell:
    """One concept in one style: its RGBA picture, its colour if it has a single one, its tags, its split."""

    concept: Concept
    style: str
    picture: UInt8[np.ndarray, "h w 4"]
    colouring: drawing.Colouring | None
    tags: tuple[str, ...]
    split: str

    @property
    def key(self) -> str:
        """Seed of all random choices for this cell."""
        return f"{self.concept.hexcode}/{self.style}"

    @property
    def colours(self) -> list[str]:
        """The colours that the picture can be given, in the cell's own order."""
        colouring, name = self.colouring, self.concept.name
        if colouring is None or not colouring.is_vivid or name == "orange":
            return []
        if self.concept.flags & {"scene", "text"}:
            return []
        order = {colour: share_of(f"{self.key}/{colour}") for colour in drawing.other_colours(colouring)}
        # Black hides what a thing looks like inside, so it comes late in the order.
        return sorted(order, key=lambda c: order[c] + 0.15 * (c == "black"))

    @property
    def may_mirror(self) -> bool:
        """Whether the mirror image is valid too."""
        return "text" not in self.concept.flags

    def record(self, kind: str, captions: texts.Captions, split: str, **more: Any) -> Record:
        """Return the record of a picture of this one thing."""
        names = (self.concept.name,)
        return Record(0, captions, kind, names, self.style, split, may_mirror=self.may_mirror, **more)


def prepare(config: EmojiConfig, *, out: Path, packages: Path) -> Summary:
    """Prepare the emoji training set into `out`, which is replaced as a whole once everything is written.

    Originals come first, then mirrors, shifts, colours, counts and pairs. packages: folder of npm archives; missing
    ones are fetched into it. Raises ValueError, in one line, for a wrong archive, or for a word that is both in a
    concept's name and in the evaluation prompts.
    """
    concepts = read_concepts(*config.concepts)
    reserved = texts.read_reserved(config.reserved) if config.reserved else frozenset()
    texts.check_reserved((n for c in concepts for n in (c.name, *c.synonyms)), reserved)
    cells, missing = read_cells(config, concepts, reserved, packages=packages)
    train = [cell for cell in cells if cell.split == "train"]
    jobs: Iterator[Callable[[], Made]] = chain(
        (partial(make_plain, cell) for cell in cells),
        (partial(make_plain, cell, "mirror") for cell in train if config.mirrors and cell.may_mirror),
        (partial(make_plain, cell, "shift", [config.seed, n]) for cell in train for n in range(config.shifts)),
        make_colours(train, config.colours),
        make_counts(train, config.counts),
        make_pairs(train, config.pairs, seed=config.seed),
    )

    def checked(job: Callable[[], Made]) -> Made:
        made = job()
        texts.check_reserved((text for text, _ in made[1].captions), reserved)
        return made

    return write_prepared(
        out,
        (partial(checked, job) for job in jobs),
        config,
        origin="emoji",
        total=len(cells) * (1 + config.mirrors + config.shifts) + config.colours + config.counts + config.pairs,
        skipped=missing,
        packages=[asdict(archives()[name]) for name in (*config.styles, "labels", "keywords")],
    )


def read_cells(
    config: EmojiConfig, concepts: list[Concept], reserved: frozenset[str], *, packages: Path
) -> tuple[list[Cell], list[str]]:
    """Return all cells, by concept and then style, and the names of those that no package has."""
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
        draws = {style: share_of(f"{concept.hexcode}/{style}") for style in styles}
        # a concept is held out in one style at most, and two must remain
        held = min(draws, key=draws.__getitem__) if len(styles) > 2 and min(draws.values()) < config.held_out else None
        taken = set(texts.words_of(" ".join((concept.name, *concept.synonyms))))
        # short tags that add a word and hold no reserved one
        new = [tag for tag in words.get(concept.hexcode, []) if not (taken | reserved) & set(texts.words_of(tag))]
        short = [tag for tag in new if len(tag.split()) <= 2][:8]
        for style in styles:
            picture = pictures[index, style]
            tags = sorted(short, key=lambda tag: share_of(f"{concept.hexcode}/{style}/{tag}"))[:3]
            split = "heldout" if style == held else "train"
            cells.append(Cell(concept, style, picture, drawing.find_colour(picture), tuple(tags), split))
    return cells, missing


def make_plain(cell: Cell, variant: str = "original", seeds: Sequence[int] = ()) -> Made:
    """Return the picture of the package on white, mirrored, or a little smaller and at another place (shift)."""
    colour = cell.colouring.name if cell.colouring else None
    captions = texts.plain_captions(cell.concept, cell.style, cell.tags, colour=colour)
    picture = drawing.on_white(cell.picture)
    if variant == "mirror":
        picture = picture[:, ::-1].copy()
    if variant == "shift":
        seed, number = seeds
        rng = np.random.default_rng([seed, int(share_of(cell.key) * 2**32), number])
        picture = drawing.shifted(cell.picture, rng)
    return picture, cell.record("plain", captions, cell.split, variant=variant)


def make_colours(cells: list[Cell], number: int) -> Iterator[Callable[[], Made]]:
    """Yield recoloured pictures: every cell that can be recoloured gets its first colour before any gets its second."""
    ranked = [(rank, share_of(cell.key), cell, colour) for cell in cells for rank, colour in enumerate(cell.colours)]
    for _, _, cell, colour in sorted(ranked, key=lambda entry: entry[:2])[:number]:
        yield partial(make_composite, cell, 1, colour)


def make_counts(cells: list[Cell], number: int) -> Iterator[Callable[[], Made]]:
    """Yield two, three or four of one thing; one in four recoloured if possible."""
    # a countable name and a picture of an object
    able = [cell for cell in cells if not cell.concept.flags & {"scene", "plural", "mass"}]
    able.sort(key=lambda cell: share_of(f"count/{cell.key}"))
    for step in range(number):
        cell = able[step % len(able)]
        repeat = step // len(able)
        draw = share_of(f"number/{cell.key}")
        many = 2 + (int(3 * draw) + repeat) % 3
        colours = cell.colours if share_of(f"tint/{cell.key}/{repeat}") < 0.25 else []
        colour = colours[repeat % len(colours)] if colours else None
        yield partial(make_composite, cell, many, colour)


def make_composite(cell: Cell, number: int, colour: str | None) -> Made:
    """Return `number` copies of the picture, recoloured unless `colour` is None; one in twenty-five is held out."""
    picture, style, name = cell.picture, cell.style, colour or ""
    if cell.colouring is not None and colour is not None:
        picture = drawing.recolour(picture, cell.colouring, colour)
    if number == 1:
        kind, shown = "colour", drawing.on_white(picture)
        recoloured = f"{name} {texts.base_name(cell.concept.name)}"
        captions = texts.weighted(texts.styled(recoloured, style, cell.concept))
    else:
        kind, shown = "count", drawing.copies(picture, number)
        captions = texts.count_captions(cell.concept, style, number, colour=colour)
    is_held = share_of(f"{kind}/{cell.key}/{number}/{colour}") < COMPOSITES_HELD_OUT
    return shown, cell.record(kind, captions, "heldout" if is_held else "train", colour=name, number=number)


def make_pairs(cells: list[Cell], number: int, *, seed: int) -> Iterator[Callable[[], Made]]:
    """Yield two different things of one style side by side; every thing is used once before any is used twice."""
    rng = np.random.default_rng(seed)
    styles = sorted({cell.style for cell in cells})
    waiting: dict[str, list[Cell]] = {style: [] for style in styles}
    for step in range(number):
        style = styles[step % len(styles)]
        if len(waiting[style]) < 2:
            able = [c for c in cells if c.style == style and not c.concept.flags & {"scene"}]
            waiting[style] = [able[i] for i in rng.permutation(len(able))]
        left, right = waiting[style].pop(), waiting[style].pop()
        yield partial(make_pair, left, right)


def make_pair(left: Cell, right: Cell) -> Made:
    """Return two things side by side; one pair in twenty-five is held out."""
    names = (left.concept.name, right.concept.name)
    is_held = share_of("/".join(("pair", *names))) < COMPOSITES_HELD_OUT
    captions, split = texts.pair_captions(left.concept, right.concept, left.style), "heldout" if is_held else "train"
    may_mirror = left.may_mirror and right.may_mirror
    record = Record(0, captions, "pair", names, left.style, split, may_mirror=may_mirror, number=2)
    return drawing.arrange([left.picture, right.picture], drawing.LAYOUTS[2]), record
