"""ZipAR and PJD as methods. The loop is `lantern.decoding.row_front`."""

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
)
