"""Training of a drafter at toy size: what is learned, the cache of what its teacher reads, and the losses."""

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from PIL import Image
from torch import Tensor

from lantern.core.io import load_component, read_config, save_component, weights_digest
from lantern.drafters.base import Examples, Prediction
from lantern.drafters.eagle.networks import Eagle, EagleConfig
from lantern.methods.method import ADD_ONS
from lantern.training.drafter import DrafterConfig, DrafterTask, FeatureCache, Teacher, load_kind, new_module
from lantern.training.loop import LoopConfig, run_loop
from lantern.training.losses import Draft, Objective, acceptance, feature_regression
from tests.models.test_checkpoint import released_drafter
from tests.refusals import refused
from tests.tiny import tiny_eagle, tiny_target, tiny_teacher
from tests.training.drawings import logged

LOOP = LoopConfig(steps=60, warmup=5, precision="fp32", log_every=30, evaluate_every=60)
CONFIG = DrafterConfig(loop=LOOP, batch=8, lr=1e-2, unroll=3, pictures=32, held_out=4)
LEARNING = replace(CONFIG, lr=4e-3, pictures=104, held_out=8)
LEARNERS: dict[str, tuple[dict[str, Any], int]] = {
    "eagle1": ({}, 3),
    "parallelspec": ({"depths": 3, "anchors": 6}, 3),
    "medusa": ({"depths": 3}, 3),
    "medusa without the token": ({"depths": 3, "reads_token": False}, 3),
    "vertical": ({"depths": 3}, 4),
    "vispec": ({"recent": 1}, 3),
}


def kept(teacher: Teacher, pictures: int) -> Any:
    """Return a source of a teacher's images that keeps them in memory."""
    tensors = teacher.read(list(range(pictures)))
    return SimpleNamespace(read=lambda numbers: {name: x[list(numbers)] for name, x in tensors.items()})


def task_of(pictures: int = 8, config: DrafterConfig = CONFIG, module: Any = None) -> DrafterTask:
    """A task whose tiny target's images are kept, of a new module unless one is given."""
    target = tiny_target()
    module = module or new_module(config.kind, target, config.model, seed=0)
    return DrafterTask(config, target, kept(tiny_teacher(target, module.reads), pictures), module)


@pytest.mark.parametrize("name", LEARNERS)
def test_drafters_learn_every_depth(name: str, tmp_path: Path) -> None:
    (fields, depths), kind = LEARNERS[name], name.split()[0]
    task = task_of(104, replace(LEARNING, kind=kind, model=fields)).eval()
    before, begun = task.evaluate(), [weight.detach().clone() for weight in task.parameters()]
    assert [key for key in before if key.startswith("accepted")] == [f"accepted_{i + 1}" for i in range(depths)]
    run_loop(task, replace(LOOP, steps=40, warmup=0), out=tmp_path)
    after = task.evaluate()
    rises = [after[f"accepted_{i + 1}"] - before[f"accepted_{i + 1}"] for i in range(depths)]
    # Tokens further ahead hardly follow from what is known, in a target of random weights.
    assert rises[0] > 0.06 and min(rises) > 0.02, rises
    moved = zip(begun, task.parameters(), strict=True)
    assert not any(torch.equal(old, weight) for old, weight in moved if weight.requires_grad and weight.numel())
    made: Any = load_kind(kind, tmp_path / "drafter", task.target)
    assert made.config == task.drafter.config
    assert made.config.target == read_config(tmp_path / "drafter")["target"] == weights_digest(task.target.state_dict())


def test_wider_drafts_hit_the_sample_of_the_target_more_often() -> None:
    figures = task_of().evaluate()
    for depth in (1, 2, 3):
        narrow, wide, wider = (figures[f"hits{width}_{depth}"] for width in (1, 4, 8))
        assert 0 < narrow < wide < wider <= 1
    first, second, third = (figures[f"accepted_{depth}"] for depth in (1, 2, 3))
    assert figures["tokens"] == pytest.approx(1 + first + first * second + first * second * third)


@pytest.mark.parametrize(
    ("kind", "model"),
    [("poss", {"depths": 5, "per_layer": 1}), ("medusa", {"depths": 4}), ("parallelspec", {"depths": 4})],
)
def test_a_training_that_leaves_layers_or_heads_untrained_is_refused(kind: str, model: dict[str, Any]) -> None:
    config = replace(CONFIG, kind=kind, model=model)
    refused(task_of, config=config, match=rf"unroll is 3, wanted at least {model['depths']}")
    refused(task_of, config=replace(CONFIG, unroll=16), match="unroll is 16, wanted fewer than the 16 tokens")


