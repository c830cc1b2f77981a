"""Who may import whom, read from the source with ast, and what an import costs, seen in fresh processes."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    ".".join(["lantern", *path.relative_to(ROOT / folder).with_suffix("").parts]): path
    for folder in ("lantern", ".")
    for path in sorted((ROOT / folder).glob("**/*.py" if folder == "lantern" else "models/**/*.py"))
} | {f"lantern.eval.{path.stem}": path for path in sorted((ROOT / "eval").glob("*.py"))}
HEAVY = ("transformers", "diffusers", "torchvision", "open_clip", "torchmetrics", "cleanfid", "accelerate")
# What a part of the package may import of it, by prefix; its own folder is governed by SHARED.
LEAVES = ("lantern.types", "lantern.config", "lantern.io", "lantern.sampling", "lantern.noise")
METHODS = ("lantern.verifiers", "lantern.relaxations", "lantern.trees", "lantern.decoding")
MAY_IMPORT = {
    "lantern.config": (),
    "lantern.io": ("lantern.config",),
    "lantern.types": (),
    "lantern.methods": (),
    "lantern.sampling": ("lantern.types",),
    "lantern.noise": ("lantern.types",),
    "lantern.models": ("lantern.types", "lantern.config", "lantern.io"),
    "lantern.decoding": LEAVES,
    "lantern.relaxations": LEAVES,
    "lantern.trees": LEAVES,
    "lantern.verifiers": (*LEAVES, "lantern.relaxations"),
    "lantern.policies": (*LEAVES, "lantern.trees"),
    "lantern.records": (*LEAVES, "lantern.policies"),
    "lantern.drafters": (*LEAVES, *METHODS, "lantern.methods", "lantern.models", "lantern.policies"),
    "lantern.kernels": (*LEAVES, *METHODS, "lantern.models", "lantern.drafters"),
    "lantern.catalog": (*LEAVES, *METHODS, "lantern.methods", "lantern.drafters", "lantern.kernels"),
    "lantern.training": (
        *LEAVES,
        *METHODS,
        "lantern.drafters",
        "lantern.catalog",
        "lantern.models",
        "lantern.policies",
        "lantern.records",
        "lantern.tuning.costs",
    ),
}
FOLDERS_OF_METHODS = ("lantern.drafters.", "lantern.trees.", "lantern.relaxations.")
# Files that several methods of their folder share.
SHARED = (
    "lantern.relaxations.neighbours",
    "lantern.drafters.examples",
    "lantern.drafters.chooser",
    "lantern.drafters.unroll",
    "lantern.drafters.eagle",
    "lantern.drafters.eagle_drafter",
    "lantern.drafters.eagle_drafter_chain",
    "lantern.drafters.small_model",
    "lantern.drafters.suffix_automaton",
    "lantern.drafters.heads",
    "lantern.drafters.marginals",
    "lantern.drafters.pairs",
    "lantern.drafters.target_head",
    "lantern.drafters.parallelspec_drafter_chain",
)


def _imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """Yield the names that a file imports, `from a import b` as a.b; blocks for type checkers are left out."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))


def _is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("module", SOURCES)
def test_a_module_imports_only_what_its_layer_may(module: str) -> None:
    layer = next((prefix for prefix in MAY_IMPORT if _is_below(module, prefix)), None)
    if layer is None:
        pytest.skip("commands and package files stand above the layers")
    found = [name for name in _imports(SOURCES[module]) if _is_below(name, "lantern")]
    allowed = (*MAY_IMPORT[layer], layer)
    assert [name for name in found if not any(_is_below(name, prefix) for prefix in allowed)] == []


@pytest.mark.parametrize(
    "module", [name for name in SOURCES if name.split(".")[1] in ("drafters", "trees", "relaxations")]
)
def test_a_method_imports_no_sibling(module: str) -> None:
    folder = module.rsplit(".", 1)[0]
    siblings = [".".join(name.split(".")[:3]) for name in _imports(SOURCES[module]) if _is_below(name, folder)]
    # a method of two files is named alike: eagle_drafter goes with eagle
    assert [name for name in siblings if name not in SHARED and not module.startswith(name)] == []


@pytest.mark.parametrize("module", [name for name in SOURCES if _is_below(name, "lantern.eval")])
def test_evaluation_uses_public_names(module: str) -> None:
    found = [name for name in _imports(SOURCES[module]) if _is_below(name, "lantern")]
    assert [name for name in found if any(part.startswith("_") for part in name.split("."))] == []


@pytest.mark.parametrize("module", SOURCES)
def test_heavy_libraries_are_imported_where_they_are_used(module: str) -> None:
    if module in ("lantern.pipeline", "lantern.component"):
        pytest.skip("the pipeline and its components are classes of diffusers")
    found = _imports(SOURCES[module], top_level_only=True)
    assert [name for name in found if name.split(".")[0] in HEAVY] == []


@pytest.mark.parametrize("module", SOURCES)
def test_pickles_are_read_as_plain_tensors_only(module: str) -> None:
    for node in ast.walk(ast.parse(SOURCES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert given.get("weights_only") == "True"
        assert not (isinstance(node, ast.Import) and any(alias.name == "pickle" for alias in node.names))


def _fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_every_module_imports_in_a_fresh_process() -> None:
    code = """
import importlib, pkgutil, lantern
for found in pkgutil.walk_packages(lantern.__path__, "lantern."):
    importlib.import_module(found.name)
    print(found.name)
"""
    names = _fresh(code).splitlines()
    assert {"lantern.io", "lantern.cli.main", "lantern.models.llamagen.checkpoint"} <= set(names)
    modules = {name.removesuffix(".__init__") for name in SOURCES} - {"lantern"}
    assert modules <= set(names)


def test_heavy_libraries_import_after_lantern() -> None:
    code = """
import lantern
import torchvision, torchmetrics, torchmetrics.image.fid, cleanfid.fid, open_clip, diffusers
from transformers import CLIPModel, T5EncoderModel
from torchvision.transforms import v2
from torchvision.models import inception_v3
print("imported")
"""
    absent = [name for name in ("torchmetrics", "cleanfid", "open_clip") if find_spec(name) is None]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)}")
    assert _fresh(code).endswith("imported")


def test_torchvision_imports_twice_watched() -> None:
    code = """
import sys, lantern
from lantern._torchvision import watch_import
watch_import()
assert sum(type(finder).__name__ == "_TorchvisionFinder" for finder in sys.meta_path) == 1
import torchvision, importlib
importlib.reload(torchvision)
print(torchvision.__version__)
"""
    assert _fresh(code)


def test_importing_lantern_costs_no_library() -> None:
    code = "import sys, lantern; print([m for m in ('torch', 'numpy', 'jaxtyping') if m in sys.modules])"
    assert _fresh(code) == "[]"


def test_public_names_resolve() -> None:
    assert _fresh("import lantern; [getattr(lantern, name) for name in lantern.__all__]; print('all')") == "all"


def test_an_unknown_name_is_an_attribute_error() -> None:
    import lantern

    with pytest.raises(AttributeError, match="no attribute 'Pipelin'"):
        _ = lantern.Pipelin


@pytest.mark.parametrize("arguments", [["main", "--help"], ["generate", "--help"], ["main", "train", "--help"]])
def test_help_loads_no_torch(arguments: list[str]) -> None:
    module, *rest = arguments
    code = f"""
import sys
from lantern.cli.{module} import main
code = main({rest})
print("torch" in sys.modules, code)
"""
    assert _fresh(code).splitlines()[-1] == "False 0"
