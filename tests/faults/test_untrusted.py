"""Model folders and checkpoints are untrusted: each damage is one line that names the file; so is another's drafter."""

import json
import os
import shutil
import sys
import tarfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from lantern import LanternPipeline
from lantern.cli.main import main
from lantern.core import io
from lantern.core.io import CONFIG_NAME, SUMS_NAME, WEIGHTS_NAME, load_component, save_component, weights_digest
from lantern.drafters.eagle.networks import Eagle, EagleConfig
from lantern.eval.metrics.pictures import stream
from lantern.generation.generator import generate
from lantern.generation.init_image import with_init_image
from lantern.methods.method import ADD_ONS
from lantern.models.folder import AddOns, Model, load_model
from lantern.models.llamagen.text import checked_folders
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from lantern.models.prediction import try_component
from lantern.training.data import PICTURES, Prepared, Sample, make
from tests.cli.calls import Capture, one_line
from tests.eval.workers import files_of_at_most
from tests.refusals import refused
from tests.tiny import tiny_config, tiny_target
from tests.tiny_parts import tiny_part


@pytest.fixture
def component(tmp_path: Path) -> Path:
    target = tiny_target()
    save_component(target.state_dict(), target.config, tmp_path / "transformer")
    return tmp_path / "transformer"


def load(folder: Path) -> torch.nn.Module:
    return load_component(Transformer, TransformerConfig, folder)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def conversion(tmp_path: Path, state: dict[str, Any], *words: str, **config: int) -> list[str]:
    """Write a checkpoint with its config; return the words with which it is converted."""
    torch.save(state, tmp_path / "x.pt")
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = [str(tmp_path / name) for name in ("x.pt", "out", "config.json")]
    return [*names[:2], "--grid", "4", *words, "--config", names[2]]


