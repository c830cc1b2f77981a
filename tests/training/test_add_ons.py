"""Training of tree policies, and tables of tokens: add-ons that a model reads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lantern.cli.main import main
from lantern.core.io import load_component
from lantern.decoding.plain import generate
from lantern.drafters.eagle.drafter import FrequencyTable
from lantern.drafters.lookup import SamTables
from lantern.drafters.policies import C2T, TRAITS, C2TConfig, Radar, RadarConfig
from lantern.drafters.records import Records
from lantern.models.folder import load_model
from lantern.models.llamagen.text import TextEncoder
from lantern.training.loop import LoopConfig
from lantern.training.policy import PolicyConfig, RadarTask, train
from tests.cli.calls import Capture, refused_by
from tests.refusals import refused
from tests.training.drawings import logged

LOOP = LoopConfig(steps=150, warmup=5, decay=50, precision="fp32", log_every=50, evaluate_every=150)


def records(drafts: int = 600, seed: int = 0) -> Records:
    """Chains of three nodes; the acceptance of a node depends on the entropy of its parent's distribution alone.

    Beams indicate the length of a draft: at depth d they are near 0 if its node at depth d + 1 will be accepted.
    """
    generator = torch.Generator().manual_seed(seed)
    entropy = torch.rand(drafts, 3, generator=generator) * 4
    taken = torch.rand(drafts, 3, generator=generator) < torch.sigmoid(4 - 2 * entropy)
    on_way = taken.cumprod(1).bool()
    tested = torch.cat([torch.ones(drafts, 1, dtype=torch.bool), on_way[:, :-1]], 1)
    traits = torch.randn(drafts, 4, len(TRAITS), generator=generator) * 0.3 - 1.0
    traits[:, 1:, TRAITS.index("entropy")] = entropy
    traits[:, :, TRAITS.index("match")] = -1.0
    beams = torch.where(on_way[:, 1:, None], -0.1, -6.0) + 0.1 * torch.randn(drafts, 2, 4, generator=generator)
    root = torch.zeros(drafts, 1, dtype=torch.bool)
    chain = torch.tensor([[0, 0, 1, 2]]).expand(drafts, -1)
    return Records(
        parents=chain,
        depths=torch.arange(4).expand(drafts, -1),
        ranks=torch.zeros_like(chain),
        is_tested=torch.cat([root, tested], 1),
        is_taken=torch.cat([root, tested & taken], 1),
        start=torch.arange(drafts) % 16,
        length=on_way.sum(1),
        picture=torch.arange(drafts) // 60,
        traits=traits,
        beams=beams,
        about={"target": "digest", "method": "eagle2"},
    )


def test_classifier_learns_what_acceptance_depends_on(tmp_path: Path) -> None:
    records().save(tmp_path / "r.safetensors")
    config = PolicyConfig(LOOP, model={"hidden": 8}, batch=64, lr=0.02)
    train(config, out=tmp_path / "out", records=tmp_path / "r.safetensors")
    reported = logged(tmp_path / "out", "held_out_auc")[-1]
    assert reported["held_out_auc"] > 0.85 and reported["held_out_auc_of_scores"] == 0.5
    assert reported["held_out_loss"] < reported["held_out_loss_of_scores"] and reported["held_out_calibration"] < 0.1
    part = load_component(C2T, C2TConfig, tmp_path / "out" / "c2t")
    assert part.config.target == "digest"
    traits = torch.zeros(2, len(TRAITS)) - 1.0
    traits[:, TRAITS.index("entropy")] = torch.tensor([0.5, 3.5])
    sure, doubtful = torch.sigmoid(part(traits)).tolist()
    assert sure > 0.8 and doubtful < 0.3


def test_radar_learns_to_stop_from_the_beam(tmp_path: Path) -> None:
    records().save(tmp_path / "r.safetensors")
    config = PolicyConfig(LOOP, kind="radar", model={"beam": 4, "hidden": 8}, batch=64, lr=0.02, nodes=4)
    train(config, out=tmp_path / "out", records=tmp_path / "r.safetensors")
    reported = logged(tmp_path / "out", "held_out_speed")[-1]
    assert reported["held_out_speed"] > 1.02 * reported["held_out_speed_of_best_depth"]
    assert reported["held_out_speed_of_best_depth"] >= reported["held_out_speed_of_all_depths"]
    part = load_component(Radar, RadarConfig, tmp_path / "out" / "radar")
    assert part.config.target == "digest" and part.config.beam == 4


def test_best_depth_falls_with_the_cost_of_a_pass(tmp_path: Path) -> None:
    config, steps = PolicyConfig(LOOP, kind="radar", model={"beam": 4, "hidden": 8}, nodes=4), []
    for level in (0.0, 3.0):
        task = RadarTask(replace(config, node_cost=0.5, level_cost=level), records())
        assert task._times.tolist() == [2.5 + level * depth for depth in (1, 2, 3)]
        steps.append(task.evaluate()["steps_of_best_depth"])
    assert steps == [3, 1]


def test_command_trains_and_refuses_unusable_records_and_configs(tmp_path: Path, capsys: Capture) -> None:
    file, out = tmp_path / "r.safetensors", str(tmp_path / "out")
    records(60).save(file)
    given = ["train", "policy", "--records", str(file), "--out", out, "--kind"]
    assert main([*given, "c2t", "--steps", "3", "--decay", "0"]) == 0
    assert (tmp_path / "out" / "c2t" / "model.safetensors").is_file()
    for model, message in {("beam", 4): "unknown key 'model.beam'", ("hidden", "x"): "model.hidden is 'x'"}.items():
        refused(train, PolicyConfig(LOOP, model=dict([model])), out=tmp_path / "other", records=file, match=message)
    replace(records(60), traits=None, beams=None, about={"method": "eagle1"}).save(file)
    assert "eagle1 records no traits of nodes" in refused_by(capsys, *given, "c2t")
    refused(PolicyConfig, LOOP, kind="c3t", match="policy kind is 'c3t'")
    for name, low in {"batch": 1, "nodes": 2, "lr": 0, "curiosity": 0, "node_cost": 0, "level_cost": 0}.items():
        bad: dict[str, Any] = {name: low - 1}
        refused(PolicyConfig, LOOP, **bad, match=f"{name} is {low - 1}, wanted a number from {low} on")
    refused(PolicyConfig, LOOP, lr=0.0, match="lr is 0, wanted above 0")
    (tmp_path / "c.json").write_text('{"kind": "sam", "groups": 0}')
    given = ["--prompts", str(tmp_path), "--out", out, "--config", str(tmp_path / "c.json")]
    assert "groups is 0, wanted a number from 1 on" in refused_by(capsys, "train", "tables", *given)


def test_tables_are_those_of_the_tokens_that_the_model_samples(copied: Path, tmp_path: Path) -> None:
    folder, prompts, config = copied, tmp_path / "prompts.txt", tmp_path / "sam.json"
    prompts.write_text("a red apple\na cat\ntwo dog\n")
    config.write_text('{"kind": "sam", "groups": 5, "limit": 2}')
    given = ["--model", str(folder), "--prompts", str(prompts), "--out", str(folder / "parts")]
    assert main(["train", "tables", "--kind", "fr-spec", *given]) == 0
    assert main(["train", "tables", "--config", str(config), *given]) == 0
    model = load_model(folder)
    frequent, sam = model.add_ons["fr-spec"], model.add_ons["sam"]
    assert isinstance(frequent, FrequencyTable) and isinstance(sam, SamTables)
    assert isinstance(model.text, TextEncoder)
    condition = model.text.condition(["a red apple", "a cat", "two dog"], slots=model.target.config.cls_token_num)
    keys = [(1000, number) for number in range(3)]
    tokens = generate(model.target, condition, sampling=model.sampling(), keys=keys).tokens
    assert torch.equal(frequent.counts.long(), tokens.flatten().bincount(minlength=len(frequent.counts)))
    assert torch.equal(sam.corpus.long(), tokens[:2].long()) and int(sam.group_of.max()) < 5
