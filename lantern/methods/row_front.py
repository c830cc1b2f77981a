"""Methods with a loop of their own: ZipAR, PJD (`lantern.decoding.row_front`), and row-cache (`decoding.row_cache`)."""

from lantern.methods.spec import MethodSpec, Setting

LOOP = "lantern.decoding.row_front:generate"
MEASURED = Setting(
    "measured", True, "measure the total variation in passes over the finished image; else it is NaN", old_name="priced"
)
METHODS = (
    MethodSpec(
        "zipar",
        "relaxed: no drafter: a row begins when the row above has `lead` codes; all rows add a code per pass (ZipAR)",
        "windows",
        loop=LOOP,
        settings=(
            Setting("lead", 4, "codes of the row above before a row begins; a whole row is exact", low=1, sweep=(8, 4)),
            MEASURED,
        ),
        paper="2412.04062",
    ),
    MethodSpec(
        "pjd",
        "relaxed: PJD (reconstructed): as zipar, and each row also drafts by Jacobi iteration of its own samples",
        "windows",
        loop=LOOP,
        settings=(
            Setting(
                "lead", 6, "codes of the row above before a row begins; a whole row is exact", low=1, sweep=(12, 6)
            ),
            Setting("drafts", 3, "codes behind the last one that each row drafts", low=0),
            MEASURED,
        ),
        paper="2606.05703",
    ),
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
