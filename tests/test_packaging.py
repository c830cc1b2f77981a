"""Contents of the wheel and the sdist, and the installed package used outside of the checkout."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lantern.engines.cpu import build as compiling

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = {"profile.json", "results", "__pycache__"}  # measurements of the machine that builds, and caches
LIBRARIES = "lantern/engines/cpu/lib"
HAS_COMPILER = sys.platform == "linux" and shutil.which("g++") is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs Linux and g++")


def _run(*command: str | Path, cwd: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, env=environment | variables)
    assert done.returncode == 0, f"{command}: {done.stderr[-3000:]}"
    return done.stdout


def _copy_of_sources(target: Path) -> Path:
    """Copy the files of a clone, so that builds do not use or change the checkout."""
    generated = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis")
    written_by_commands = {".git", ".venv", "venv", "build", "dist", "out", "runs", "data"}

    def ignored(folder: str, names: list[str]) -> set[str]:
        return generated(folder, names) | (written_by_commands & set(names) if Path(folder) == ROOT else set())

    return Path(shutil.copytree(ROOT, target, symlinks=True, ignore=ignored))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_a_checkout_has_at_most_64_mib() -> None:
    names = _run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    sizes = [(ROOT / name).lstat().st_size for name in names if name and os.path.lexists(ROOT / name)]
    assert len(sizes) > 500 and sum(sizes) <= 64 << 20


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist, and the wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("built")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder)
    _run(*build, cwd=_copy_of_sources(folder / "clone"), CXX=_fast_compiler(folder))
    return folder


def _fast_compiler(folder: Path) -> str:
    """Return the command of a compiler that checks the sources, and takes the library of other tests as the result."""
    script = folder / "compiler"
    if HAS_COMPILER:
        made = Path(compiling.library()._name)
        copy = f'out=${{@: -2:1}}; cp "{made}" "$out"; [ "${{out##*/}}" = {made.name} ]'
        script.write_text(f'#!/bin/bash\n{copy} || exec g++ "$@" -fsyntax-only\n', encoding="utf-8")
        script.chmod(0o700)
    return str(script)


@pytest.mark.slow
@needs_compiler
def test_the_library_of_each_kind_of_processor_compiles(tmp_path: Path) -> None:
    made, errors = compiling.compile_all(tmp_path, compiling.of_machine())
    assert errors == [] and len(made) == len(compiling.of_machine())


@pytest.fixture(scope="session")
def empty_environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with the wheel installed, in which the packages of this one can be imported."""
    folder = _environment(tmp_path_factory.mktemp("environment"))
    _install(folder, next(built.glob("*.whl")))
    return folder


def _environment(folder: Path) -> Path:
    _run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    # "z": path files are read in order, so packages installed here take precedence
    (_site(folder) / "z_parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def _site(environment: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(_run(environment / "bin/python", "-c", code, cwd=environment).strip())


def _install(environment: Path, *what: str | Path, **variables: str) -> None:
    install = ("install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--force-reinstall", *what)
    _run(sys.executable, "-m", "pip", "--python", environment / "bin/python", *install, cwd=environment, **variables)


def test_wheel_holds_the_package_with_every_source_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        listed = wheel.namelist()
    names = set(listed)
    assert len(names) == len(listed) and any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"lantern"}
    assert not [name for name in names if {"recipes", "tests", "integrations", *LEFT_OUT} & set(name.split("/"))]
    moved = {"lantern": "lantern", "models/llamagen": "lantern/models/llamagen", "eval": "lantern/eval"}
    moved |= {f"assets/{name}": f"lantern/assets/{name}" for name in ("lantern-emoji", "prompts")}
    for source, target in moved.items():
        files = [path.relative_to(ROOT / source) for path in (ROOT / source).rglob("*") if path.is_file()]
        shipped = {f"{target}/{path.as_posix()}" for path in files if not (LEFT_OUT | {"lib"}) & set(path.parts)}
        assert shipped and shipped <= names