def test_a_drafter_that_is_the_target_is_always_accepted_and_always_hits() -> None:
    task = task_of()

    def exact(examples: Examples, depths: int) -> list[Prediction]:
        places = {depth: torch.arange(depth, 16) for depth in range(1, depths + 1)}
        return [Prediction(depth, at, examples.guided[:, at]) for depth, at in places.items()]

    task.drafter.training_predictions = exact  # type: ignore[method-assign]
    figures = task.evaluate()
    for depth in (1, 2, 3):
        assert figures[f"accepted_{depth}"] == pytest.approx(1.0, abs=1e-5)
        assert figures[f"hits1_{depth}"] == 1.0


def test_predictions_without_values_or_of_no_depth_are_refused() -> None:
    task = task_of()
    places, shown = torch.arange(1, 16), r"logits of shape \[1, 3, 4\] at depth 2, wanted \["
    wrong: dict[str, list[Prediction]] = {
        "no rows, logits or features at depth 1": [Prediction(1, places)],
        r"depths \[\], wanted 1 to 3": [],
        r"depths \[0\], wanted 1 to 3": [Prediction(0, places, torch.zeros(4, 15, 32))],
        shown: [Prediction(2, places, logits=torch.zeros(1, 3, 4))],
    }
    for reason, made in wrong.items():
        task.drafter.training_predictions = lambda *_, made=made: made  # type: ignore[method-assign]
        refused(task.evaluate, match=f"predicted {reason}")


@torch.no_grad()
def test_teacher_reads_what_one_pass_over_the_prompt_and_all_tokens_reads() -> None:
    target = tiny_target(n_layer=6)
    read = tiny_teacher(target, ("layers", "prompt")).read([0, 1])
    tokens, mask, words = read["tokens"].long(), read["mask"], read["words"].float()
    assert read["layers"].shape == (2, 2, 3, 16, 32) and read["prompt"].shape == (2, 2, 5, 32)
    valid = torch.nn.functional.pad(mask, (0, 15), value=True)
    seen = torch.tril(valid[:, None] | ~valid[:, :, None])  # padding sees padding alone
    for row, embed in enumerate((target.cls_embedding, target.cls_embedding.unconditional)):
        inputs = torch.cat([embed(words), target.tok_embeddings(tokens[:, :-1])], dim=1)
        entered: dict[int, Tensor] = {2: inputs, 3: inputs}
        features = target.features(inputs, torch.arange(21)[None], seen, entered=entered)
        expected = {"rows": features[:, 5:], "prompt": features[:, :5]}
        expected["layers"] = torch.stack([entered[layer][:, 5:] for layer in (2, 3, 3)], 1)
        for name, tensor in expected.items():  # in bf16
            torch.testing.assert_close(read[name][:, row].float(), tensor, atol=3e-2, rtol=3e-2)


def released(folder: Path) -> None:
    """A drafter in the names and the config of LANTERN's releases."""
    torch.manual_seed(3)
    folder.mkdir()
    torch.save({name: 0.1 * x for name, x in released_drafter(32, 96, 24).items()}, folder / "pytorch_model.bin")
    fields = {"hidden_size": 32, "num_attention_heads": 2, "vocab_size": 24, "block_size": 16, "cls_token_num": 6}
    (folder / "config.json").write_text(json.dumps(fields))


def test_a_released_drafter_is_fine_tuned_with_its_own_sizes(tmp_path: Path) -> None:
    released(tmp_path / "released")
    target = tiny_target()
    module = load_kind("eagle1", tmp_path / "released", target)
    assert module.config.form == "rows" and module.reads == {"prompt"}  # type: ignore[union-attr]
    loop = replace(LOOP, steps=40, log_every=1, evaluate_every=40)
    run_loop(task_of(32, replace(CONFIG, loop=loop, lr=3e-3), module), loop, out=tmp_path / "run")
    losses = [line["loss"] for line in logged(tmp_path / "run", "loss")]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    tuned = load_component(Eagle, EagleConfig, tmp_path / "run" / "drafter")
    assert tuned.config.form == "rows" and tuned.config.cls_token_num == 5
    assert tuned.config.target == weights_digest(target.state_dict())
    again = load_kind("eagle1", tmp_path / "run" / "drafter", target)
    assert again.config == tuned.config


