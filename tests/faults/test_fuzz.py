"""One file or folder of a model is damaged at random: one line names it, in bounded time and memory.

Files that no checksum covers, and JSON files, may load as well; then an image must come out, or the same kinds of
error. Nothing may run that a file contains, and nothing may be written.
"""

import json
import os
import pickle
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lantern import LanternPipeline
from lantern.core.io import CONFIG_NAME, WEIGHTS_NAME, write_json
from lantern.drafters.eagle.networks import Eagle, EagleConfig
from lantern.generation.generator import generate
from lantern.models.folder import load_model
from lantern.models.releases.llamagen import read_checkpoint
from lantern.training.drafter import load_kind
from tests.tiny_folder import save_tiny_model

SECONDS, WAIT, GROWTH_KIB, HUGE = 10, 60, 1 << 20, 1 << 36
JUNK: tuple[Any, ...] = (None, [], {}, "x", -1, 0, 10**9, 10**30, 1.5, True, [[1]], {"a": 1}, "\u0000", 1e308)
FOREIGN: tuple[Any, ...] = (["os", "system"], ["subprocess", "Popen"], ["tests.faults.hostile", "Model"], "os.system")
CODE: tuple[Any, ...] = ("bert", {"AutoConfig": "hostile.Config", "AutoTokenizer": ["hostile.T", None]})
Draw = Callable[[st.SearchStrategy[Any]], Any]


class Payload:
    """Object whose unpickling creates the file `executed` in the working folder, as a hostile checkpoint might."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def truncate(path: Path, draw: Draw) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw(st.integers(0, max(len(content) - 1, 0)))])


def flip_bits(path: Path, draw: Draw) -> None:
    content = bytearray(path.read_bytes())
    bits = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 7))
    for place, bit in draw(st.lists(bits, min_size=1, max_size=4, unique=True)):
        content[place] ^= 1 << bit
    path.write_bytes(bytes(content))


def replace(path: Path, draw: Draw) -> None:
    """Put a hostile pickle, bare or in torch's archive, random bytes, or JSON of another kind or depth in its place."""
    junk = [b"[" * 100_000, pickle.dumps(Payload()), *(json.dumps(value).encode() for value in JUNK)]
    content = draw(st.one_of(st.none(), st.sampled_from(junk), st.binary(max_size=200)))
    if content is None:
        torch.save({"model": Payload()}, path)
    else:
        path.write_bytes(content)


def remove(path: Path, draw: Draw) -> None:
    """Remove a file or folder, or put a folder, a link to nothing, to itself or to a device, or a pipe in its place."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    put = {
        "nothing": lambda: None,
        "folder": path.mkdir,
        "empty file": path.touch,
        "dangling link": lambda: path.symlink_to(path.with_name("missing")),
        "circle": lambda: path.symlink_to(path.name),
        "device": lambda: path.symlink_to("/dev/zero"),
        "pipe": lambda: os.mkfifo(path),
    }
    put[draw(st.sampled_from(sorted(put)))]()


def change_json(path: Path, draw: Draw) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    place = values
    while (inner := [v for v in place.values() if v and isinstance(v, dict)]) and draw(st.booleans()):
        place = draw(st.sampled_from(inner))
    added = st.sampled_from(["vocab_sise", "", "auto_map", "model_type", "kind", "vqvae"])
    name = draw(st.one_of(st.sampled_from(sorted(place)), added) if place else added)
    if name in place and draw(st.booleans()):
        del place[name]
    else:
        place[name] = draw(st.sampled_from((*JUNK, *FOREIGN, *CODE)))
    path.write_text(json.dumps(values), encoding="utf-8")


def change_header(path: Path, draw: Draw) -> None:
    """Change name, dtype, shape or place of a tensor in a safetensors file, or the header's length."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    tensor = header[name := draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))]
    values: dict[str, list[Any]] = {
        "name": ["x", ""],
        "dtype": ["F64", "BF16", "I8", "U8", "C64", "BOOL", "F8_E4M3", "x"],
        "shape": [[], [-1], [0], [1 << 40], [1 << 62, 4], tensor["shape"][::-1], "x"],
        "data_offsets": [[0, 0], [0, 1 << 62], [-8, 8], [8, 0], [0, len(data)]],
        "length": [0, 1 << 63, 2 * length, length - 1],
    }
    field = draw(st.sampled_from(sorted(values)))
    value = draw(st.sampled_from(values[field]))
    if field == "name":
        header[value] = header.pop(name)
    elif field != "length":
        tensor[field] = value
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", value if field == "length" else len(text)) + text + data)


