import json
from pathlib import Path

import pytest
import torch

from lantern.cli.main import main
from lantern.core.io import load_component, load_state, read_config
from lantern.models.llamagen.transformer import Transformer, TransformerConfig

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


def _refusal(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("lantern: error: "), lines
    return lines[0]


def test_a_converted_folder_loads_as_the_same_model(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _convert(checkpoint, "--grid", "4") == 0
    assert "c2i, 18 tensors" in capsys.readouterr().out
    found = load_component(Transformer, TransformerConfig, checkpoint.parent / "out")
    assert found.config == CONFIG
    for name, tensor in torch.load(checkpoint, weights_only=True)["model"].items():
        assert torch.equal(found.state_dict()[name], tensor)


def test_the_image_size_gives_the_grid(checkpoint: Path) -> None:
    assert _convert(checkpoint, "--image-size", "64", "--kind", "c2i", "--dtype", "bf16") == 0
    assert read_config(checkpoint.parent / "out")["block_size"] == 16
    assert load_state(checkpoint.parent / "out")["norm.weight"].dtype == torch.bfloat16


def test_a_component_is_replaced_only_with_force(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _convert(checkpoint, "--grid", "4") == 0
    capsys.readouterr()
    assert _convert(checkpoint, "--grid", "8") == 2
    assert "replace it with --overwrite" in _refusal(capsys)
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
        (["--grid", "4", "--kind", "t2v"], "did you mean t2i?"),
    ],
)
def test_inconsistent_input_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert _convert(checkpoint, *options) == 2
    assert message in _refusal(capsys)
    assert not (checkpoint.parent / "out").exists()


def test_a_damaged_file_is_refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    assert _convert(checkpoint, "--grid", "4") == 2
    assert "c2i.pt is no whole checkpoint" in _refusal(capsys)


def test_a_read_only_folder_is_a_failure(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint.parent / "out").write_text("a file where the folder should be")
    assert _convert(checkpoint, "--grid", "4") == 1
    assert "out" in _refusal(capsys)