def test_a_drafter_for_another_target_or_kind_is_refused(tmp_path: Path) -> None:
    released(tmp_path / "released")
    wide = tiny_target(vocab_size=48)
    refused(load_kind, "eagle1", tmp_path / "released", wide, match="vocab_size is 24, wanted 48 as the target has")
    other = tmp_path / "other"
    module = tiny_eagle(tiny_target())
    save_component(module.state_dict(), {**dataclasses.asdict(module.config), "kind": "medusa"}, other)
    assert "of kind medusa, wanted eagle1" in refused(load_kind, "eagle1", other, tiny_target())
    assert "did you mean 'eagle1'" in refused(load_kind, "eagle-1", other, tiny_target())
    for model, message in {
        ("dims", 8): "config: unknown key 'model.dims'; did you mean 'dim'",
        ("layers", "two"): "config: model.layers is 'two', wanted int",
        ("vocab_size", 48): "config: model: vocab_size is 48, wanted 24 as the target has",
    }.items():
        refused(new_module, "eagle1", tiny_target(), dict([model]), seed=0, match=message)
    with patch.dict(ADD_ONS, own=replace(ADD_ONS["medusa"], name="own")):
        refused(new_module, "own", tiny_target(), {}, seed=0, match='MedusaConfig has kind "medusa", wanted "own"')


def test_settings_out_of_range_are_refused() -> None:
    bad: list[dict[str, Any]] = [{name: 0} for name in ("batch", "shard", "unroll", "held_out")]
    for changes in bad:
        refused(replace, CONFIG, **changes, match="is 0, wanted a number from 1")
    bad = [{"acceptance": 0, "cross_entropy": 0, "regression": 0}, {"fade": 0}, {"regression": -1}]
    for changes in bad:
        refused(Objective, **changes, match="wanted")
    assert "wanted more than the 4 held out" in refused(replace, CONFIG, pictures=4)
    assert replace(CONFIG, pictures=0, source="online").pictures == 0
    assert "a drafter learns distributions" in refused(replace, CONFIG, temperature=0.0)


def test_a_sample_is_a_map_of_acceptance_for_each_depth(tmp_path: Path) -> None:
    task_of().sample(tmp_path / "sample.png")
    with Image.open(tmp_path / "sample.png") as sheet:
        assert sheet.size == (3 * 32 + 8, 36)
        corners = [
            [sheet.getpixel((2 + 34 * depth + 8 * x, 2 + 8 * y)) for x, y in ((0, 0), (1, 0), (0, 1))]
            for depth in (0, 2)
        ]
    black = (0, 0, 0)
    assert corners[0][0] == black != corners[0][1] and corners[1][:2] == [black, black]


def filled(folder: Path, teacher: Teacher) -> FeatureCache:
    cache = FeatureCache(folder, pictures=12, shard=5)
    cache.fill(teacher)
    return cache


@pytest.mark.parametrize("reads", [(), ("prompt",), ("layers", "prompt")])
def test_cache_holds_the_output_of_the_teacher(tmp_path: Path, reads: tuple[str, ...]) -> None:
    teacher = tiny_teacher(tiny_target(), reads)
    cache = filled(tmp_path, teacher)
    numbers = [11, 0, 7, 7, 4]
    read, output = cache.read(numbers), teacher.read(numbers)
    assert read.keys() == output.keys() == {"tokens", "mask", "words", "rows", *reads}
    assert torch.equal(read["tokens"], output["tokens"])
    for name in output:
        assert read[name].shape == output[name].shape and read[name].dtype == output[name].dtype
        torch.testing.assert_close(read[name].float(), output[name].float(), atol=2e-2, rtol=2e-2)


