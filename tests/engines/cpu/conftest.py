"""The C++ engine is built by g++, without which its tests are skipped."""

import shutil

import pytest


@pytest.fixture(scope="session", autouse=True)
def _compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++, with which the C++ library is built")
