"""A target is trained from tokens and captions alone, with the same weights as from images."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lantern.cli.main import main
from lantern.core.io import load_state, save_component
from lantern.models.llamagen.vqvae import VQVAE
from lantern.training.data import Prepared
from lantern.training.features import picture_tokens
from lantern.training.loop import LoopConfig
from lantern.training.tokenizer import TokenizerConfig, TokenizerTask
from tests.tiny import tiny_config
from tests.tiny_folder import VQ, tiny_text_encoder

TEXT = ["--text-encoder", "text", "--tokenizer", "words"]
CAPTIONS = ("a red apple", "a blue cat", "two dog")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepared images with white backgrounds, a tokenizer, a text encoder and a config, in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for i in range(9):
        picture = np.full((8, 8, 3), 255, np.uint8)
        picture[3:, 3:5] = (90 + 10 * i, 20 * i, 40)
        Image.fromarray(picture).save(f"photos/{i}.png")
        Path(f"photos/{i}.txt").write_text(CAPTIONS[i % 3])
    Path("data.json").write_text('{"source": "folder", "size": 8, "held_out": 0.2}')
    assert main(["train", "data", "--config", "data.json", "--path", "photos", "--out", "data"]) == 0
    torch.manual_seed(0)
    save_component(VQVAE(VQ).state_dict(), VQ, "vqvae")
    tiny_text_encoder().save_pretrained("text", "words")
    model = vars(tiny_config()) | {"n_layer": 1}
    loop = {"steps": 3, "precision": "fp32", "warmup": 1}
    settings = {"batch": 2, "slots": 6, "unify_background": True, "corruption": 0.4, "corruption_neighbours": 4}
    Path("target.json").write_text(json.dumps({"model": model, "loop": loop} | settings))
    return tmp_path


def command(stage: str, *words: str) -> list[str]:
    return ["train", stage, "--config", "target.json", *words]


def test_tokens_of_background_patches_are_stored_by_their_sign(place: Path) -> None:
    vq, prepared = VQVAE(VQ).eval(), Prepared.open("data")
    plain = picture_tokens(vq, prepared, vq_folder=Path("vqvae"), cache=Path("cache"), unify=False)
    shutil.rmtree("photos")
    Path("data/pictures.tar").unlink()
    Path("data/pictures.npy").unlink()
    unified = picture_tokens(vq, prepared, vq_folder=Path("vqvae"), cache=Path("cache"), unify=True)
    assert plain.min() >= 0 and unified.min() >= 0
    changed = (plain != unified).any(0).view(4, 4)
    assert not changed[1:, 1:3].any()  # patches with ink keep their tokens
    assert len(unified[:, 3].unique()) == 1  # the patches of a white corner get one token


def test_a_target_trains_from_tokens_without_images(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("target", "--data", "data", "--vq", "vqvae", *TEXT, "--out", "whole")) == 0
    Path("copy").mkdir()
    for path in ("data/records.jsonl", "data/summary.json", next(Path("whole").glob("tokens-*"))):
        shutil.copy(path, "copy")
    assert main(command("target", "--data", "copy", "--vq", "vqvae", *TEXT, "--out", "again")) == 0
    whole, again = load_state("whole/transformer"), load_state("again/transformer")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert again["output.weight"].dtype == torch.bfloat16
    torch.manual_seed(1)
    save_component(VQVAE(VQ).state_dict(), VQ, "other")
    capsys.readouterr()
    assert main(command("target", "--data", "copy", "--vq", "other", *TEXT, "--out", "run")) == 2
    assert "copy has no pictures.tar, and no tokens of its images by this tokenizer" in capsys.readouterr().err
    assert main(command("target", "--data", "data", "--vq", "vqvae", "--out", "run")) == 2
    assert "give --text-encoder" in capsys.readouterr().err


def test_parts_of_other_sizes_are_refused_in_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = ["--data", "data", "--vq", "vqvae", "--out"]
    assert main(command("target", *target, "whole", *TEXT)) == 0
    tiny_text_encoder(16).save_pretrained("wide", "words")
    drafter = [
        "train",
        "drafter",
        "--kind",
        "eagle1",
        "--data",
        "data",
        "--target",
        "whole/transformer",
        "--out",
        "run",
    ]
    wide = ["--text-encoder", "wide", "--tokenizer", "words"]
    for words, message in (
        (command("target", *target, "run", *TEXT, "--init", "vqvae"), "vqvae: tensor 'cls_embedding"),
        ([*drafter, *wide], "wide has embeddings of width 16, wanted that of width 8"),
        ([*drafter, *TEXT, "--size", "8x8"], "whole/transformer makes images of one size: omit --size"),
    ):
        capsys.readouterr()
        assert main(words) == 2
        assert message in capsys.readouterr().err
    Path("data.json").write_text('{"source": "folder", "size": 9}')
    assert main(["train", "data", "--config", "data.json", "--path", "photos", "--out", "odd"]) == 0
    with pytest.raises(ValueError, match="images are 9 pixels wide, wanted a multiple of 2"):
        TokenizerTask(TokenizerConfig(VQ, LoopConfig(1)), Prepared.open("odd"), None)


def test_weights_of_a_text_encoder_may_be_in_several_files(place: Path) -> None:
    given = ["--data", "data", "--vq", "vqvae", "--tokenizer", "words"]
    tiny_text_encoder().model.save_pretrained("sharded", max_shard_size="1KB")
    assert len(list(Path("sharded").glob("*.safetensors"))) > 1
    for text in ("text", "sharded"):
        assert main(command("target", *given, "--text-encoder", text, "--out", f"by-{text}")) == 0
    whole, sharded = load_state("by-text/transformer"), load_state("by-sharded/transformer")
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)
