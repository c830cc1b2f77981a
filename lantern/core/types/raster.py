"""The raster of a picture: its grid of codes, and how a target's vocabulary holds it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Raster:
    """A grid of codes in reading order, as decoding sees it, and what surrounds it in the target's token sequence.

    `newline` is the token that follows each row of codes but the last, or None. The decoding loop counts codes only;
    the target passes newlines itself, and the cache has slots for them. What follows the grid is not generated.
    """

    rows: int
    columns: int
    newline: int | None = None

    @property
    def codes(self) -> int:
        """Number of codes of a picture."""
        return self.rows * self.columns

    @property
    def newlines(self) -> int:
        """Number of newlines that the target reads."""
        return 0 if self.newline is None else self.rows - 1
