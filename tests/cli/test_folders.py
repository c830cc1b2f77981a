"""`lantern assemble` and `lantern convert`: folders that load, and one-line errors for what does not fit together."""

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.cli.main import main
from lantern.core.config import read_json_object
from lantern.core.io import (
    load_component,
    load_state,
    read_checksums,
    read_config,
    save_component,
    sha256_of,
    weights_digest,
    write_json,
)
from lantern.drafters.eagle.networks import Eagle, EagleConfig
from lantern.generation.generator import neighbours_for
from lantern.models.folder import load_model
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.models.llamagen.vqvae import VQVAE
from lantern.verifiers.relaxations.neighbours import proximity_table
from tests.cli.calls import Capture, one_line, refused_by
from tests.tiny import tiny_config, tiny_target
from tests.tiny_folder import VQ

CONFIG = TransformerConfig(dim=32, n_layer=2, n_head=4, multiple_of=32, vocab_size=16, num_classes=3, block_size=16)


@pytest.fixture
def components(copied: Path) -> dict[str, Path]:
    """Components of the toy model, whose drafter is not signed."""
    write_json(copied / "drafter" / "config.json", read_config(copied / "drafter") | {"target": None})
    return {name: copied / name for name in ("transformer", "vqvae", "drafter")}


@pytest.fixture
def other_target(tmp_path: Path) -> Path:
    """A target with other weights."""
    target = tiny_target(seed=5)
    save_component(target.state_dict(), target.config, tmp_path / "t2")
    return tmp_path / "t2"


def assembling(out: Path, components: dict[str, Path]) -> list[str]:
    return ["assemble", str(out), *(text for name, path in components.items() for text in (f"--{name}", str(path)))]


def test_a_folder_loads_and_later_calls_replace_what_fits_the_signed_drafter(
    tmp_path: Path, components: dict[str, Path], other_target: Path, capsys: Capture
) -> None:
    out = tmp_path / "model"
    assert main([*assembling(out, components), "--guidance", "2.5", "--method", "lantern++"]) == 0
    model: Any = load_model(out, device="cpu")
    assert dict(model.generation) == {"guidance": 2.5, "method": "lantern++"} and model.drafter is not None
    assert read_config(out / "drafter")["target"] == weights_digest(load_state(out / "transformer"))
    before = (out / "transformer" / "model.safetensors").read_bytes()
    error = refused_by(capsys, *assembling(out, {"transformer": other_target}))
    assert f"drafter {out / 'drafter'} was trained for a target of digest" in error and "that of model model" in error
    assert (out / "transformer" / "model.safetensors").read_bytes() == before
    vq = VQVAE(VQ)
    save_component(vq.state_dict(), vq.config, tmp_path / "v2")
    (tmp_path / "v2" / "SHA256SUMS").unlink()
    assert main(assembling(out, components | {"transformer": other_target, "vqvae": tmp_path / "v2"})) == 0
    model = load_model(out, device="cpu")
    assert torch.equal(model.target.output.weight, tiny_target(seed=5).output.weight)
    assert torch.equal(neighbours_for(model, 3), proximity_table(vq.quantize.tokens(), 23))
    assert dict(model.generation) == {"guidance": 2.5, "method": "lantern++"}
    assert set(read_checksums(out / "vqvae")) == {"model.safetensors"}


def test_an_encoder_and_its_tokenizer_may_be_one_folder_with_weights_in_several_formats(
    tmp_path: Path, components: dict[str, Path], folder: Path
) -> None:
    both = tmp_path / "flan-t5"
    shutil.copytree(folder / "text_encoder", both)
    shutil.copytree(folder / "tokenizer", both, dirs_exist_ok=True)
    (both / "pytorch_model.bin").write_bytes(b"0")
    sums = [f"{sha256_of(both / name)}  {name}\n" for name in ("model.safetensors", "pytorch_model.bin")]
    (both / "SHA256SUMS").write_text("".join(sums))
    (both / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}')
    out, given = tmp_path / "model", dict.fromkeys(("text-encoder", "tokenizer"), both)
    assert main(assembling(out, components | given)) == 0
    index = read_json_object(out / "model_index.json")
    assert (index["text_encoder"][1], index["tokenizer"][1]) == ("T5EncoderModel", "PreTrainedTokenizerFast")
    weights = [sorted(path.name for path in (out / name).glob("*model*")) for name in ("text_encoder", "tokenizer")]
    assert weights == [["model.safetensors"], []]
    assert list(read_checksums(out / "text_encoder")) == ["model.safetensors"]
    assert not (out / "tokenizer" / "SHA256SUMS").exists()


