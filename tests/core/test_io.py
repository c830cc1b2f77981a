import dataclasses
import errno
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lantern.core import io
from lantern.core.config import MAX_CONFIG_BYTES, build_config, load_config, resolve_model
from lantern.core.io import atomic_write, load_state, read_config, save_component, user_cache, write_json
from tests.eval.workers import files_of_at_most
from tests.refusals import refused


@dataclasses.dataclass(frozen=True)
class Shape:
    wide: int = 4
    rate: float = 0.5
    kind: Literal["a", "b"] = "a"
    sides: tuple[int, ...] = (1, 2)
    note: str | None = None

    def __post_init__(self) -> None:
        if self.wide < 1:
            raise ValueError(f"wide is {self.wide}, wanted at least 1")


def test_a_component_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    module = nn.Linear(4, 3)
    save_component(module.state_dict(), {"kind": "ä", "sides": [1, 2]}, tmp_path / "part")
    names = [io.SUMS_NAME, io.CONFIG_NAME, io.WEIGHTS_NAME]
    assert sorted(path.name for path in (tmp_path / "part").iterdir()) == names
    assert read_config(tmp_path / "part") == {"kind": "ä", "sides": [1, 2]}
    other = nn.Linear(4, 3)
    io.load_module(other, tmp_path / "part")
    assert torch.equal(other.weight, module.weight) and torch.equal(other.bias, module.bias)


def test_views_are_saved_apart_and_integers_as_they_are(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(4, 3)
    save_component({"a": whole[:2], "b": whole[2:], "c": whole.T}, {}, tmp_path)
    state = load_state(tmp_path)
    assert torch.equal(state["b"], whole[2:]) and torch.equal(state["c"], whole.T)
    save_component({"a": whole, "b": whole}, {}, tmp_path)  # tied weights
    assert torch.equal(load_state(tmp_path)["b"], whole)
    save_component({"w": torch.randn(3, 3), "table": torch.arange(3)}, {}, tmp_path, dtype=torch.bfloat16)
    state = load_state(tmp_path)
    assert state["w"].dtype == torch.bfloat16 and state["table"].dtype == torch.int64


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"weight": torch.zeros(3, 4)}, "'bias' is missing"),
        ({"weight": torch.zeros(3, 4), "bias": torch.zeros(3), "x": torch.zeros(1)}, "'x' is not expected"),
        ({"weight": torch.zeros(4, 3), "bias": torch.zeros(3)}, r"'weight' has shape \[4, 3\], wanted \[3, 4\]"),
        ({"weight": torch.full((3, 4), torch.inf), "bias": torch.zeros(3)}, "'weight' holds NaN or infinity"),
        ({"weight": torch.zeros(3, 4, dtype=torch.int8), "bias": torch.zeros(3)}, "'weight' is int8, wanted one of"),
    ],
)
def test_the_error_for_a_wrong_tensor_names_the_file(tmp_path: Path, stored: dict[str, Any], message: str) -> None:
    save_file(stored, tmp_path / io.WEIGHTS_NAME)
    assert io.WEIGHTS_NAME in refused(io.load_module, nn.Linear(4, 3), tmp_path, match=message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "holds a JSON list"),
        (b" " * (MAX_CONFIG_BYTES + 1), "too large"),
    ],
)
def test_bad_json_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / io.CONFIG_NAME).write_bytes(content)
    assert io.CONFIG_NAME in refused(read_config, tmp_path, match=message)


@dataclasses.dataclass(frozen=True)
class Outer:
    shape: Shape
    other: Shape | None = None
    shapes: tuple[Shape, ...] = ()
    pair: tuple[int, str] = (1, "a")
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    folder: Path | None = None
    free: dict[str, Any] = dataclasses.field(default_factory=dict)


def test_nested_configs_are_built(tmp_path: Path) -> None:
    values = {
        "shape": {"wide": 7},
        "other": None,
        "shapes": [{}, {"kind": "b"}],
        "pair": [2, "b"],
        "shares": {"a": 1},
        "folder": "x",
        "free": {"depths": 4, "kind": "b", "none": None},
    }
    write_json(tmp_path / "outer.json", values)
    free = {"depths": 4, "kind": "b", "none": None}
    expected = Outer(Shape(7), None, (Shape(), Shape(kind="b")), (2, "b"), {"a": 1}, Path("x"), free)
    loaded = load_config(Outer, tmp_path / "outer.json")
    assert loaded == expected and type(loaded.free["depths"]) is int
    assert build_config(Outer, {"shape": Shape(7)}, source="x") == Outer(Shape(7))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shape": {"wyde": 3}}, "unknown key 'shape.wyde'; did you mean 'wide'"),
        ({"shape": {"zzz": 3}}, "unknown key 'shape.zzz'; known are kind, note, rate, sides, wide"),
        ({"shape": {"wide": "3"}}, "shape.wide is '3', wanted int"),
        ({"shape": {"wide": 3.5}}, "shape.wide is '3.5', wanted int"),
        ({"shape": {"wide": 10**30}}, "wanted int"),
        ({"shape": {"wide": 0}}, "shape: wide is 0, wanted at least 1"),
        ({"shape": {"rate": float("nan")}}, "rate is 'nan', wanted float"),
        ({"shape": {"rate": 10**400}}, "wanted float"),
        ({"shape": {"kind": "c"}}, "kind is 'c'"),
        ({"shape": {"sides": [1, "x"]}}, "sides is"),
        ({"shape": {"note": 3}}, "note is '3'"),
        ({"shape": 3}, r"shape is '3', wanted an object \(Shape\)"),
        ({"shape": {}, "other": 3}, r"other is '3', wanted an object \(Shape\), or null"),
        ({"shape": {}, "shapes": [{}, {"wide": True}]}, r"shapes\[1\].wide is 'True', wanted int"),
        ({"shape": {}, "pair": [1]}, "wanted a list of 2: int, text"),
        ({"shape": {}, "shares": {"a": "b"}}, "wanted an object with values of float"),
        ({}, "key 'shape' is missing"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_with_the_whole_key(values: dict[str, Any], message: str) -> None:
    assert refused(build_config, Outer, values, source="x.json", match=message).startswith("x.json: ")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "image.png"
    with pytest.raises(RuntimeError), atomic_write(path):
        raise RuntimeError
    assert not path.parent.exists()
    with atomic_write(path) as temporary:
        assert temporary.suffix == ".png" and not path.exists()
        temporary.write_bytes(b"old")
    with pytest.raises(OSError, match="full"), atomic_write(path) as temporary:
        temporary.write_bytes(b"half")
        raise OSError("disk full")
    error = pytest.raises(OSError, match=r"cannot be written: .*image\.png")
    with files_of_at_most(64), error, atomic_write(path) as temporary:
        save_file({"w": torch.ones(99)}, temporary)
    with files_of_at_most(64), pytest.raises(OSError, match=r"large: .*image\.png"), atomic_write(path) as temporary:
        shutil.copyfile(__file__, temporary)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in path.parent.iterdir()] == ["image.png"]


