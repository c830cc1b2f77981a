"""Building, checking and loading the C++ library, and the memory of packed weights."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lantern.engines.cpu import build as building
from lantern.engines.cpu.engine import CpuEngine
from lantern.engines.cpu.target import Arena
from tests.refusals import refused
from tests.tiny import tiny_target, wide_target

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not PAGES.is_file() or "[never]" in PAGES.read_text(), reason="huge pages are not to be had on this machine"
)
def test_weights_are_in_huge_pages() -> None:
    memory = Arena(16 << 20).memory.fill_(1)
    regions = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    spans = [tuple(int(end, 16) for end in region.split(" ", 1)[0].split("-")) for region in regions]
    (found,) = (region for region, (low, high) in zip(regions, spans, strict=True) if low <= memory.data_ptr() < high)
    assert int(re.findall(r"^AnonHugePages: +(\d+) kB$", found, re.MULTILINE)[0]) > 0


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of libraries of a user who has built none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(building.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(building, "PACKAGED", tmp_path / "packaged")
    building.library.cache_clear()
    yield tmp_path / "cache" / "lantern" / "cpu"
    building.library.cache_clear()


def copied(library: Path, folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True)
    for part in (library, building.record_of(library)):
        shutil.copy2(part, folder / part.name)
    return folder / library.name


@pytest.fixture(params=["cached", "packaged"])
def library(fresh: Path, original: Path, request: pytest.FixtureRequest) -> Path:
    """A library of this version in the cache or with the package, copied from where the tests have built it."""
    return copied(original, fresh if request.param == "cached" else building.PACKAGED)


@pytest.fixture(scope="module", autouse=True)  # before a test changes where libraries are
def original() -> Path:
    building.library.cache_clear()
    building.library()
    return building.candidates()[0]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


@pytest.mark.usefixtures("no_compiler")
def test_a_library_needs_no_compiler_and_is_loaded_before_steps_are_timed(library: Path, fresh: Path) -> None:
    assert building.missing() is None
    CpuEngine().prepare(wide_target())
    assert building.library.cache_info().currsize == 1 and building.library().lantern_pass
    assert fresh.exists() == (library.parent == fresh)


def test_a_cache_that_cannot_be_read_has_no_library(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + 300 * "a")  # as that of another user, too long for a name
    assert building.candidates() == [] and fresh not in building.folders()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_folder_for_temporary_files_the_cache_is_used(
    library: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(building.tempfile, "gettempdir", tmp_path.joinpath("none").stat)
    assert building.folders() == [fresh] and building.missing() is None
    show = ["sh", "-c", 'echo "error: $TMPDIR" >&2; exit 1']
    monkeypatch.setenv("PATH", os.defpath)
    refused(building.run, show, fresh, error=building.CompilerError, match=f"error: {fresh}$")


def spoil_bytes(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def replace_by_text(path: Path) -> None:
    path.write_bytes(b"?")
    digest = hashlib.sha256(b"?").hexdigest()
    building.record_of(path).write_text(json.dumps({"sha256": digest}), encoding="utf-8")


FAULTS: dict[str, Callable[[Path], object]] = {
    "cannot be loaded": replace_by_text,  # as what another system's C library was linked with
    "checksum is wrong": spoil_bytes,
    "record is damaged": lambda path: building.record_of(path).write_text("{", encoding="utf-8"),
    "cannot be read": lambda path: building.record_of(path).unlink(),
    "writable by others": lambda path: path.chmod(0o666),
    "is a link": lambda path: path.symlink_to(path.rename(path.with_suffix(".other"))),
}


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_not_told_to_install_a_compiler(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    told = f"the cpu engine is for Linux, this is {system}: use --engine eager"
    assert refused(building.find_compiler) == told
    assert building.compile_all(tmp_path, [building.GENERIC]) == ([], [told])


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("fault", FAULTS)
def test_an_untrusted_library_is_never_loaded(fault: str, library: Path, caplog: pytest.LogCaptureFixture) -> None:
    FAULTS[fault](library)
    assert fault in str(building.missing())
    refused(building.library, match="which was not found: install it")
    assert fault in caplog.text


@pytest.mark.usefixtures("no_compiler")
def test_a_library_belongs_to_the_user_or_to_who_installed_the_package(
    library: Path, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # installed by root, run by a user
    monkeypatch.setattr(building, "folders", lambda: [library.parent])
    assert ("belongs to another user" if library.parent == fresh else "None") in str(building.missing())


@pytest.mark.parametrize("is_mended", [True, False])
def test_a_damaged_library_is_built_again_once_and_refused_if_it_stays_damaged(
    is_mended: bool, fresh: Path, original: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cached, builds = copied(original, fresh), list[str]()
    spoil_bytes(cached)

    def build(compiler: str) -> Path:
        builds.append(compiler)
        return Path(shutil.copy2(original, cached)) if is_mended else cached

    monkeypatch.setattr(building, "_build", build)
    if is_mended:
        building.library()
    else:
        refused(building.library, match="checksum is wrong right after it was built: use --engine eager")
    assert len(builds) == 1 and "building it again" in caplog.text


def written(command: list[str], folder: Path) -> None:
    """Stand for a compiler that knows no wide vectors."""
    if "-mavx512f" in command:
        raise building.CompilerError("unrecognized option")
    Path(command[command.index("-o") + 1]).write_bytes(b"made")


@pytest.mark.parametrize("fault", ["none", "not private", "noexec"])
def test_a_build_writes_to_a_private_folder(fault: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.mkdir(parents=True, mode=0o700)
    if fault == "not private":
        fresh.chmod(0o777)
    flags = {fresh: os.ST_NOEXEC if fault == "noexec" else 0}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flags.get(path, 0)))
    monkeypatch.setattr(building, "features", lambda: building.V3.features)
    monkeypatch.setattr(building, "run", written)
    path = building._build("g++")
    building.check_trust(path)
    assert path.parent == building.folders()[fault != "none"] and path.read_bytes() == b"made"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert {*path.parent.iterdir()} == {path, building.record_of(path)}


def test_an_old_compiler_builds_for_an_older_processor(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "features", lambda: building.V4.features)
    monkeypatch.setattr(building, "run", written)
    path = building._build("g++")
    assert path.name == building.library_name(building.V3) and building.candidates() == [path]


@pytest.mark.parametrize(
    ("features", "name"),
    [
        (building.AMX.features | {"other"}, "amx"),
        (building.V4_BF16.features, "v4-bf16"),
        (building.V4_BF16.features - {"avx512_bf16"}, "v4"),
        (building.V3.features, "v3"),
        (building.V3.features - {"fma"}, "generic"),
        (frozenset({"asimd"}), "generic"),
    ],
)
def test_the_best_library_that_the_processor_runs_is_chosen(
    features: frozenset[str], name: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "features", lambda: features)
    assert building.supported()[0].name == name
    if name == "generic" and building.of_machine() == building.X86_64:
        why = refused(building.check_processor, match="AVX2 and FMA, which this processor lacks: use --engine eager")
        monkeypatch.setattr("lantern.engines.cpu.engine.check_widths", lambda config: None)
        assert CpuEngine().why_not(tiny_target()) == why
    else:
        building.check_processor()
    fresh.mkdir(parents=True)
    for variant in building.supported():
        (fresh / building.library_name(variant)).touch()
    assert building.candidates()[0].name == building.library_name()
    assert all(variant.features <= features for variant in building.supported())


def test_the_first_error_of_a_compiler_that_fails_is_reported(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, "-no-such-flag"))
    refused(building.library, match="could not build the cpu engine .*no-such-flag.*use --engine eager")
    assert not list(fresh.iterdir())


HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# v4 differs from v3 in the width of its registers; without vectors the other files take minutes
FILES = {
    **{"v4-bf16": ("test_portable.py",), "v4": ("test_portable.py",)},
    **{"v3": ("test_target.py", "test_linear.py", "test_portable.py"), "generic": ("test_sampling.py",)},
}
# of torch's operations
CAPABILITIES = {"v3": "avx2", "generic": "default"}
# a process whose processor seems to have only the features named first
PROGRAM = """
import sys
import pytest
from lantern.engines.cpu import build
features = frozenset(sys.argv[1].split())
build.features = lambda: features
from lantern.engines.cpu.build import library
assert sys.argv[2] in library()._name, library()._name
options = ["-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", "not slow"]
sys.exit(pytest.main([*options, *sys.argv[3:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", [one for one in building.supported()[1:] if one.name in FILES], ids=lambda variant: variant.name
)
def test_libraries_for_older_processors_pass_these_tests(variant: building.ProcessorKind, tmp_path: Path) -> None:
    files = [str(HERE / name) for name in FILES[variant.name]]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    if variant.name in CAPABILITIES:
        environment["ATEN_CPU_CAPABILITY"] = CAPABILITIES[variant.name]
    command = [sys.executable, "-c", PROGRAM, " ".join(sorted(variant.features)), f"cpu-{variant.name}-", *files]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
