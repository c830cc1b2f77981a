"""Tokens and statistics of every method, compared with those recorded on a machine of the same kind."""

import shutil
from typing import Any

import pytest

from tests.golden.record import COMMAND, FILE, NAMES, Case, cases, decode, key, read

RECORDS = read()


def assert_same(found: Any, wanted: Any, where: str) -> None:
    """Checks floats to a relative tolerance of 1e-4, besides their rounding, and everything else exactly."""
    if isinstance(wanted, dict):
        assert isinstance(found, dict) and found.keys() == wanted.keys(), where
        for name in wanted:
            assert_same(found[name], wanted[name], f"{where}: {name}")
    elif isinstance(wanted, list):
        assert isinstance(found, list) and len(found) == len(wanted), where
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6), f"{where}: {found}, wanted {wanted}"
    else:
        assert found == wanted, f"{where}: {found}, wanted {wanted}"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case.is_slow else [], id=str(case)) for case in cases()]
)
def test_tokens_and_statistics_are_those_recorded(case: Case) -> None:
    if key() not in RECORDS:
        pytest.skip(f'{FILE.name} has no records for "{key()}": run {COMMAND} at a commit that is known to be right')
    if case.engine != "eager" and shutil.which("g++") is None:
        pytest.skip("needs g++")
    if str(case) not in RECORDS[key()]:
        pytest.skip(f'{FILE.name} has no record of {case} for "{key()}": run {COMMAND} {case}')
    assert_same(decode(*case), RECORDS[key()][str(case)], str(case))


def test_every_method_is_a_case_and_every_case_has_a_record_of_some_machine() -> None:
    assert {case.method for case in cases() if case.engine == "eager"} == set(NAMES)
    missing = {str(case) for case in cases()} - set().union(*RECORDS.values())
    assert not missing, f"no record of {', '.join(sorted(missing))}: run {COMMAND}"