def test_written_files_have_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    write_json(tmp_path / "careful.json", {"a": 1})
    save_component(nn.Linear(4, 3).state_dict(), {}, tmp_path)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1 and len(list(tmp_path.iterdir())) == 5


def test_a_failed_save_keeps_the_old_component(tmp_path: Path) -> None:
    save_component({"w": torch.ones(1)}, {"a": 1}, tmp_path)
    refused(save_component, {"w": torch.zeros(1)}, {"a": float("nan")}, tmp_path, match="not JSON compliant")
    assert read_config(tmp_path) == {"a": 1} and load_state(tmp_path)["w"].item() == 1
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("name", ["lantern-emojis", "", "a/b/c", "../x y", "nul\0", "x" * 5000, "https://x/y", "-"])
def test_an_unknown_model_name_is_refused_in_one_line(name: str) -> None:
    assert len(refused(resolve_model, name, match="model")) < 300


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    name = "no-such-owner/no-such-model"
    refused(resolve_model, name, error=ConnectionError, match=f"cannot download model '{name}'")


def test_links_stay_and_pipes_are_written_to(tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real.txt", tmp_path / "link.txt", tmp_path / "pipe"
    real.write_text("old")
    link.symlink_to(real)
    with atomic_write(link) as temporary:
        temporary.write_text("new")
    assert link.is_symlink() and real.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_json(pipe, [1])
        assert os.read(reader, 100) == b"[\n  1\n]\n" and pipe.is_fifo()
        (tmp_path / "to pipe").symlink_to(pipe)  # as /dev/stdout may be
        write_json(tmp_path / "to pipe", [2])
        assert os.read(reader, 100) == b"[\n  2\n]\n" and pipe.is_fifo()
    finally:
        os.close(reader)
    if Path("/dev/full").exists():
        refused(write_json, "/dev/full", [3], error=OSError, match="No space left on device: '/dev/full'")
    loop = tmp_path / "loop.safetensors"
    loop.symlink_to(loop)
    refused(io.load_tensors, loop, match="loop.safetensors is a link to no file")


@pytest.mark.parametrize("has_links", [True, False])
def test_a_new_file_is_whole_and_replaces_none(
    tmp_path: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, give, named = tmp_path / "a.txt", os.link, list[str]()

    def link(source: Any, target: Any, **how: Any) -> None:
        if not has_links:
            raise OSError(errno.EPERM, "no links here")
        give(source, target, **how)
        named.append(path.read_text())  # never empty, whenever the process ends

    monkeypatch.setattr(os, "link", link)
    with atomic_write(path, is_new=True) as temporary:
        temporary.write_text("new")
    with pytest.raises(FileExistsError), atomic_write(path, is_new=True) as temporary:
        temporary.write_text("newer")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a.txt"] and named == ["new"] * has_links


def test_memory_that_runs_out_is_not_the_fault_of_a_config(tmp_path: Path) -> None:
    save_component(nn.Linear(4, 3).state_dict(), {"wide": 4}, tmp_path)

    def build(config: Shape) -> nn.Module:
        if torch.empty(0).device.type != "meta":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")
        return nn.Linear(config.wide, 3)

    with pytest.raises(RuntimeError, match="can't allocate"):
        io.load_component(build, Shape, tmp_path)
    write_json(tmp_path / io.CONFIG_NAME, {"wide": 1 << 30})
    refused(io.load_component, build, Shape, tmp_path, match="has shape")


@pytest.mark.parametrize(
    ("given", "home", "found"),
    [("/c", "/h", "/c/lantern"), ("c", "/h", "/h/.cache/lantern"), ("", None, "/dev/null/lantern")],
)
def test_the_cache_of_a_user_with_and_without_a_home(
    given: str, home: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a container's user is not listed
    assert str(user_cache()) == found
    if home is None:
        refused(write_json, user_cache() / "a", {}, error=NotADirectoryError)