@needs_compiler
def test_wheel_holds_a_library_for_each_kind_of_processor(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_')}.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if name.startswith(f"{LIBRARIES}/")}
    expected = {f"{LIBRARIES}/{compiling.library_name(variant)}" for variant in compiling.of_machine()}
    assert names == expected | {name.removesuffix(".so") + ".json" for name in expected}


@pytest.mark.parametrize(
    ("script", "warning"),
    [("", "the C++ library is not part of this build: the cpu engine is built by g++ 9"), ("exit 1", "out of order")],
)
def test_a_wheel_may_hold_python_only(
    script: str, warning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec: Any = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    warnings: list[str] = []
    app = SimpleNamespace(display_warning=warnings.append)
    hook: Any = module.LayoutHook(str(ROOT), {}, None, None, str(tmp_path), "wheel", app)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if script:
        compiler = tmp_path / "g++"
        compiler.write_text(f"#!/bin/sh\necho 'error: out of order' >&2\n{script}\n", encoding="utf-8")
        compiler.chmod(0o700)
        monkeypatch.setenv("CXX", str(compiler))
    for is_editable in [False] if script else [False, True]:
        data: dict[str, Any] = {"force_include": {}, "pure_python": True}
        hook.add_library(data, is_editable=is_editable)
        assert data == {"force_include": {}, "pure_python": True}
    hook.finalize("standard", data, "")
    assert not [*tmp_path.glob("lantern-*")]
    assert warnings and all(warning in one for one in warnings)


def test_sdist_holds_the_sources_of_the_wheel(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    assert {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "NOTICE", "tests/core/test_io.py"} <= names
    assert {"models/llamagen/transformer.py", "assets/lantern-emoji/NOTICE"} <= names
    assert {f"lantern/engines/cpu/{source.name}" for source in compiling.SOURCES} <= names
    assert not [name for name in names if name.endswith(".so")]


def test_an_installed_package_has_its_library_and_commands_and_makes_a_picture(
    empty_environment: Path, tmp_path: Path
) -> None:
    code = f"""
import lantern, lantern.models.llamagen.transformer, lantern.eval, importlib.util
from lantern.engines.cpu import build
print([name for name in ("models", "eval") if importlib.util.find_spec(name)])
print(lantern.__file__)
print(lantern.models.llamagen.__file__)
print(list(lantern.eval.__path__))
if {HAS_COMPILER}:
    assert build.missing() is None
    print(build.library()._name)
from lantern.cli.generate import main
assert main(["--prompt", "a red apple", "--quiet"]) == 0
"""
    own = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "", "CXX": "none"}
    top_level, *places, name = _run(empty_environment / "bin/python", "-c", code, cwd=tmp_path, **own).splitlines()
    assert top_level == "[]" and len(places) == 3 + HAS_COMPILER
    assert all(str(empty_environment) in place for place in places)
    assert not HAS_COMPILER or LIBRARIES in places[-1]
    assert not list(tmp_path.rglob("*.so"))
    (picture,) = tmp_path.glob("*.png")
    assert name == picture.name and picture.read_bytes().startswith(b"\x89PNG")
    for command in ("lantern", "lantern-generate"):
        assert f"usage: {command}" in _run(empty_environment / "bin" / command, "--help", cwd=tmp_path)


def test_editable_install_uses_the_checkout(tmp_path: Path) -> None:
    clone = _copy_of_sources(tmp_path / "clone")
    shutil.rmtree(clone / LIBRARIES, ignore_errors=True)
    folder = _environment(tmp_path / "environment")
    _install(folder, "-e", clone, CXX=_fast_compiler(tmp_path))
    assert not (_site(folder) / "lantern").exists()
    code = "import importlib.util as u; print(u.find_spec('lantern.models.llamagen').origin)"
    origin = _run(folder / "bin/python", "-c", code, cwd=tmp_path).strip()
    assert origin == str(clone / "models/llamagen/__init__.py")
    own = [compiling.library_name(compiling.supported()[0])] if HAS_COMPILER else []
    assert [path.name for path in (clone / LIBRARIES).glob("*.so")] == own


def test_version_is_the_same_everywhere() -> None:
    version = import_module("lantern").__version__
    cited = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    date = re.findall(r'^date-released: "(.+)"$', (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    nodes = tomllib.loads((ROOT / "integrations/comfyui/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert cited == [version] and f"## [{version}] - {date[0]}" in changelog and nodes["version"] == version


def test_extras_are_those_that_commands_name() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {
        name
        for path in [*(ROOT / "lantern").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
        for found in re.findall(
            r"""(?:pip install -?q? ?'?"?[\w.]*\[|install_hint\(['"])([\w,]+)""", path.read_text(encoding="utf-8")
        )
        for name in found.split(",")
    }
    assert {"serve", "demo", "ray", "train", "eval"} <= named <= set(extras)