def flip(path: Path) -> None:
    """Flip the lowest bit of a number, which stays finite."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_checksums_are_those_of_sha256sum_and_are_compared_unless_files_are_not_verified(component: Path) -> None:
    digest, name = (component / SUMS_NAME).read_text().split()
    assert name == WEIGHTS_NAME and io.read_checksums(component) == {WEIGHTS_NAME: digest}
    save_file({"x": torch.zeros(1)}, component / "other.safetensors")
    io.save_checksums(component)
    assert sorted(io.read_checksums(component)) == [WEIGHTS_NAME, "other.safetensors"]
    save_file({"x": torch.ones(1)}, component / "other.safetensors")
    refused(io.verify_files, component, io.read_checksums(component), match=r"other\.safetensors is damaged")
    flip(component / WEIGHTS_NAME)
    assert load_component(Transformer, TransformerConfig, component, verify=False) is not None
    refused(load, component, match=f"{component}.*is damaged: its SHA-256 is not the one in SHA256SUMS")
    (component / SUMS_NAME).write_text("not a digest\n")
    refused(load, component, match=f"{component}.*is no SHA-256 with a file name")
    (component / SUMS_NAME).unlink()
    assert load(component) is not None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_layer": 10**6}, "n_layer is 1000000, wanted from 1 to 256"),
        ({"dim": 1 << 14, "n_head": 4}, "wanted a head size of at most 1024"),
        ({"dim": 1 << 14, "n_head": 64}, "has shape|is missing"),
        ({"multiple_of": 1 << 16}, "has shape"),
        ({"rope_base": 0}, "rope_base is 0, wanted above 1"),
        ({"norm_eps": -1}, "norm_eps is -1, wanted above 0"),
        ({"cls_token_num": 0}, "cls_token_num is 0, wanted from 1"),
        ({"vocab_size": 7}, "has shape"),
        ({"attn_dropout_p": 1.5}, "attn_dropout_p is 1.5, wanted a number from 0 to 1"),
    ],
    ids=str,
)
def test_a_config_unlike_its_weights_is_refused(component: Path, values: dict[str, Any], message: str) -> None:
    change(component / CONFIG_NAME, **values)
    refused(load, component, match=f"{component}.*({message})")


def test_a_module_that_cannot_be_built_names_its_config(component: Path) -> None:
    def build(config: TransformerConfig) -> Transformer:
        raise RuntimeError("sizes differ")

    message = rf"{component / CONFIG_NAME} describes a module that cannot be built: sizes differ"
    refused(load_component, build, TransformerConfig, component, match=message)


@pytest.mark.parametrize(("field", "value"), [("num_layers", 10**6), ("d_model", -1), ("vocab_size", "x")])
def test_sizes_of_a_text_encoder_are_bounded(tmp_path: Path, field: str, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", field: value}))
    (tmp_path / "model.safetensors").touch()
    refused(checked_folders, tmp_path, None, match=rf"config\.json: {field} is {value}, wanted from 1 to")


def test_a_conversion_that_cannot_be_written_names_the_file(tmp_path: Path, capsys: Capture) -> None:
    arguments = conversion(tmp_path, {"model": tiny_target().state_dict()}, n_head=tiny_target().config.n_head)
    with files_of_at_most(8192):
        code = main(["convert", *arguments])
    error = capsys.readouterr().err
    assert code == 1 and error.count("\n") == 1 and not (tmp_path / "out").exists()
    assert f"{tmp_path / 'out' / WEIGHTS_NAME}: cannot be written: " in error and "large" in error


@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_a_conversion_is_tried(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    made: Any = tiny_target()
    own, words, state, component = {}, (), {"model": made.state_dict()}, "transformer"
    if kind == "drafter":
        made = Eagle(EagleConfig.for_target(made.config, form="rows"))
        own, words, state, component = {"cls_token_num": 6}, ("--kind", "drafter"), made.state_dict(), "drafter"
    arguments = conversion(tmp_path, state, *words, n_head=made.config.n_head, **own)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("shapes do not match")

    with monkeypatch.context() as patched:
        patched.setattr(type(made), "forward", broken)
        assert main(["convert", *arguments]) == 2
    assert "does not run" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(["convert", *arguments]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [SUMS_NAME, CONFIG_NAME, WEIGHTS_NAME]
    try_component(tmp_path / "out", component)


@pytest.mark.parametrize("kind", ["missing", "folder", "link"])
def test_an_add_on_without_its_config_is_refused_by_file(tmp_path: Path, kind: str) -> None:
    part = tiny_part("c2t", target := tiny_target())
    save_component(part.state_dict(), part.config, folder := tmp_path / "parts" / "c2t")
    found = AddOns(tmp_path, target, model_name="toy")
    assert list(found) == ["c2t"] and "radar" not in found
    (path := folder / CONFIG_NAME).unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "nowhere")
    refused(found.__getitem__, "c2t", match=f"cannot read {path}")


def test_no_class_that_an_index_names_is_imported(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copied / "hostile.py").write_text("raise SystemExit('executed')")
    monkeypatch.syspath_prepend(copied)
    change(copied / "model_index.json", **{name: ["hostile", "Model"] for name in ("vqvae", "text_encoder", "extra")})
    pipe = LanternPipeline.from_pretrained(copied)
    assert pipe.vqvae is not None and pipe.text_encoder is not None and "hostile" not in sys.modules


def remove_norm(path: Path) -> None:
    state = load_file(path)
    del state["encoder.final_layer_norm.weight"]
    save_file(state, path, metadata={"format": "pt"})
    io.save_checksums(path.parent)


def lose_end(path: Path) -> None:
    """Take away a token of the template around each text, on which the Rust code panics."""
    words = json.loads(path.read_text())
    words["post_processor"]["special_tokens"] = {}
    path.write_text(json.dumps(words))


def add_word(path: Path) -> None:
    words = json.loads(path.read_text())
    words["model"]["vocab"]["zebra"] = 1000
    path.write_text(json.dumps(words))


TEXT = f"text_encoder/{WEIGHTS_NAME}"
name_code = partial(change, auto_map={"AutoTokenizer": ["hostile.T", None]})
CODED = ("tokenizer/tokenizer_config.json", "text_encoder/config.json")
PIPES = ("drafter/config.json", "vqvae/config.json", "model_index.json", "drafter/SHA256SUMS")
LINKS = ("transformer", "vqvae", "text_encoder", "drafter")


@pytest.mark.parametrize("read", [load_model, LanternPipeline.from_pretrained])
@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        *((file, name_code, "names code to run") for file in CODED),
        (TEXT, flip, "is damaged"),
        (TEXT, lambda path: os.truncate(path, 1 << 36), "is not a complete safetensors file"),  # it is not hashed
        (TEXT, remove_norm, "tensor 'encoder.final_layer_norm.weight' is missing"),
        ("tokenizer/tokenizer.json", add_word, "has tokens up to 1000, the text encoder 11"),
        ("tokenizer/tokenizer.json", lose_end, "holds no tokenizer that loads"),
        # it is not waited for
        *((file, lambda path: (path.unlink(), os.mkfifo(path)), "regular file") for file in PIPES),
        # a link to nothing is not taken for a component that is left out
        *((name, lambda path: (shutil.rmtree(path), path.symlink_to("nowhere")), "") for name in LINKS),
    ],
)
def test_damage_of_a_folder_is_refused_by_file(
    copied: Path, file: str, damage: Callable[[Path], object], message: str, read: Callable[[Path], object]
) -> None:
    damage(copied / file)
    refused(read, copied, match=f"{copied / file}.*{message}")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {"kind": "x"}) for name in sorted(set(ADD_ONS) - {"small"})),
        *(("eagle1", {"block_size": 46340**2}), ("eagle1", {"ffn_dim": 10**9}), ("eagle1", {"rope_base": 0})),
        *(("eagle1", {"norm_eps": -1}), ("eagle1", {"cls_token_num": -1}), ("poss", {"depths": 10**9})),
        *(("medusa", {"vocab_size": 10**9}), ("vertical", {"dim": 10**9}), ("sam", {"pictures": 10**9})),
        ("fr-spec", {"vocab_size": 10**9}),
    ],
    ids=str,
)
def test_another_kind_or_size_of_an_add_on_is_refused(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    entry, part = ADD_ONS[name], tiny_part(name, tiny_target())
    save_component(part.state_dict(), part.config, tmp_path / "part")
    change(tmp_path / "part" / CONFIG_NAME, **changes)
    message = f"kind is .x.*wanted.*{part.config.kind}" if "kind" in changes else next(iter(changes))
    refused(load_component, entry.module, entry.config, tmp_path / "part", match=rf"config\.json: .*{message}")


@pytest.mark.parametrize("name", ["vqvae", "text_encoder"])
def test_a_missing_component_is_named_by_its_folder(copied: Path, name: str) -> None:
    shutil.rmtree(copied / name)
    with pytest.raises(ValueError, match=rf"{copied / name} is missing"):
        list(generate(load_model(copied), ["a red apple"], method="plain"))


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
def test_a_drafter_of_other_sizes_is_refused_by_name(copied: Path, changes: dict[str, int], output: str) -> None:
    put_drafter(copied, **changes)
    for load in (load_model, LanternPipeline.from_pretrained):
        text = refused(load, copied, match="trained for another one.*lantern train --help.*--method plain")
        begins = f"drafter {copied / 'drafter'} {output}, but model toy has 24 tokens of width 32, 16 per"
        assert text.startswith(begins)


def test_the_command_refuses_a_wrong_drafter_that_its_method_reads(
    copied: Path, capsys: Capture, tmp_path: Path
) -> None:
    put_drafter(copied, vocab_size=30)
    words = ["generate", "--model", str(copied), "--prompt", "a red apple", "--tokens", str(tmp_path / "t.json")]
    assert main([*words, "--quiet", "--method", "eagle1"]) == 2
    assert one_line(capsys).startswith(f"lantern: error: drafter {copied / 'drafter'} drafts 30 tokens")
    for method in ("plain", "auto"):  # without a profile, auto chooses among windows
        assert main([*words, "--quiet", "--method", method]) == 0


def test_a_drafter_is_loaded_unless_it_was_trained_for_other_weights(copied: Path) -> None:
    own, other = weights_digest(io.load_state(copied / "transformer")), weights_digest(tiny_target(seed=9).state_dict())
    for digest in (None, own):
        change(copied / "drafter" / CONFIG_NAME, target=digest)
        for dtype in ("fp32", "bf16"):
            assert load_model(copied, dtype=dtype).drafter is not None
            assert LanternPipeline.from_pretrained(copied, dtype=dtype).drafter is not None
    change(copied / "drafter" / CONFIG_NAME, target=other)
    for load in (load_model, LanternPipeline.from_pretrained):
        text = refused(load, copied, match="--method plain")
        assert str(copied / "drafter") in text
        assert f"digest {other[:12]}, but that of model toy is {own[:12]}" in text
    assert load_model(copied, parts=("text",)).drafter is None


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


def test_an_image_in_postscript_starts_no_program(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *given: started.append(given))
    path = tmp_path / "000000.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n")
    with tarfile.open(tmp_path / PICTURES, "w") as tar:
        tar.add(path, path.name)
    assert make(Sample("a", path.read_bytes(), ("a",)), 8, "train") == "a: not an image that can be read"
    refused(Prepared(tmp_path, [], "").images, match="a member is no image")
    refused(with_init_image, model, [], init_image=path, keep_rows=1, match=f"{path}: wanted a PNG, JPEG")
    refused(lambda: list(stream([path], {})), match="its format is not recognised")
    assert started == []


def test_a_prepared_image_that_claims_too_many_pixels_is_refused(tmp_path: Path) -> None:
    Image.new("1", (8, 8)).save(path := tmp_path / "000000.png")
    content = path.read_bytes()
    head = b"IHDR" + (60_000).to_bytes(4, "big") * 2 + content[24:29]
    path.write_bytes(content[:12] + head + zlib.crc32(head).to_bytes(4, "big") + content[33:])
    with tarfile.open(tmp_path / PICTURES, "w") as tar:
        tar.add(path, path.name)
    refused(Prepared(tmp_path, [], "").images, match="a member is no image")
