"""Time of verification."""

from lantern.drafters.trees.static import named
from studies.verification import measure, verifiers


def test_every_verifier_is_measured_with_equal_verdicts() -> None:
    rows = measure(named("0 1 0.0 0.1 0.0.0"), 256, 1)
    assert [row["verifier"] for row in rows] == list(verifiers(256))
    assert all(1 <= row["codes"] <= 4 and row["all"] > 0 and row["lazy"] > 0 for row in rows)
