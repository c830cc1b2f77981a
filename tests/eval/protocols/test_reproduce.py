"""`lantern reproduce` on a tiny model: a row is made, resumed, sharded, measured and repeated."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lantern.cli.main import main
from lantern.engines.cpu.engine import CpuEngine
from lantern.eval.metrics import quality
from lantern.eval.metrics.quality import Figure, Options
from lantern.eval.protocols import generation, reproduce
from lantern.training.data import Record, is_prepared, unpack
from tests.cli.calls import Capture, one_line
from tests.eval.protocols.test_protocol import prompt_set, values
from tests.eval.tiny_metrics import save_pictures
from tests.eval.workers import Patch
from tests.training.drawings import prepared

Run = Callable[..., int]
TEXT = "a red apple\na blue cat\ntwo dog\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder with a protocol of three prompts, twice each, and no weights anywhere."""
    monkeypatch.setenv("LANTERN_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    prompts = asdict(prompt_set(tmp_path, "three.txt", TEXT, 3))
    changes: dict[str, Any] = {"pictures_each": 2, "metrics": ["kid", "fid"], "top_k": 12}
    (tmp_path / "three.json").write_text(json.dumps(values(name="three", prompts=prompts, **changes)))
    return tmp_path


@pytest.fixture
def run(place: Path, folder: Path) -> Run:
    """Calls the command with a tiny model and a file of this place."""

    def call(*words: object, out: str = "out", method: str = "gumbel-jacobi:window=4", file: str = "three.json") -> int:
        given = ["--model", folder, "--out", place / out, "--prompts", place, "--device", "cpu"]
        chosen = ["--method", method] if method else []
        return main(["reproduce", *map(str, (place / file, *given, *chosen, *words))])

    return call


def row(place: Path, out: str = "out") -> dict[str, Any]:
    return json.loads((place / out / "row.json").read_text())


def pictures(place: Path, out: str = "out") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (place / out / "pictures").rglob("*.png")}


def test_a_row_records_how_it_was_made_and_a_limit_makes_the_first_pictures(
    place: Path, run: Run, monkeypatch: Patch, capsys: Capture
) -> None:
    assert run("--metrics", "--limit", "2") == 0
    (place / "out" / "pictures" / "000" / ".0123.png").touch()  # as a kill leaves it
    assert run("--metrics", "--limit", "2") == 0
    first = pictures(place)
    assert sorted(first) == ["000000.png", "000001.png"] and row(place)["pictures"] == 2
    capsys.readouterr()
    assert run("--metrics") == 0
    assert "6 images" in capsys.readouterr().out and pictures(place).items() >= first.items()
    found = row(place)
    assert found["pictures"] == found["pictures_of_protocol"] == 6 == len(pictures(place))
    assert found["choices"]["method"] == "gumbel-jacobi:window=4" and found["protocol"]["name"] == "three"
    assert found["fingerprint"]["config"]["sampling"]["guidance"] == 3.0 and found["surroundings"]["torch"]
    engine = found["choices"]["engine"]
    assert engine["name"] in ("cpu", "eager") and engine == found["fingerprint"]["config"]["engine"]
    assert found["speed"]["tokens"] == 6 * 16 and found["speed"]["tokens_per_step"] >= 1
    monkeypatch.setattr(generation, "make_batches", lambda *_, **__: pytest.fail("an image was begun"))
    assert run("--metrics") == 0
    capsys.readouterr()
    assert run("--metrics", "--limit", "2") == 2 and row(place)["pictures"] == 6
    assert "row.json is a row of more than 2 images: give another --out" in one_line(capsys)
    assert run("--metrics", method="plain") == 2
    assert re.search("begun with config.method..*use another --out", one_line(capsys))


