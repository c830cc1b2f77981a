"""The command that writes tables of tokens writes add-ons that the model reads."""

from pathlib import Path

import pytest
import torch

from lantern.cli.main import main
from lantern.decoding.plain import generate
from lantern.drafters.eagle.fr_spec import FrequencyTable
from lantern.drafters.lookup.tables import SamTables
from lantern.models.folder import load_model
from lantern.models.llamagen.text import TextEncoder
from tests.cli.calls import refused_by


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


def test_wrong_tables_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.json").write_text('{"kind": "sam", "groups": 0}')
    given = ["--prompts", str(tmp_path), "--out", str(tmp_path / "out")]
    line = refused_by(capsys, "train", "tables", "--config", str(tmp_path / "c.json"), *given)
    assert "groups 0, batch 16: wanted at least 1" in line
