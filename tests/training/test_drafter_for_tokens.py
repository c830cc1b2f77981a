"""Drafters for targets of transformers: trained on both guidance rows, and exact when they draft."""

import json
import shutil
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lantern.cli.main import main
from lantern.core.sampling import Sampling
from lantern.decoding.cache import prefill, read_tokens
from lantern.drafters.base import fused_layers
from lantern.drafters.eagle.drafter import FrequencyConfig, FrequencyTable
from lantern.drafters.eagle.networks import Eagle
from lantern.generation.generator import build_decoder, generate
from lantern.models.folder import load_model
from lantern.training.data import Record
from lantern.training.drafter import DrafterConfig, DrafterTask, Teacher, find_kind, for_tokens, new_module, train
from lantern.training.loop import LoopConfig
from lantern.training.losses import Objective
from tests import tiny_transformers as tiny
from tests.refusals import refused
from tests.training.drawings import prepared

CASES = {"janus": None, "emu3": (24, 24)}  # and their sizes
KINDS = ("eagle1", "eagle3", "poss", "medusa", "parallelspec", "vertical")
UNROLL = {"poss": 5, "medusa": 4, "vertical": 4, "parallelspec": 8}  # all specialists and heads are trained
PROMPTS = ["a red apple", "the sky"]
LOOP = LoopConfig(steps=2, warmup=1, decay=1, precision="fp32", evaluate_every=2, log_every=1)


@cache
def target_and_text(name: str, size: tuple[int, int] | None = None) -> tuple[Any, Any]:
    """The target of a tiny model, for square images unless there is a size, and what reads its prompts."""
    parts = tiny.assemble(name, words=tiny.processor(name), size=size or CASES[name])
    return parts.target, parts.text


def task_of(target: Any, text: Any, **changes: Any) -> DrafterTask:
    """A task whose teacher generates images at guidance 4 when they are needed."""
    config = DrafterConfig(loop=LOOP, batch=2, pictures=8, held_out=2, guidance=4.0, unroll=2, **changes)
    teacher = Teacher(target, text.condition, PROMPTS, sampling=config.sampling, seed=0)
    config = for_tokens(config, target)
    return DrafterTask(config, target, teacher, new_module(config.kind, target, config.model, seed=0))


def drawings(folder: Path) -> Path:
    """Prepared data of four images with captions."""
    captions = ("a red apple", "a blue ring", "the sky", "a ring of the sky")
    records = (Record(0, ((caption, 1.0),), "plain", (), "", "train") for caption in captions)
    return prepared(folder, ((np.zeros((16, 16, 3), np.uint8), record) for record in records))


