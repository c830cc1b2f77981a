"""Imports between the modules of the package, read from their source, and what an import loads in a fresh process."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLACES = {"lantern": "lantern", "lantern.models.llamagen": "models/llamagen", "lantern.eval": "eval"}
HEAVY = ("transformers", "diffusers", "torchvision", "open_clip", "torchmetrics", "cleanfid", "accelerate")
# modules that need an optional library when they are imported
LIBRARIES = {"lantern.engines.cuda.kernels": "triton", "lantern.generation.serving.replicas": "ray"}
# imported by other libraries, some of them with warnings; and libraries of metrics
LATER = ("transformers.quantizers.auto", *(["diffusers.quantizers.torchao"] if find_spec("torchao") else []))
JUDGES = ("torchmetrics.image.fid", "cleanfid.fid", "open_clip", "torchvision.transforms.v2", "torchvision.models")
POSIX = {"fcntl", "grp", "pwd", "resource", "termios"}  # not on Windows
OUTSIDE_THE_WHEEL = ("recipes", "tests", "integrations")


def _sources() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for package, folder in PLACES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found.setdefault(".".join((package, *(part for part in parts if part != "__init__"))), path)
    return found


SOURCES = _sources()

# From the lowest to the highest; the longest prefix that fits a module counts. What stands beside each other may import
# each other.
LAYERS = (
    ("lantern.core.config",),
    ("lantern.core.process",),
    ("lantern.core.io",),
    ("lantern.core.sampling",),
    ("lantern.core.types",),
    ("lantern.core",),
    ("lantern.models.llamagen",),
    ("lantern.methods",),
    ("lantern.verifiers",),
    ("lantern.decoding",),
    ("lantern.models.transformers",),
    ("lantern.engines",),
    ("lantern.models",),
    ("lantern.drafters.trees",),
    ("lantern.drafters.policies",),
    ("lantern.drafters",),
    ("lantern.generation",),
    ("lantern.training", "lantern.eval", "lantern.cli", "lantern"),
)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """Yield the names that a file imports, `from a import b` as a.b, without blocks for type checkers and scripts."""
    pending: list[ast.AST] = [_tree(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and any(name in ast.unparse(node.test) for name in ("TYPE_CHECKING", "__main__")):
            pending.extend(node.orelse)
            continue
        if top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))


def _module_of(name: str) -> str:
    while name and name not in SOURCES:
        name = name.rpartition(".")[0]
    return name


@cache
def _graph() -> dict[str, set[str]]:
    return {name: {_module_of(found) for found in _imports(path)} - {"", name} for name, path in SOURCES.items()}


def _layer(module: str) -> int:
    fits = {
        prefix: number
        for number, layer in enumerate(LAYERS)
        for prefix in layer
        if f"{module}.".startswith(f"{prefix}.")
    }
    return fits[max(fits, key=len)]


def test_layers_point_one_way_without_cycles() -> None:
    names = {module: found - {"lantern"} for module, found in _graph().items()}
    wrong = [f"{module} imports {name}" for module in names for name in names[module] if _layer(name) > _layer(module)]
    assert sorted(wrong) == []
    TopologicalSorter(_graph()).prepare()  # CycleError lists the modules of a cycle


def test_the_wheel_imports_nothing_outside_it_no_pickle_and_heavy_libraries_where_they_are_used() -> None:
    for module, path in SOURCES.items():
        found, first = {*_imports(path)}, {*_imports(path, top_level_only=True)}
        assert [name for name in found if name.split(".")[0] in OUTSIDE_THE_WHEEL] == [], module
        assert not POSIX & first and "pickle" not in {name.split(".")[0] for name in found}, module
        if module not in ("lantern.generation.pipeline", "lantern.generation.component"):  # classes of diffusers
            assert [name for name in first if name.split(".")[0] in HEAVY] == [], module
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("weights_only") == "True", module


def _fresh(code: str) -> tuple[str, str]:
    """Return what a new process prints, to stdout and to stderr."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip(), done.stderr


def test_every_module_public_name_and_heavy_library_imports_in_a_fresh_process() -> None:
    """Libraries are imported after lantern, whose watch of torchvision's import may be set twice."""
    code = f"""
import importlib, pkgutil, sys, lantern
from lantern.core.process import TorchvisionLoader, watch_import
watch_import()
assert sys.meta_path.count(TorchvisionLoader) == 1
import torchvision, diffusers, transformers
lantern.LanternPipeline
for name in {LATER}:
    importlib.import_module(name)
print("all quiet", file=sys.stderr)
for found in pkgutil.walk_packages(lantern.__path__, "lantern."):
    if found.name not in {[module for module, library in LIBRARIES.items() if find_spec(library) is None]}:
        importlib.import_module(found.name)
    print(found.name)
for name in lantern.__all__:
    getattr(lantern, name)
for name in {[name for name in JUDGES if find_spec(name.split(".")[0])]}:
    importlib.import_module(name)
from transformers import CLIPModel, T5EncoderModel
importlib.reload(torchvision)
"""
    printed, warnings = _fresh(code)
    names = set(printed.splitlines())
    assert {"lantern.core.io", "lantern.cli.main", "lantern.models.releases.llamagen"} <= names
    assert {name.removesuffix(".__init__") for name in SOURCES} - {"lantern"} <= names
    assert warnings.startswith("all quiet\n"), warnings


HELP = "from lantern.cli.main import COMMANDS, main; calls = [*([name, '--help'] for name in COMMANDS)]; "
HELP += "assert not any(map(main, [*calls, ['generate', '--help-all']]))"
QUANTIZE = "import copy; from torch import nn; from lantern.core.weights import quantize; linear = nn.Linear(32, 32); "
QUANTIZE += "quantize('fc', linear, 'int8'); copy.deepcopy(linear)(linear.weight.scale.T)"


@pytest.mark.parametrize(
    ("code", "libraries"),
    [
        ("import lantern", ("torch", "numpy", "jaxtyping")),
        ("from lantern.methods import METHODS; [one.promise for one in METHODS.values()]", ("torch",)),
        (HELP, ("torch",)),
        (QUANTIZE, ("torchao", "sympy")),
    ],
    ids=["lantern", "methods", "help", "8 bits"],
)
def test_what_needs_no_library_imports_none(code: str, libraries: tuple[str, ...]) -> None:
    printed, warnings = _fresh(f"import sys; {code}; print([name for name in {libraries} if name in sys.modules])")
    assert printed.splitlines()[-1] == "[]" and warnings == ""


def test_other_names_of_the_package_are_errors() -> None:
    import lantern

    with pytest.raises(AttributeError, match="no attribute 'Pipelin'"):
        _ = lantern.Pipelin
