"""Drafters for targets of transformers: trained on both guidance rows, and exact when they draft."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lantern.cli.main import main
from lantern.core.sampling import Sampling
from lantern.drafters.eagle.eagle1 import Eagle
from lantern.generation.generator import generate
from lantern.models.folder import load_model
from lantern.training.drafter import DrafterConfig, DrafterTask, for_tokens, train
from lantern.training.loop import LoopConfig
from lantern.training.teacher import TokenTeacher
from tests import tiny_transformers as tiny
from tests.tiny_folder import save_tiny_model

CASES: dict[str, Any] = {
    "janus": (tiny.tiny_janus, tiny.janus_processor, None),
    "emu3": (tiny.tiny_emu3, tiny.emu3_processor, (24, 24)),
}
PROMPTS = ["a red apple", "the sky"]
LOOP = LoopConfig(steps=2, warmup=1, decay=1, precision="fp32", evaluate_every=2, log_every=1)


def drawings(folder: Path) -> Path:
    """Prepared data of four noise pictures with captions."""
    folder.mkdir()
    for i, caption in enumerate(("a red apple", "a blue ring", "the sky", "a ring of the sky")):
        pixels = np.random.default_rng(i).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(caption)
    config = folder.with_suffix(".json")
    config.write_text(json.dumps({"source": "folder", "size": 16, "held_out": 0.0}))
    data = folder.with_name("data")
    assert main(["train", "data", "--config", str(config), "--path", str(folder), "--out", str(data)]) == 0
    return data


def trained(name: str, place: Path, *, steps: int) -> Path:
    """A model folder with the drafter that the command trains for it."""
    make, processor, size = CASES[name]
    folder = tiny.save(name, make(), processor(), place / name)
    loop = {"steps": steps, "warmup": 1, "decay": 5, "precision": "fp32", "evaluate_every": steps, "log_every": steps}
    settings = {"loop": loop, "batch": 4, "pictures": 16, "held_out": 4, "unroll": 2, "lr": 0.01, "scales": [3, 5]}
    (place / "config.json").write_text(json.dumps({"kind": "eagle1", **settings}))
    call = ["train", "drafter", "--config", str(place / "config.json"), "--data", str(drawings(place / "drawings"))]
    call += ["--target", str(folder), "--out", str(place / "out")]
    call += [] if size is None else ["--size", f"{size[1]}x{size[0]}"]
    assert main(call) == 0
    shutil.copytree(place / "out" / "drafter", folder / "drafter")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_trained_drafter_gives_the_codes_of_plain_decoding(name: str, tmp_path: Path) -> None:
    size = CASES[name][2]
    model = load_model(trained(name, tmp_path, steps=12), size=size)
    assert model.drafter is not None and model.drafter.config.form == "rows" and model.drafter.config.target is None
    for sampling in (Sampling(guidance=4.0), Sampling(guidance=1.0, top_k=8), Sampling(guidance=4.0, temperature=0)):
        how: dict[str, Any] = {"sampling": sampling, "with_pixels": False, "batch": 2}
        expected = [picture.codes.tolist() for picture in generate(model, PROMPTS, method="plain", **how)]
        for method in ("eagle1", "woven"):
            found = list(generate(model, PROMPTS, method=method, **how))
            assert [picture.codes.tolist() for picture in found] == expected
    for method in ("lantern", "lantern++"):  # on the proximity table of the model's own codebook
        how = {"sampling": Sampling(guidance=4.0), "settings": {"k": 8}, "with_pixels": False}
        (found,) = generate(model, PROMPTS[:1], method=method, **how)
        assert found.statistics.latent_distance is not None and not found.statistics.is_exact


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_features_of_the_teacher_give_the_distribution_of_the_codes(name: str) -> None:
    """Janus's head is not linear: guided features would have other logits."""
    make, processor, size = CASES[name]
    parts = tiny.assemble(name, make(), processor(), size)
    assert parts.text is not None
    sampling = Sampling(guidance=4.0)
    teacher = TokenTeacher(parts.target, parts.text, PROMPTS, sampling=sampling, seed=0)
    config = for_tokens(DrafterConfig(loop=LOOP, batch=2, pictures=8, held_out=2, guidance=4.0, unroll=2))
    task = DrafterTask(config, parts.target, teacher)
    examples = task._examples([0, 1], torch.full((2,), 4.0), torch.device("cpu"))
    guided = sampling.guide(parts.target.head(examples.rows.flatten(0, 1)).unflatten(0, (2, 2)), examples.codes)
    torch.testing.assert_close(task._logits(examples.rows, examples), guided)
    is_linear = torch.allclose(parts.target.head(examples.guided), guided, atol=1e-3)
    assert is_linear == (name == "emu3")
    assert isinstance(task.drafter, Eagle)
    (draft, _), *_ = task._draft(examples)
    torch.testing.assert_close(draft.p.sum(-1), torch.ones(2, draft.p.shape[1]))
    found = sampling.log_probs(parts.target.head(examples.rows.flatten(0, 1)).unflatten(0, (2, 2)), examples.codes)
    torch.testing.assert_close(draft.p, found[:, 1:].exp())


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    base = DrafterConfig(loop=LOOP)
    with pytest.raises(ValueError, match='wanted eagle1 in form "rows" for this target'):
        for_tokens(DrafterConfig(loop=LOOP, model={"form": "guided"}))
    with pytest.raises(ValueError, match="kind is medusa"):
        for_tokens(DrafterConfig(loop=LOOP, kind="medusa"))
    assert for_tokens(base).model == {"form": "rows"}
    parts = tiny.assemble("janus", tiny.tiny_janus(), tiny.janus_processor())
    assert parts.text is not None
    with pytest.raises(ValueError, match=r"guidance is 1\.0, wanted above 1"):
        TokenTeacher(parts.target, parts.text, PROMPTS, sampling=Sampling(guidance=1.0), seed=0)
    data, model = drawings(tmp_path / "drawings"), save_tiny_model(tmp_path / "toy")
    with pytest.raises(ValueError, match=r"give the folder of its text encoder \(--text-encoder\)"):
        train(base, out=tmp_path / "out", data=data, target=model / "transformer")
