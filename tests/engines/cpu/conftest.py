"""What tests of the C++ engine share. It is built by g++, without which they are skipped."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import cache

import pytest

from lantern.engines.cpu.build import FLAGS, SOURCES


@pytest.fixture(scope="session", autouse=True)
def _compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++, with which the C++ library is built")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ctypes.CDLL]:
    """Return a function that compiles a program which includes headers of the engine, and loads it.

    `level` is that of optimization: no level changes bits, and without it a program that includes all is built soon.
    """

    @cache
    def load(program: str, level: str = FLAGS[0]) -> ctypes.CDLL:
        folder = tmp_path_factory.mktemp("compiled")
        source, made = folder / "program.cpp", folder / "program.so"
        source.write_text(program, encoding="utf-8")
        flags = [level, *FLAGS[1:], "-march=native", f"-I{SOURCES[0].parent}"]
        subprocess.run(["g++", *flags, "-o", made, source], check=True)
        return ctypes.CDLL(str(made))

    return load
