"""Plain decoding with a cache of few rows as a method. The loop is `lantern.decoding.row_cache`."""

from lantern.methods.row_front import MEASURED
from lantern.methods.spec import MethodSpec, Setting

METHODS = (
    MethodSpec(
        "row-cache",
        "relaxed: plain decoding that sees the first and the latest rows only, for large batches (after LineAR)",
        "plain",
        loop="lantern.decoding.row_cache:generate",
        settings=(
            Setting("first_rows", 2, "rows of codes at the top that all codes see", low=0),
            Setting("last_rows", 6, "rows of codes before a code that it sees", low=1, sweep=(10, 6, 4)),
            MEASURED,
        ),
        paper="2512.04857",
    ),
)
