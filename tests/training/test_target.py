"""Training of the target at toy size: it learns captions from inputs laid out as in decoding."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lantern.cli.main import main
from lantern.core.config import read_json_object
from lantern.core.io import load_component, load_state, load_tensors, save_component
from lantern.core.sampling import Sampling
from lantern.decoding.plain import generate
from lantern.models.llamagen.text import CLASSES_NAME
from lantern.models.llamagen.transformer import Transformer, TransformerConfig, prefix_mask
from lantern.models.llamagen.vqvae import VQVAE
from lantern.training import features as inputs
from lantern.training.data import Prepared, Record
from lantern.training.loop import LoopConfig, run_loop
from lantern.training.target import TargetConfig, TargetTask, grow
from lantern.training.tokenizer import TokenizerConfig, TokenizerTask
from tests.cli.calls import Capture, refused_by
from tests.refusals import refused
from tests.tiny import tiny_config, tiny_target
from tests.tiny_folder import VQ, tiny_text_encoder
from tests.training.drawings import prepared

SLOTS = 4
MODEL = tiny_config(cls_token_num=SLOTS, token_dropout_p=0.0, resid_dropout_p=0.0, ffn_dropout_p=0.0)


def records_of() -> list[Record]:
    """Three images with a caption each; the last one is held out."""
    return [
        Record(image=i, captions=((f"c{i}", 1.0),), kind="plain", concepts=(f"c{i}",), style="flat", split=split)
        for i, split in enumerate(("train", "train", "heldout"))
    ]


def task_of(tmp_path: Path, steps: int, *, has_classes: bool = False, **changes: Any) -> TargetTask:
    """Three captions or classes, each with its own constant image of tokens; the last record is held out."""
    prepared, model = Prepared(tmp_path, records_of(), ""), replace(MODEL, **changes)
    mask = torch.tensor([[False, True, True, True], [True] * 4, [False, False, True, True]])
    features = torch.randn(3, SLOTS, MODEL.caption_dim, generator=torch.Generator().manual_seed(0)) * mask[..., None]
    captions = inputs.Conditions({f"c{i}": i for i in range(3)}, features, mask)
    if has_classes:
        model = replace(MODEL, model_type="c2i", cls_token_num=1, num_classes=3)
        captions = inputs.number_classes(prepared)
    tokens = torch.stack([torch.full((16,), 3 + 5 * i) for i in range(3)]).short()
    loop = LoopConfig(steps=steps, warmup=2, precision="fp32", log_every=50, evaluate_every=steps)
    config = TargetConfig(model=model, loop=loop, batch=8, slots=SLOTS)
    return TargetTask(config, prepared, tokens, captions, VQVAE(VQ))


@pytest.mark.parametrize(("steps", "guidance"), [(100, 1.0), (80, 2.0)], ids=["captions", "classes"])
def test_trained_target_generates_the_pictures_of_its_conditions(tmp_path: Path, steps: int, guidance: float) -> None:
    task = task_of(tmp_path, steps, has_classes=guidance > 1)
    run_loop(task, task.config.loop, out=tmp_path)
    target = load_component(Transformer, TransformerConfig, tmp_path / "transformer")
    condition = task._captions.of(["c1", "c0"])
    made = generate(target, condition, sampling=Sampling(guidance, temperature=0), keys=[(0, 0), (0, 1)])
    assert torch.equal(made.tokens, task._tokens[[1, 0]].long())
    assert len(list((tmp_path / "samples").glob("*.png"))) == 1
    if guidance > 1:
        assert read_json_object(tmp_path / "transformer" / CLASSES_NAME) == {"classes": ["c0", "c1", "c2"]}


def test_unfit_sizes_and_shares_are_refused_before_training(tmp_path: Path) -> None:
    for name, size, fit in (("vocab_size", 32, 24), ("block_size", 4, 16), ("caption_dim", 16, 8)):
        changed: dict[str, Any] = {name: size}
        refused(task_of, tmp_path, 2, **changed, match=f"{name} of the model is {size}, wanted {fit}")
    refused(task_of, tmp_path, 2, cls_token_num=2, match="slots is 4, wanted at most the model's cls_token_num, 2")
    config = task_of(tmp_path, 2).config
    bad: list[tuple[dict[str, Any], str]] = [
        ({"corruption_others": 1.5}, "corruption_others is 1.5, wanted a number from 0 to 1"),
        ({"corruption_others": 0.5, "batch": 1}, "corruption_others needs other images: batch is 1, wanted 2 or more"),
        ({"batch": 0}, "batch is 0, wanted a number from 1 on"),
        ({"kinds": {"plain": 0}}, "wanted weights of kinds: none below 0 and one above"),
        ({"model": replace(MODEL, model_type="c2i", class_dropout_prob=0.0)}, "class_dropout_prob is 0, wanted above"),
    ]
    for changes, message in bad:
        refused(replace, config, **changes, match=message)


def test_batch_is_a_function_of_step_and_rank_without_held_out_pictures(tmp_path: Path) -> None:
    task, cpu = task_of(tmp_path, 10), torch.device("cpu")
    assert {int(token) for step in range(20) for token in task.batch(step, 0, cpu)[2][:, 0]} == {3, 8}
    again = zip(task.batch(3, 0, cpu), task.batch(3, 0, cpu), strict=True)
    assert all(torch.equal(a, b) for a, b in again)
    assert not torch.equal(task.batch(3, 0, cpu)[0], task.batch(3, 1, cpu)[0])


def test_captions_are_chosen_by_their_weights(tmp_path: Path) -> None:
    task = task_of(tmp_path, 10)
    records = [
        replace(record, captions=((f"c{i}", 0.25), ("c2", 0.75)) if i < 2 else ((f"c{i}", 1.0),))
        for i, record in enumerate(records_of())
    ]
    again = TargetTask(task.config, Prepared(tmp_path, records, ""), task._tokens, task._captions, VQVAE(VQ))
    uniforms = torch.linspace(0, 0.999, 200)
    for record in (0, 1):
        features, _, _ = again._examples(torch.full((200,), record), uniforms)
        share = (features == task._captions.features[2]).flatten(1).all(1).float().mean()
        assert share == pytest.approx(0.75, abs=0.02)


def test_corruption_changes_input_tokens_to_near_ones_and_never_the_predicted_ones(tmp_path: Path) -> None:
    task = task_of(tmp_path, 10)
    tokens = torch.full((2, 16), 3)
    given = task._corrupt(tokens, torch.tensor([0.0, 1.0]), torch.Generator().manual_seed(0))
    assert torch.equal(given[0], tokens[0])
    assert set(given[1].tolist()) <= set(task._near[3].tolist())
    assert torch.equal(task.batch(0, 0, torch.device("cpu"))[2], task.batch(0, 0, torch.device("cpu"))[3])


def test_corruption_by_other_pictures_takes_the_token_at_the_same_place(tmp_path: Path) -> None:
    task = task_of(tmp_path, 10)
    task.config = replace(task.config, corruption_others=0.5)
    tokens = torch.stack([torch.full((4000,), 3), torch.arange(4000) % task._near.shape[0]])
    given = task._corrupt(tokens, torch.tensor([1.0, 0.0]), torch.Generator().manual_seed(0))
    assert torch.equal(given[1], tokens[1])
    is_near, is_other = torch.isin(given[0], task._near[3]), given[0] == tokens[1]
    assert (is_near | is_other).all()
    is_distinct = ~torch.isin(tokens[1], task._near[3])
    assert is_other[is_distinct].float().mean() == pytest.approx(0.5, abs=0.05)


def test_the_switch_of_bf16_products_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, seen = task_of(tmp_path, 10), list[bool]()
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed

    def loss(*_: torch.Tensor) -> torch.Tensor:
        seen.append(allowed())
        return torch.ones(1)

    monkeypatch.setattr(task, "_loss", loss)
    task.forward(*task.batch(0, 0, torch.device("cpu")))
    assert seen == [True] and not allowed()


def test_background_patches_are_white_with_their_margin_and_get_their_most_frequent_token() -> None:
    picture = torch.full((1, 3, 16, 16), 255, dtype=torch.uint8)
    picture[:, :, 5, 5] = 0
    background = inputs.background_patches(picture, 4)
    assert background.sum() == 15 and not background[0, 5]
    picture[:, :, 8, 5] = 0  # the margin of patch (1, 1) and within patch (2, 1)
    assert inputs.background_patches(picture, 4).sum() == 14
    tokens = torch.tensor([[7, 7, 9, *range(10, 23)]])
    assert inputs.background_token(tokens, background) == 7


def test_padding_is_visible_to_itself_alone() -> None:
    mask = prefix_mask(torch.tensor([[False, True]]), 2)[0]
    expected = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    assert mask.int().tolist() == expected


@torch.no_grad()
def test_grown_model_has_the_output_of_the_shallow_one() -> None:
    shallow = tiny_target(n_layer=2)
    deep = tiny_target(seed=9, n_layer=5)
    deep.load_state_dict(grow(shallow.state_dict(), 5))
    inputs = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(7)[None].expand(2, -1)
    torch.testing.assert_close(deep(inputs, positions).logits, shallow(inputs, positions).logits)
    refused(grow, deep.state_dict(), 2, match="has 5 layers, wanted at most 2")


def test_classes_are_numbered_by_name_and_each_picture_has_one() -> None:
    captions = {name: ((name, 0.5), (f"a {name}", 0.5)) for name in "ab"}
    named = zip(records_of(), "bab", strict=True)
    records = [replace(record, concepts=(name,), captions=captions[name]) for record, name in named]
    classes = inputs.number_classes(Prepared(Path("data"), records, ""))
    assert classes.names == ("a", "b") and classes.index == {"a": 0, "a a": 0, "b": 1, "a b": 1}
    nameless = Prepared(Path("data"), [replace(records[0], concepts=())], "")
    refused(inputs.number_classes, nameless, match="image 0 has the classes none, wanted one")


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


def target(out: str, *words: str, data: str = "data", vq: str = "vqvae", text: Sequence[str] = TEXT) -> list[str]:
    """The command that trains a target of the working folder."""
    given = ["--data", data, "--vq", vq, *text, "--out", out, *words]
    return ["train", "target", "--config", "target.json", *given]


def test_tokens_of_background_patches_are_stored_by_their_sign(place: Path) -> None:
    vq, prepared = VQVAE(VQ).eval(), Prepared.open("data")
    plain = inputs.picture_tokens(vq, prepared, vq_folder=Path("vqvae"), cache=Path("cache"), unify=False)
    shutil.rmtree("photos")
    Path("data/pictures.tar").unlink()
    Path("data/pictures.npy").unlink()
    unified = inputs.picture_tokens(vq, prepared, vq_folder=Path("vqvae"), cache=Path("cache"), unify=True)
    assert plain.min() >= 0 and unified.min() >= 0
    changed = (plain != unified).any(0).view(4, 4)
    assert not changed[1:, 1:3].any()  # patches with ink keep their tokens
    assert len(unified[:, 3].unique()) == 1  # the patches of a white corner get one token


def test_a_target_trains_from_tokens_without_images_and_by_sharded_text_encoders(place: Path, capsys: Capture) -> None:
    assert main(target("whole")) == 0
    Path("copy").mkdir()
    for path in ("data/records.jsonl", "data/summary.json", next(Path("whole").glob("tokens-*"))):
        shutil.copy(path, "copy")
    tiny_text_encoder().model.save_pretrained("sharded", max_shard_size="1KB")
    assert len(list(Path("sharded").glob("*.safetensors"))) > 1
    sharded = ["--text-encoder", "sharded", "--tokenizer", "words"]
    assert main(target("again", data="copy", text=sharded)) == 0
    whole, again = load_state("whole/transformer"), load_state("again/transformer")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert again["output.weight"].dtype == torch.bfloat16
    torch.manual_seed(1)
    save_component(VQVAE(VQ).state_dict(), VQ, "other")
    message = "copy has no pictures.tar, and no tokens of its images by this tokenizer"
    assert message in refused_by(capsys, *target("run", data="copy", vq="other"))
    assert "give --text-encoder" in refused_by(capsys, *target("run", text=()))
    assert "trained on other data" in refused_by(capsys, *target("whole", text=sharded))


def test_parts_of_other_sizes_and_data_to_hold_out_alone_are_refused_in_one_line(
    place: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")  # else a line says fp32 is taken
    assert main(target("whole")) == 0
    tiny_text_encoder(16).save_pretrained("wide", "words")
    drafter = ["train", "drafter", "--kind", "eagle1", "--data", "data", "--out", "run"]
    drafter += ["--target", "whole/transformer"]
    wide = ["--text-encoder", "wide", "--tokenizer", "words"]
    for words, message in (
        (target("run", "--init", "vqvae"), "vqvae: tensor 'cls_embedding"),
        ([*drafter, *wide], "wide has embeddings of width 16, wanted that of width 8"),
        ([*drafter, *TEXT, "--size", "8x8"], "whole/transformer makes images of one size: omit --size"),
    ):
        assert message in refused_by(capsys, *words)
    Path("few.json").write_text('{"kind": "medusa", "loop": {"steps": 1}, "unroll": 1}')
    message = "unroll is 1, wanted at least 4: it trains all of the drafter"
    assert message in refused_by(capsys, *drafter, *TEXT, "--config", "few.json", "--kind", "medusa")
    assert not list(Path("run").glob("features-*"))  # which take long
    captions = load_tensors(next(Path("run").glob("captions-*")))
    assert captions["mask"].shape[1] == tiny_config().cls_token_num  # as many as generation reads
    prepared(Path("odd"), [(np.zeros((9, 9, 3), np.uint8), records_of()[0])])
    message = "images are 9 pixels wide, wanted a multiple of 2"
    refused(TokenizerTask, TokenizerConfig(VQ, LoopConfig(1)), Prepared.open("odd"), None, match=message)
    refused(TokenizerConfig, VQ, LoopConfig(1), shift=-1, match="shift is -1, wanted a number from 0 on")
    config = json.loads(Path("whole/transformer/config.json").read_text())
    Path("classes").mkdir()
    Path("classes/config.json").write_text(json.dumps(config | {"model_type": "c2i"}))
    message = "classes takes classes, wanted a target that takes captions"
    assert message in refused_by(capsys, *drafter[:-1], "classes", *TEXT)
    lines = Path("data/records.jsonl").read_text()
    Path("data/records.jsonl").write_text(lines.replace('"split": "train"', '"split": "heldout"'))
    message = "data has no images to train on: prepare more of them, or hold out fewer"
    refused(TokenizerTask, TokenizerConfig(VQ, LoopConfig(1)), Prepared.open("data"), None, match=message)
    assert message in refused_by(capsys, *drafter, *TEXT)


def test_files_of_features_are_named_by_all_that_they_are_made_from(place: Path) -> None:
    data = Prepared.open("data")

    def name(slots: int = 6) -> str:
        return inputs.captions_name(Path("text"), Path("words"), data, slots=slots)

    names = [name(), name(7)]
    for file in ("data/records.jsonl", "words/tokenizer.json", "text/config.json", "text/model.safetensors"):
        with open(file, "ab") as end:
            end.write(b"\n")
        names.append(name())
    assert len(set(names)) == len(names) and name() == names[-1]


def test_tokens_above_16_bits_are_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tokens = replace(VQ, codebook_size=40_000), torch.tensor([[0, 32_767, 32_768, 39_999]] * 9)
    monkeypatch.setattr("lantern.training.features.encode", lambda *_: tokens)
    monkeypatch.setattr("lantern.training.features.background_patches", lambda some, _: torch.zeros(len(some), 4) > 0)
    given = {"vq_folder": Path("vqvae"), "cache": Path("cache"), "unify": False}
    assert torch.equal(inputs.picture_tokens(VQVAE(config), Prepared.open("data"), **given).long(), tokens)