def damages(path: Path) -> list[Callable[[Path, Draw], None]]:
    own = {".json": [change_json] * 3, ".safetensors": [change_header]}.get(path.suffix, [])
    if path.is_dir():
        return [remove]
    return [truncate, flip_bits, replace, lambda path, draw: os.truncate(path, HUGE), remove, *own]


def load_all(folder: Path) -> None:
    model = load_model(folder, device="cpu")
    assert all(model.add_ons[name] is not None for name in model.add_ons)
    assert len(list(generate(model, ["a red apple"], method="eagle1" if model.drafter else "plain"))) == 1


def load_pipeline(folder: Path) -> None:
    pipe = LanternPipeline.from_pretrained(folder)
    assert all(pipe.model.add_ons[name] is not None for name in pipe.model.add_ons)
    pipe.set_progress_bar_config(disable=True)
    pipe("a red apple", method="plain", generator=0)


Places = dict[Path, Callable[[Path], object]]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    root = tmp_path_factory.mktemp("places")
    whole = save_tiny_model(root / "model")
    model: Any = load_model(whole)
    shutil.copytree(whole, root / "pipeline")
    shutil.copytree(whole / "drafter", root / "drafter")
    for name in ("bare", "pickled"):
        for path in Path(shutil.copytree(whole, root / name)).rglob("SHA256SUMS"):
            path.unlink()
    weights = root / "pickled" / "text_encoder" / WEIGHTS_NAME
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    for name in ("checkpoint", "released"):
        (root / name).mkdir()
    torch.save({"model": model.target.state_dict()}, root / "checkpoint" / "x.pt")
    rows = Eagle(EagleConfig.for_target(model.target.config, form="rows"))
    torch.save(rows.state_dict(), root / "released" / "pytorch_model.bin")
    about = {"hidden_size": rows.config.dim, "num_attention_heads": rows.config.n_head}
    write_json(root / "released" / CONFIG_NAME, about)
    target = model.target
    size, heads = target.config.block_size, {"n_head": target.config.n_head}
    return {
        **{root / name: load_all for name in ("model", "bare", "pickled")},
        root / "pipeline": load_pipeline,
        root / "checkpoint": lambda folder: read_checkpoint(folder / "x.pt", block_size=size, config=heads),
        root / "released": lambda folder: read_checkpoint(folder, kind="drafter", block_size=size),
        root / "drafter": lambda folder: load_kind("eagle1", folder, target),
    }


HAVE_CHECKSUMS = ("model", "pipeline", "drafter")


@contextmanager
def bounded() -> Iterator[None]:
    """Fail after 10 seconds of processor time, after 60 of waiting, and where memory grew by a GiB."""

    def expired(number: int, frame: object) -> None:
        raise AssertionError(f"took more than {SECONDS} s, or waited for {WAIT} s")

    def peak() -> int:
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1])

    before = {number: signal.signal(number, expired) for number in (signal.SIGALRM, signal.SIGPROF)}
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use
    base = peak()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(WAIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert peak() - base < GROWTH_KIB


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory by /proc"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("folders", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_folders_are_refused(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: int
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "damaged"
    often = [place for place in places for _ in range({"model": 10, "bare": 4}.get(place.name, 1))]

    @settings(max_examples=folders, deadline=None, derandomize=folders == 60, suppress_health_check=QUIET)
    @given(data=st.data())
    def damage(data: st.DataObject) -> None:
        """Damage one file or folder, and load what is left."""
        place = data.draw(st.sampled_from(often))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(place, folder)
        # pipeline.py is for diffusers' trust_remote_code alone: lantern neither reads nor runs it
        path = folder / data.draw(
            st.sampled_from(sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix != ".py"))
        )
        data.draw(st.sampled_from(damages(path)))(path, data.draw)
        before, may_load = sorted(folder.rglob("*")), path.suffix != ".safetensors" or place.name not in HAVE_CHECKSUMS
        try:
            with bounded():
                places[place](folder)
            assert may_load, "a damaged file loaded"
        except FloatingPointError as error:  # of a picture: names the request
            assert may_load and "\n" not in str(error)
        except (ValueError, OSError) as error:
            text = str(error)
            assert any(str(part) in text for part in (path, *path.parents[: len(path.relative_to(folder).parts)])), text
            assert "\n" not in text and len(text) < 600, text
            assert "weights_only" not in text and "trust_remote_code" not in text, "it advises to run code"
        assert sorted(folder.rglob("*")) == before and not Path("executed").exists()

    damage()
