import json
from pathlib import Path

import pytest
import torch

from lantern.cli.main import main
from lantern.core.io import load_component, load_state, read_config
from lantern.models.folder import load_model
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from tests.cli.calls import Capture, one_line, refused_by

CONFIG = TransformerConfig(dim=32, n_layer=2, n_head=4, multiple_of=32, vocab_size=16, num_classes=3, block_size=16)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --image-size"),
        (["--image-size", "100"], "wanted a multiple of 16"),
        (["--image-size", "-16"], "wanted a whole number"),
        (["--image-size", "64", "--grid", "4"], "not allowed with"),
        (["--grid", "4", "--kind", "t2i"], "holds a c2i checkpoint, not t2i"),
        (["--grid", "4", "--kind", "t2v"], "did you mean 't2i'?"),
    ],
)
def test_inconsistent_input_is_refused(checkpoint: Path, capsys: Capture, options: list[str], message: str) -> None:
    assert _convert(checkpoint, *options) == 2
    assert message in one_line(capsys)
    assert not (checkpoint.parent / "out").exists()


def test_a_damaged_file_is_refused_and_a_read_only_folder_is_a_failure(checkpoint: Path, capsys: Capture) -> None:
    (checkpoint.parent / "out").write_text("a file where the folder should be")
    assert _convert(checkpoint, "--grid", "4") == 1
    assert "out" in one_line(capsys)
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    assert _convert(checkpoint, "--grid", "4") == 2
    assert "c2i.pt is no whole checkpoint" in one_line(capsys)