@pytest.mark.parametrize("damage", ["codebook", "truncated", "tokenizer", "kind", "size", "released", "file"])
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
    elif damage in ("released", "file"):
        write_json((path := components["drafter"]) / "config.json", {"hidden_size": 32})
        given |= {"drafter": path / "model.safetensors"} if damage == "file" else {}
        message = "is a released checkpoint, wanted a component: make it with lantern convert"
    elif damage == "size":
        drafter = Eagle(EagleConfig.for_target(tiny_config(dim=48, vocab_size=30)))
        save_component(drafter.state_dict(), drafter.config, path := components["drafter"])
        message = "drafts 30 tokens of width 48, 16 per image, but model model has 24 tokens of width 32, 16 per image"
    else:
        path, message = components["drafter"], "holds medusa, wanted eagle1: it belongs into parts/medusa"
        write_json(path / "config.json", read_config(path) | {"kind": "medusa", "depths": 4})
    error = refused_by(capsys, *assembling(tmp_path / "model", given))
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
    other_target: Path,
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
        assert main(assembling(out, components)) == 0
        components["transformer"] = other_target
    before = {path: path.is_file() and path.read_bytes() for path in out.rglob("*")}
    monkeypatch.setattr(shutil, "copyfile", copy)
    capsys.readouterr()
    given = words.replace("EMPTY", str(empty)).replace("FILE", str(file)).split()
    assert main([*assembling(out, components), *given]) == (1 if words == "--scale 2" else 2)
    assert REFUSED[words] in one_line(capsys) and out.exists() != is_new
    assert {path: path.is_file() and path.read_bytes() for path in out.rglob("*")} == before


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    torch.save({"model": Transformer(CONFIG).state_dict()}, tmp_path / "c2i.pt")
    (tmp_path / "config.json").write_text(json.dumps({"n_head": 4}))
    return tmp_path / "c2i.pt"


def _convert(checkpoint: Path, *options: str) -> int:
    config = str(checkpoint.parent / "config.json")
    return main(["convert", str(checkpoint), str(checkpoint.parent / "out"), "--config", config, *options])


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_converted_folder_loads_as_the_same_model(is_foreign: bool, checkpoint: Path, capsys: Capture) -> None:
    out, back = checkpoint.parent / "out", checkpoint.parent / "back"
    assert _convert(checkpoint, "--grid", "4", *["--to", "hf"] * is_foreign) == 0
    assert "c2i, 18 tensors" in capsys.readouterr().out
    if is_foreign:  # the names of LANTERN, which are read back
        state = load_state(out)
        assert read_config(out)["hidden_size"] == 32 and "lm_head.weight" in state
        assert state["model.layers.1.self_attn.k_proj.weight"].shape == (32, 32)
        assert not any("wqkv" in name or "attention." in name for name in state)
        assert main(["convert", str(out), str(back)]) == 0
    found = load_component(Transformer, TransformerConfig, back if is_foreign else out)
    assert found.config == CONFIG
    for name, tensor in torch.load(checkpoint, weights_only=True)["model"].items():
        assert torch.equal(found.state_dict()[name], tensor)
    message = "c2i checkpoint, which is no vqvae: give a folder transformer"
    assert message in refused_by(capsys, "convert", str(out), str(out.parent / "vqvae"))
    line = refused_by(capsys, "convert", str(out), str(out), "--overwrite", "--kind", "drafter")
    assert "holds a c2i checkpoint, not drafter" in line


def test_a_model_folder_is_rewritten_in_another_dtype(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    source, out = folder, tmp_path / "out"
    assert main(["convert", str(source), str(out), "--dtype", "bf16"]) == 0
    written, model = load_model(out), load_model(source)
    assert load_state(out / "transformer")["norm.weight"].dtype == torch.bfloat16
    for name, tensor in model.target.state_dict().items():
        assert torch.equal(written.target.state_dict()[name], tensor.bfloat16().float()), name
    assert written.drafter is not None and set(written.add_ons) == set(model.add_ons)
    assert written.generation == model.generation
    assert "replace it with --overwrite" in refused_by(capsys, "convert", str(source), str(out))
    assert main(["convert", str(source), str(out), "--overwrite"]) == 0
    assert load_state(out / "transformer")["norm.weight"].dtype == torch.float32
    line = refused_by(capsys, "convert", str(source), str(tmp_path / "other"), "--to", "hf")
    assert "is a whole model, of which only --dtype changes" in line


def test_a_component_is_replaced_only_on_request(checkpoint: Path, capsys: Capture) -> None:
    assert _convert(checkpoint, "--image-size", "64", "--kind", "c2i", "--dtype", "bf16") == 0
    assert read_config(checkpoint.parent / "out")["block_size"] == 16
    assert load_state(checkpoint.parent / "out")["norm.weight"].dtype == torch.bfloat16
    capsys.readouterr()
    assert _convert(checkpoint, "--grid", "8") == 2
    assert "replace it with --overwrite" in one_line(capsys)
    assert _convert(checkpoint, "--grid", "8", "--overwrite") == 0
    assert read_config(checkpoint.parent / "out")["block_size"] == 64
