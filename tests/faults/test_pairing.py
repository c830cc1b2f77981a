"""A drafter of another model is refused, with its name and a way out."""

import json
from pathlib import Path

import pytest
import torch

from lantern import LanternPipeline
from lantern.cli.generate import main
from lantern.core.io import load_state, save_component, weights_digest
from lantern.drafters.eagle.networks import Eagle, EagleConfig
from lantern.models.folder import load_model
from tests.cli.calls import Capture, one_line
from tests.refusals import refused
from tests.tiny import tiny_config, tiny_target


@pytest.fixture
def folder(copied: Path) -> Path:
    return copied


def sign(folder: Path, digest: str | None) -> None:
    path = folder / "drafter" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target": digest}))


def put_drafter(folder: Path, **changes: int) -> None:
    drafter = Eagle(EagleConfig.for_target(tiny_config(**changes)))
    save_component(drafter.state_dict(), drafter.config, folder / "drafter")


@pytest.mark.parametrize(
    ("changes", "output"),
    [
        ({"vocab_size": 30}, "drafts 30 tokens of width 32, 16 per image"),
        ({"dim": 48}, "drafts 24 tokens of width 48, 16 per image"),
        ({"block_size": 4}, "drafts 24 tokens of width 32, 4 per image"),
    ],
)
def test_a_drafter_of_other_sizes_is_refused_by_name(folder: Path, changes: dict[str, int], output: str) -> None:
    put_drafter(folder, **changes)
    for load in (load_model, LanternPipeline.from_pretrained):
        text = refused(load, folder, match="trained for another one.*lantern train --help.*--method plain")
        begins = f"drafter {folder / 'drafter'} {output}, but model toy has 24 tokens of width 32, 16 per"
        assert text.startswith(begins)


def test_the_command_refuses_a_wrong_drafter_that_its_method_reads(
    folder: Path, capsys: Capture, tmp_path: Path
) -> None:
    put_drafter(folder, vocab_size=30)
    arguments = ["--model", str(folder), "--prompt", "a red apple", "--tokens", str(tmp_path / "t.json"), "--quiet"]
    assert main([*arguments, "--method", "eagle1"]) == 2
    assert one_line(capsys).startswith(f"lantern: error: drafter {folder / 'drafter'} drafts 30 tokens")
    for method in ("plain", "auto"):  # without a profile, auto chooses among windows
        assert main([*arguments, "--method", method]) == 0


def test_a_drafter_is_loaded_unless_it_was_trained_for_other_weights(folder: Path) -> None:
    own, other = weights_digest(load_state(folder / "transformer")), weights_digest(tiny_target(seed=9).state_dict())
    for digest in (None, own):
        sign(folder, digest)
        for dtype in ("fp32", "bf16"):
            assert load_model(folder, dtype=dtype).drafter is not None
            assert LanternPipeline.from_pretrained(folder, dtype=dtype).drafter is not None
    sign(folder, other)
    for load in (load_model, LanternPipeline.from_pretrained):
        text = refused(load, folder, match="--method plain")
        assert str(folder / "drafter") in text
        assert f"digest {other[:12]}, but that of model toy is {own[:12]}" in text
    assert load_model(folder, parts=("text",)).drafter is None


def test_the_digest_depends_on_values_and_not_on_storage() -> None:
    target = tiny_target()
    half = {name: tensor.bfloat16() for name, tensor in target.state_dict().items()}
    whole = {name: tensor.float() for name, tensor in half.items()}
    assert weights_digest(half) == weights_digest(whole) == weights_digest(target.state_dict())
    for name in whole:
        changed = {**whole, name: whole[name].clone()}
        changed[name].view(-1)[0] += 1.0
        assert weights_digest(changed) != weights_digest(whole)
    assert weights_digest({"a": torch.zeros(2, 3)}) != weights_digest({"a": torch.zeros(3, 2)})
