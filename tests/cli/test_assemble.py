"""`lantern assemble`: a folder that loads, and one-line errors for components that do not fit together."""

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.cli.main import main
from lantern.core.io import load_state, read_checksums, read_config, save_component, weights_digest, write_json
from lantern.drafters.eagle.eagle1 import Eagle, EagleConfig
from lantern.generation.generator import neighbours_for
from lantern.models.folder import load_model
from lantern.models.llamagen.vqvae import VQVAE
from lantern.verifiers.relaxations.neighbours import proximity_table
from tests.cli.calls import Capture, one_line, refused_by
from tests.tiny import tiny_config, tiny_target
from tests.tiny_folder import VQ


@pytest.fixture
def components(copied: Path) -> dict[str, Path]:
    """Components of the toy model, whose drafter is not signed."""
    write_json(copied / "drafter" / "config.json", read_config(copied / "drafter") | {"target": None})
    return {name: copied / name for name in ("transformer", "vqvae", "drafter")}


def options(components: dict[str, Path]) -> list[str]:
    return [text for name, path in components.items() for text in (f"--{name}", str(path))]


def test_a_folder_loads_and_later_calls_replace_single_components(tmp_path: Path, components: dict[str, Path]) -> None:
    out = tmp_path / "model"
    assert main(["assemble", str(out), *options(components), "--guidance", "2.5", "--method", "lantern++"]) == 0
    model: Any = load_model(out, device="cpu")
    assert dict(model.generation) == {"guidance": 2.5, "method": "lantern++"} and model.drafter is not None
    target, vq = tiny_target(seed=5), VQVAE(VQ)
    save_component(target.state_dict(), target.config, tmp_path / "t2")
    save_component(vq.state_dict(), vq.config, tmp_path / "v2")
    (tmp_path / "v2" / "SHA256SUMS").unlink()
    parts = {"transformer": tmp_path / "t2", "drafter": components["drafter"], "vqvae": tmp_path / "v2"}
    assert main(["assemble", str(out), *options(parts)]) == 0
    model = load_model(out, device="cpu")
    assert torch.equal(model.target.output.weight, target.output.weight)
    assert torch.equal(neighbours_for(model, 3), proximity_table(vq.quantize.tokens(), 23))
    assert dict(model.generation) == {"guidance": 2.5, "method": "lantern++"}
    assert set(read_checksums(out / "vqvae")) == {"model.safetensors"}


def test_a_signed_drafter_refuses_another_target(tmp_path: Path, components: dict[str, Path], capsys: Capture) -> None:
    out = tmp_path / "model"
    assert main(["assemble", str(out), *options(components)]) == 0
    assert read_config(out / "drafter")["target"] == weights_digest(load_state(out / "transformer"))
    other = tiny_target(seed=5)
    save_component(other.state_dict(), other.config, tmp_path / "t2")
    before = (out / "transformer" / "model.safetensors").read_bytes()
    error = refused_by(capsys, "assemble", str(out), "--transformer", str(tmp_path / "t2"))
    assert f"drafter {out / 'drafter'} was trained for a target of digest" in error and "that of model model" in error
    assert (out / "transformer" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("damage", ["codebook", "truncated", "tokenizer", "kind", "size"])
def test_components_that_do_not_fit_are_refused_before_anything_is_copied(
    tmp_path: Path, copied: Path, components: dict[str, Path], capsys: Capture, damage: str
) -> None:
    message, given = "", components | {"text-encoder": copied / "text_encoder", "tokenizer": copied / "tokenizer"}
    if damage == "codebook":
        vq = VQVAE(replace(VQ, codebook_size=30))
        save_component(vq.state_dict(), vq.config, path := components["vqvae"])
    elif damage == "truncated":
        path = copied / "text_encoder" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "tokenizer":
        (path := copied / "tokenizer" / "tokenizer.json").write_text("{")
    elif damage == "size":
        drafter = Eagle(EagleConfig.for_target(tiny_config(dim=48, vocab_size=30)))
        save_component(drafter.state_dict(), drafter.config, path := components["drafter"])
        message = "drafts 30 tokens of width 48, 16 per image, but model model has 24 tokens of width 32, 16 per image"
    else:
        path = components["drafter"] / "config.json"
        write_json(path, read_config(components["drafter"]) | {"kind": "eagle3"})
    error = refused_by(capsys, "assemble", str(tmp_path / "model"), *options(given))
    assert str(path) in error and message in error and not (tmp_path / "model").exists()


REFUSED = {
    "--method nosuch": 'method "nosuch" is unknown',
    "--method lantern:nosuch=1": "has no setting nosuch",
    "--method medusa": 'needs the trained part "medusa"',
    "--top-p 0": "top_p",
    "--names FILE": "cannot read",
    "--data EMPTY": "holds no prepared data",
    "--tokenizer EMPTY": "is not a component",
    "--scale 2": "No space left on device",  # the only call whose components are copied
}


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("words", REFUSED)
def test_a_refused_or_failed_call_writes_nothing(
    tmp_path: Path,
    components: dict[str, Path],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    is_new: bool,
) -> None:
    def copy(source: Path, file: Path) -> None:
        Path(file).write_bytes(source.read_bytes())
        if source.parent.name == "drafter":  # the last one
            raise OSError(errno.ENOSPC, "No space left on device", str(file))

    out, empty, file = tmp_path / "model", tmp_path / "empty", tmp_path / "names"
    empty.mkdir()
    file.write_bytes(b"\xff")
    if not is_new:
        assert main(["assemble", str(out), *options(components)]) == 0
        target = tiny_target(seed=5)
        save_component(target.state_dict(), target.config, components["transformer"])
    before = {path: path.is_file() and path.read_bytes() for path in out.rglob("*")}
    monkeypatch.setattr(shutil, "copyfile", copy)
    capsys.readouterr()
    given = words.replace("EMPTY", str(empty)).replace("FILE", str(file)).split()
    assert main(["assemble", str(out), *options(components), *given]) == (1 if words == "--scale 2" else 2)
    assert REFUSED[words] in one_line(capsys) and out.exists() != is_new
    assert {path: path.is_file() and path.read_bytes() for path in out.rglob("*")} == before
