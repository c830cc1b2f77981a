"""The tests of the C++ engine with the libraries for older processors, which this one runs as well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lantern.engines.cpu import compiler

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# v4 differs from v3 in the width of its registers; without vectors the other files take minutes
FILES = {"v3": ("test_target.py", "test_linear.py"), "generic": ("test_sampling.py",)}
# a process whose processor seems to have only the features named first
PROGRAM = """
import sys
import pytest
from lantern.engines.cpu import compiler
features = frozenset(sys.argv[1].split())
compiler.features = lambda: features
from lantern.engines.cpu.build import library
assert sys.argv[2] in library()._name, library()._name
options = ["-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", "not slow"]
sys.exit(pytest.main([*options, *sys.argv[3:]]))
"""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "variant", [one for one in compiler.supported()[1:] if one.name in FILES], ids=lambda variant: variant.name
)
def test_libraries_for_older_processors_pass_these_tests(variant: compiler.ProcessorKind, tmp_path: Path) -> None:
    given = [
        " ".join(sorted(variant.features)),
        f"cpu-{variant.name}-",
        *(str(HERE / name) for name in FILES[variant.name]),
    ]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM, *given]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