def test_the_default_dtype_is_that_of_loading(place: Path, folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(CpuEngine, "narrows", lambda *_, **__: True)
    asked = {"protocol": str(place / "three.json"), "prompts": place, "out": place / "out", "metrics": []}
    assert reproduce.prepare(reproduce.TableRow(**asked, model=str(folder), device="cpu")).recipe.dtype == "bf16"


def test_shards_give_the_row_of_a_run(place: Path, run: Run, monkeypatch: Patch, capsys: Capture) -> None:
    assert run("--metrics") == 0
    assert run("--metrics", "--shard", "2/2", out="parts") == 0
    assert "other shards are incomplete" in capsys.readouterr().err
    assert not (place / "parts" / "row.json").exists()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run("--metrics", out="parts") == 0
    assert "all 6 are complete: run the same without --shard" in capsys.readouterr().err
    monkeypatch.delenv("RANK")
    assert run("--metrics", out="parts") == 0
    assert pictures(place, "parts") == pictures(place)
    assert row(place, "parts")["pictures_sha256"] == row(place)["pictures_sha256"]


def test_a_row_is_repeated_byte_for_byte_or_differs_by_report(place: Path, run: Run, capsys: Capture) -> None:
    assert run("--metrics", "--limit", "3", "--batch", "2") == 0
    assert row(place)["choices"]["model"] == "toy"  # no path of this machine
    assert run(out="again", method="", file="out/row.json") == 0
    assert "all images equal the repeated row" in capsys.readouterr().out
    assert pictures(place, "again") == pictures(place) and len(pictures(place)) == 3
    given = ["--limit", 1, "--batch", 1, "--dtype", "bf16", "--engine", "wide", "--target-weights", "int8"]
    assert run(*given, out="no", method="plain", file="out/row.json") == 2
    line = one_line(capsys)
    words = [str(word) for word in given] + ["--method", "plain"]
    assert all(f"{name} {value} (the row has " in line for name, value in zip(words[::2], words[1::2], strict=True))
    assert run("--kv-cache", "fp8", out="no", method="", file="out/row.json") == 2
    assert "--kv-cache fp8 (the row has full)" in one_line(capsys)
    assert run("--metrics", "--limit", "3", "--batch", "2", method="plain") == 2
    assert "was begun with config.method.name gumbel-jacobi, now it is plain" in one_line(capsys)
    assert not (place / "no").exists()
    assert main(["reproduce", str(place / "out/row.json"), "--out", str(place / "no")]) == 2
    assert "model 'toy' is neither a folder" in (line := capsys.readouterr().err) and line.endswith("; give --model\n")
    same = ["--limit", 3, "--batch", 2, "--dtype", "fp32", "--metrics", "psnr"]
    assert run(*same, out="again", file="out/row.json") == 1  # without a reference
    assert row(place, "again")["not_measured"].keys() == {"psnr"}
    capsys.readouterr()
    assert run(*same, "--reference", place / "out" / "pictures", out="again", file="out/row.json") == 0
    assert "  psnr inf; 3 images are equal" in capsys.readouterr().out
    assert row(place, "again")["metrics"]["psnr"]["value"] is None
    choices, _ = row(place)["choices"], capsys.readouterr()
    for name, value in {"limit": -1, "batch": "1", "threads": 0, "engine": choices["engine"] | {"amz": True}}.items():
        (place / "other.json").write_text(json.dumps(row(place) | {"choices": choices | {name: value}}))
        assert run(out="no", method="", file="other.json") == 2
        assert f"other.json: {name} " in one_line(capsys)
    (place / "other.json").write_text(json.dumps(row(place) | {"pictures_sha256": "0" * 64}))
    assert run(out="again", method="", file="other.json") == 1
    assert "the images differ from those" in capsys.readouterr().err


@pytest.fixture
def measured(monkeypatch: Patch) -> dict[str, Any]:
    """Records the requested metrics instead of computing them, which would need weights."""
    requested: dict[str, Any] = {}

    def measure(paths: list[Path], reference: Any, metrics: list[str], **how: Any) -> dict[str, Figure]:
        requested.update(how, paths=paths, reference=reference, metrics=metrics)
        facts: Any = (0.5, "", "lib 1", "none", "w", "s", 6, "i", "r", "s", 3, 0, (0.4, 0.6), "draws")
        return {name: Figure(name, *facts, warning="few") for name in metrics}

    monkeypatch.setattr(quality, "measure", measure)
    monkeypatch.setattr(quality, "find_weights", lambda *_: None)
    return requested


def test_metrics_get_pictures_with_their_prompts(
    place: Path, run: Run, measured: dict[str, Any], capsys: Capture
) -> None:
    save_pictures(place / "real", 2)
    assert run("--reference", place / "real", "--weights", "inception=net.pt") == 0
    assert [path.name for path in measured["paths"]] == [f"{i:06d}.png" for i in range(6)]
    assert measured["prompts"] == [*TEXT.splitlines()] * 2 and measured["metrics"] == ["kid", "fid"]
    assert measured["reference"] == place / "real" and measured["weights"] == {"inception": Path("net.pt")}
    assert isinstance(measured["options"], Options) and measured["options"].before is None
    assert row(place)["metrics"]["kid"]["interval"] == [0.4, 0.6] and row(place)["not_measured"] == {}
    assert "kid 0.5000 [0.4000, 0.6000]; few\n" in capsys.readouterr().out
    real = {"name": "photos", "images": 5, "origin": "nowhere"}
    (place / "three.json").write_text(json.dumps(json.loads((place / "three.json").read_text()) | {"reference": real}))
    assert run("--reference", place / "real", "--weights", "inception=net.pt") == 0
    assert "; few; 3 reference images, the protocol has 5\n" in capsys.readouterr().out


def test_unavailable_metrics_are_reported_before_and_after(place: Path, run: Run, capsys: Capture) -> None:
    save_pictures(place / "real", 2)
    words = ["--limit", "2", "--reference", place / "real", "--metrics", "kid", "clip"]
    assert run(*words) == 1
    before, *_, last = capsys.readouterr().err.splitlines()
    assert before.startswith("lantern: kid will not be measured: no weights of inception: put default_1.pt")
    assert last.startswith("lantern: error: not measured: kid (") and "clip (" in last
    assert set(row(place)["not_measured"]) == {"kid", "clip"} and len(pictures(place)) == 2


def test_prepared_data_give_pictures_with_concepts(tmp_path: Path) -> None:
    made = []
    for number, (kind, split) in enumerate([("plain", "train"), ("count", "train"), ("plain", "heldout")] * 2):
        picture = np.full((8, 8, 3), number, dtype=np.uint8)
        made.append((picture, Record(0, ((f"thing {number}", 1.0),), kind, (f"thing {number}",), "flat", split)))
    prepared(tmp_path / "data", made)
    assert is_prepared(tmp_path / "data") and not is_prepared(tmp_path)
    pictures = unpack(tmp_path / "data", tmp_path / "out")
    names = [path.relative_to(tmp_path / "out").as_posix() for path in pictures]
    assert names == ["000000.png", "000003.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shard", "3/2"], "shard is 3/2"),
        (["--shard", "1/2", "--ray"], "leave --shard out"),
        (["--weights", "inceptoin=net.pt"], "did you mean 'inception'?"),
        (["--limit", "0"], "limit"),
        (["--method", "eagle9"], "unknown"),
        (["--metrics", "kidd"], "did you mean 'kid'?"),
        (["--metrics", "psnr", "--reference", "real"], "psnr: got 6 images and 2 reference images"),
        (["--metrics", "precision", "--reference", "real"], "precision: a set has 2 images, wanted at least 6"),
        (["--metrics", "fid", "--reference", "three.txt"], "got reference three.txt, wanted a folder of images"),
        (["--shard", "1/2"], "the launcher sets 2/3"),
    ],
)
def test_invalid_input_gives_one_line(
    place: Path, run: Run, words: list[str], message: str, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.chdir(place)
    save_pictures(place / "real", 2)
    assert run(*words) == 2
    assert message in one_line(capsys) and not (place / "out" / "pictures").exists()


def test_what_does_not_fit_the_protocol_is_refused(place: Path, run: Run, capsys: Capture) -> None:
    real = {"name": "stats", "images": 3, "origin": "nowhere", "sha256": "0" * 64}
    (place / "three.json").write_text(json.dumps(json.loads((place / "three.json").read_text()) | {"reference": real}))
    for given in (place / "three.txt", place):
        assert run("--reference", given) == 2
        assert "wanted sha256 000000000000... of three: get stats from nowhere" in capsys.readouterr().err
    (place / "classes.json").write_text(json.dumps(values(prompts="left out", classes=2)))
    assert run("--metrics", "clip", file="classes.json") == 2
    assert "clip needs prompts, which mine has not" in capsys.readouterr().err


def test_an_unwritable_folder_gives_one_line_and_code_1(run: Run, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    assert run("--metrics") == 1
    assert "cannot be written to" in one_line(capsys)


def test_without_ray_a_ray_job_names_the_extra_at_once(run: Run, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(reproduce, "load_model", None)
    assert run("--metrics", "--ray") == 1
    assert 'pip install ".[ray]"' in capsys.readouterr().err