def test_files_are_as_large_as_announced_and_must_fit_the_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = tiny_teacher(tiny_target(), ("layers",))
    filled(tmp_path, teacher)
    held = sum(path.stat().st_size for path in tmp_path.iterdir())
    found = re.search(r"12 images, ([\d.]+)kB to write, .* free", capsys.readouterr().err)
    assert found and 0 <= held - 1000 * float(found[1]) < 1024 * 3 + 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    message = r"do not fit on a disk with 1.05MB left.*online"
    refused(filled, tmp_path / "cache", tiny_teacher(tiny_target()), match=message)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_stopped_build_continues_with_the_first_missing_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, read, teacher = list[int](), Teacher.read, tiny_teacher(tiny_target())

    def watched(teacher: Teacher, numbers: Sequence[int]) -> dict[str, Tensor]:
        if len(made) >= 3:  # the first is for the size
            raise KeyboardInterrupt
        made.append(len(numbers))
        return read(teacher, numbers)

    monkeypatch.setattr(Teacher, "read", watched)
    with pytest.raises(KeyboardInterrupt):
        filled(tmp_path, teacher)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000.safetensors", "00001.safetensors"]
    made.clear()
    cache = filled(tmp_path, teacher)
    assert made == [1, 2]
    assert len(cache.read(list(range(12)))["tokens"]) == 12


def test_online_batches_are_fresh_and_repeatable_and_noise_is_added_to_what_the_drafter_reads_alone() -> None:
    target, cpu = tiny_target(), torch.device("cpu")
    noisy, module = replace(CONFIG, source="online", pictures=0, noise=0.1), new_module("eagle1", target, {}, seed=0)
    task = DrafterTask(noisy, target, tiny_teacher(target), module)
    (examples, rows), again, second, other = (task.batch(*at, cpu) for at in ((0, 0), (0, 0), (1, 0), (0, 1)))
    assert torch.equal(rows, again[1])
    assert torch.equal(examples.tokens, again[0].tokens) and torch.equal(examples.rows, again[0].rows)
    assert not any(torch.equal(examples.tokens, of.tokens) for of in (second[0], other[0]))
    added = rows - examples.rows
    assert torch.allclose(replace(examples, rows=rows).guided - examples.guided, added[:, 0], atol=1e-5)
    assert 0.099 < added.max() <= 0.1001 and -0.1001 <= added.min() < -0.099 and abs(added.mean()) < 0.005
    (clean, *_), (read, *_) = task._draft(examples), task._draft(examples, rows)
    assert torch.equal(clean.p, read.p) and not torch.equal(clean.log_q, read.log_q)
    eagle3 = new_module("eagle3", target, {}, seed=0)
    with pytest.raises(ValueError, match="noise is 0.1, wanted 0: eagle3 reads layers"):
        DrafterTask(replace(noisy, kind="eagle3"), target, tiny_teacher(target), eagle3)


P = torch.tensor([0.5, 0.3, 0.2, 0.0])
Q = torch.tensor([0.25, 0.25, 0.25, 0.25])


def loss_of(objective: Objective, p: Tensor, log_q: Tensor) -> Tensor:
    """The loss of distributions, without features to regress."""
    examples: Any = None
    return objective.of(Draft(Prediction(1, torch.tensor([1])), p, log_q), examples)


def test_acceptance_is_one_minus_total_variation_and_regression_linear_far() -> None:
    assert float(acceptance(P, Q.log())) == pytest.approx(1 - 0.5 * float((P - Q).abs().sum()))
    assert float(acceptance(P, P.log())) == pytest.approx(1.0)
    assert float(loss_of(Objective(cross_entropy=0), P, Q.log())) == pytest.approx(-math.log(0.7))
    expected = torch.zeros(2, 4)
    output = torch.tensor([[0.5] * 4, [3.0] * 4])
    assert feature_regression(output, expected).tolist() == pytest.approx([0.125, 2.5])


def test_tokens_that_are_never_drafted_reduce_acceptance_alone() -> None:
    logits = torch.tensor([1.0, 0.5, -torch.inf, -torch.inf], requires_grad=True)
    log_q = logits.log_softmax(-1)
    q = log_q.exp().detach()
    share, entropy = float(acceptance(P, log_q).detach()), float(-(P[:2] * q[:2].log()).sum())
    assert share <= 0.8 + 1e-6
    objective = Objective(acceptance=2.0)
    expected = pytest.approx(-2 * math.log(share) + 0.1 * entropy)
    assert float(loss_of(objective, P, log_q).detach()) == expected
    (grad,) = torch.autograd.grad(loss_of(objective, P, logits.log_softmax(-1)), logits)
    assert torch.isfinite(grad).all() and grad[:2].abs().min() > 0
    assert torch.isfinite(loss_of(objective, torch.tensor([1.0, 0.0]), torch.tensor([-torch.inf, 0.0])))