def trained(name: str, place: Path) -> Path:
    """A model folder with the drafters that the command trains for it."""
    folder, data, size = tiny.save(name, place / name), drawings(place / "data"), CASES[name]
    settings = {"loop": asdict(LOOP), "batch": 2, "pictures": 8, "held_out": 2, "lr": 0.01, "scales": [3, 5]}
    for kind in KINDS:
        (place / "config.json").write_text(json.dumps({"kind": kind, "unroll": UNROLL.get(kind, 2), **settings}))
        call = ["train", "drafter", "--config", str(place / "config.json"), "--data", str(data)]
        call += ["--target", str(folder), "--out", str(place / kind), "--cache", str(place / "cache")]
        call += [] if size is None else ["--size", f"{size[1]}x{size[0]}"]
        assert main(call) == 0
        shutil.copytree(place / kind / "drafter", folder / find_kind(kind).folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_trained_drafters_give_the_tokens_of_plain_decoding(name: str, tmp_path: Path) -> None:
    """A head that is not linear, and one that is."""
    model = load_model(trained(name, tmp_path), size=CASES[name])
    assert model.drafter is not None and model.drafter.config.form == "rows" and model.drafter.config.target is None
    add_ons: Any = model.add_ons
    assert [add_ons[kind].config.kind for kind in KINDS[1:]] == list(KINDS[1:])
    assert add_ons["poss"].config.form == "rows"
    how: dict[str, Any] = {"sampling": Sampling(guidance=1.0, top_k=8), "with_pixels": False, "batch": 2}
    plain, *drafted = (
        [picture.tokens.tolist() for picture in generate(model, PROMPTS, method=method, **how)]
        for method in ("plain", *KINDS, "eagle2")
    )
    assert drafted == [plain] * 7
    for method in ("lantern", "lantern++"):  # on the proximity table of the model's own codebook
        how = {"sampling": Sampling(guidance=4.0), "settings": {"k": 8}, "with_pixels": False}
        (found,) = generate(model, PROMPTS[:1], method=method, **how)
        assert found.statistics.latent_distance is not None and not found.statistics.is_exact


def test_heads_are_trained_for_grids_that_are_not_square(tmp_path: Path) -> None:
    target, text = target_and_text("emu3", (24, 32))
    task = task_of(target, text, kind="medusa", model={"depths": 2})
    task(*task.batch(0, 0, torch.device("cpu")))["loss"].backward()
    assert all(weight.grad is not None for weight in task.drafter.parameters())
    task.sample(tmp_path / "maps.png")
    with Image.open(tmp_path / "maps.png") as sheet:  # two maps of 3 x 4 tokens, 8 pixels each
        assert sheet.size == (2 * 32 + 6, 24 + 4)


def test_fr_spec_needs_a_linear_head() -> None:
    target, _ = target_and_text("janus")
    eagle: Any = new_module("eagle1", target, {"form": "rows"}, seed=0).eval()
    add_ons = {"eagle1": eagle, "fr-spec": FrequencyTable(FrequencyConfig(vocab_size=40))}
    message = "FR-Spec scores rows of a linear head, which this model lacks"
    refused(build_decoder, "fr-spec", target, sampling=Sampling(guidance=4.0), add_ons=add_ons, match=message)


def test_tapped_layers_are_those_of_sequential_passes() -> None:
    """Of a prompt, of tokens and of newlines behind them, against the library's hidden states without a cache."""
    (target, text), taps = target_and_text("emu3"), fused_layers(2)
    assert_close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
    condition = text.condition(PROMPTS)
    tokens = torch.randint(24, (2, 8), generator=torch.Generator().manual_seed(0))
    prompt, cache = prefill(target, condition, 2, stage=0, taps=taps)
    read, _ = read_tokens(target, cache, tokens, taps=taps)
    for image in range(2):
        for row in range(2):
            words = condition.tokens[image, row][condition.mask[image, row]]
            with torch.no_grad():
                whole, ends = tiny.sequential(target, words, tokens[image].tolist(), output_hidden_states=True)
            layers = torch.cat([whole.hidden_states[layer] for layer in taps], -1)[0]
            assert_close(prompt.tapped[image, row, -1], layers[len(words) - 1])
            assert_close(read.tapped[image, row], layers[ends])
            assert_close(read.features[image, row], whole.last_hidden_state[0, ends])


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_features_of_the_teacher_give_the_distribution_of_the_tokens(name: str) -> None:
    """Janus's head is not linear: guided features would have other logits."""
    (target, text), sampling = target_and_text(name), Sampling(guidance=4.0)
    task = task_of(target, text)
    examples = task._examples([0, 1], torch.full((2,), 4.0), torch.device("cpu"))
    guided = sampling.guide(target.head(examples.rows.flatten(0, 1)).unflatten(0, (2, 2)), examples.tokens)
    torch.testing.assert_close(task._logits(examples.rows, examples), guided)
    is_linear = torch.allclose(target.head(examples.guided), guided, atol=1e-3)
    assert is_linear == (name == "emu3")
    assert isinstance(task.drafter, Eagle)
    draft, *_ = task._draft(examples)
    torch.testing.assert_close(draft.p.sum(-1), torch.ones(2, draft.p.shape[1]))
    found = sampling.log_probs(target.head(examples.rows.flatten(0, 1)).unflatten(0, (2, 2)), examples.tokens)
    torch.testing.assert_close(draft.p, found[:, 1:].exp())


def test_what_cannot_be_trained_is_refused(folder: Path, tmp_path: Path) -> None:
    base = DrafterConfig(loop=LOOP)
    (target, text), (emu3, _) = target_and_text("janus"), target_and_text("emu3")
    guided = DrafterConfig(loop=LOOP, model={"form": "guided"}, objective=Objective(regression=0.1))
    refused(for_tokens, guided, target, match='form is "guided", wanted "rows": the head of this target is not linear')
    assert for_tokens(guided, emu3) == guided and for_tokens(base, emu3).model == {"form": "rows"}
    heads = replace(guided, kind="medusa", model={})
    assert for_tokens(heads, emu3).objective.regression == 0.1
    assert for_tokens(heads, target).objective.regression == 0
    given = (Teacher, target, text.condition, PROMPTS)
    message = "reads prompt, which targets of transformers do not give"
    refused(*given, sampling=Sampling(), seed=0, reads={"prompt"}, match=message)
    refused(*given, sampling=Sampling(guidance=1.0), seed=0, match=r"guidance is 1\.0, wanted above 1")
    wide, _ = target_and_text("emu3", (24, 32))
    refused(new_module, "eagle3", wide, {}, seed=0, match="block_size is 12, wanted a perfect square")
    data = drawings(tmp_path / "data")
    refused(train, base, out=tmp_path / "out", data=data, target=folder / "transformer", match="give --text-encoder")
