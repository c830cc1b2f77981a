"""The engine `graph` for GPUs, and how many rows its passes have: by the size of the batch, not by the tree."""

ROWS = 32  # rows per line of a small batch: default trees but those of some -paper presets have at most 30 nodes
RIDGE = 320  # rows of a pass of an H100 up to which it is expected to take as long as to read the weights


def rows_of(lines: int, live: int) -> int:
    """Return the rows per line of a pass over `live` nodes: those of plain decoding, doubled until they hold the nodes.

    A line is a guidance row of an image.
    """
    rows = constant_rows(lines)
    while rows < live:
        rows *= 2
    return rows


def constant_rows(lines: int) -> int:
    """Return the rows per line of plain decoding, and of trees that fit into them.

    ROWS are halved until a pass of all lines has at most RIDGE rows.
    """
    rows = ROWS
    while rows > 1 and lines * rows > RIDGE:
        rows //= 2
    return rows
