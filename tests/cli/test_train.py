import inspect
import re
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from lantern.cli.main import main
from lantern.methods.method import ADD_ONS
from lantern.training import stages
from lantern.training.stages import STAGES, Stage, StageOptions, find_recipe
from tests.cli.calls import Capture, one_line, printed, record_stages, refused_by, unread_stdout
from tests.refusals import refused

EMOJI = find_recipe("emoji")
RECIPES = list(stages.find_recipes().values())
EVERY_STAGE = [*STAGES.items(), *(item for recipe in RECIPES for item in recipe.stages.items())]
EVERY_CONFIG = sorted(
    path for folder in (stages.CONFIGS, *(r.configs for r in RECIPES)) for path in folder.glob("*.json")
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return record_stages(monkeypatch)


@pytest.mark.parametrize(("name", "stage"), EVERY_STAGE)
def test_options_of_a_stage_are_the_keywords_of_its_function(name: str, stage: Stage) -> None:
    _, *keywords = inspect.signature(stage.load()).parameters.values()
    names = {keyword.name for keyword in keywords}  # of its config are the length of a training and the kind
    assert names == {"out", *stage.options} - {*stages.LENGTH, "kind"}
    required = {keyword.name for keyword in keywords if keyword.default is inspect.Parameter.empty}
    assert required == {"out", *stage.required.split()}
    assert set(stage.options) <= {*StageOptions.OPTIONS}.union(*(recipe.options.OPTIONS for recipe in RECIPES))
    assert stage.is_training == ("loop" in get_type_hints(get_type_hints(stage.load())["config"])) and stage.summary


@pytest.mark.parametrize("path", EVERY_CONFIG, ids=lambda path: path.stem)
def test_every_committed_config_loads(path: Path) -> None:
    if path.stem.startswith("all-"):
        return  # tests/training/test_own_pictures.py
    recipe = next((recipe for recipe in RECIPES if path.is_relative_to(recipe.configs)), None)
    stages.read_config(get_type_hints(stages.find_stage(path.stem.split("-")[0], recipe).load())["config"], path)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_stage_is_called_with_its_config_and_options_and_the_first_process_of_torchrun_prints_its_result(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture, rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    folder = str(tmp_path)
    given = ["--data", folder, "--vq", folder, "--text-encoder", folder, "--steps", "7", "--decay", "3"]
    assert main(["train", "target", "--config", "target-small", "--out", folder, *given]) == 0
    ((_, config, options),) = calls
    assert options == dict.fromkeys(("out", "data", "vq", "text_encoder"), tmp_path)
    assert (config.loop.steps, config.loop.decay) == (7, 3) and config.batch == 32
    assert bool(capsys.readouterr().out) == (rank == "0")
    for stage in ("data", "all"):  # whose files each process would write
        message = f"stage {stage} runs in one process, got 2: start it without torchrun"
        assert message in refused_by(capsys, "train", stage, "--out", folder)


@pytest.mark.parametrize("arguments", [["--config", "data-emoji"], ["--recipe", "emoji"], ["--config", "mine.json"]])
def test_a_recipe_is_found_by_name_by_its_config_and_by_the_source_of_a_data_config(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.json").write_text('{"source": "emoji", "concepts": ["list.txt"]}')
    assert main(["train", "data", "--packages", "p", "--out", "o", *arguments]) == 0
    ((function, config, _),) = calls
    assert function == "recipes.emoji.dataset:prepare"
    assert config.concepts[0] == (
        tmp_path / "list.txt" if "mine.json" in arguments else EMOJI.configs / "concepts-core.txt"
    )


def test_a_stage_of_a_missing_recipe_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.setattr(stages, "RECIPES", tmp_path / "recipes")
    assert stages.find_recipes() == {}
    for arguments, message in (
        (["text", "--config", "text-emoji"], "invalid choice: 'text'"),
        (["data", "--recipe", "emoji"], "come with a clone of lantern, installed with pip install -e"),
        (["data", "--config", "data-emoji"], "come with a clone of lantern"),
    ):
        assert message in refused_by(capsys, "train", *arguments, "--out", str(tmp_path))
    assert "come with a clone of lantern" in " ".join(printed(capsys, "train", "--help").split())
    monkeypatch.undo()
    for name in (str(EMOJI.configs.parent), "photos/../emoji", ""):  # a recipe is named by its folder alone
        refused(find_recipe, name, match="is not in")


def test_commands_of_parts_name_configs_that_need_no_recipe() -> None:
    configs = [re.findall(r"--config (\S+)", part.command) for part in ADD_ONS.values()]
    assert all((stages.CONFIGS / f"{name}.json").is_file() for names in configs for name in names) and any(configs)


def test_a_kind_names_its_config_and_fits_it(calls: list[Any], tmp_path: Path, capsys: Capture) -> None:
    folder = str(tmp_path)
    given = ["train", "drafter", "--out", folder, "--data", folder, "--target", folder, "--text-encoder", folder]
    assert main([*given, "--kind", "eagle3"]) == 0
    assert calls[0][1].kind == "eagle3" and "kind" not in calls[0][2]
    assert main([*given, "--kind", "eagle9"]) == 2
    assert main(given) == 2
    policy = ["train", "policy", "--out", folder, "--records", folder]
    for words, config, other in ((given, "drafter-eagle1", "medusa"), (policy, "policy-radar", "c2t")):
        assert f"got --kind {other}" in refused_by(capsys, *words, "--config", config, "--kind", other)


def test_a_step_is_run_though_nobody_reads_its_name(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = ["--only", "data", "--path", str(tmp_path), "--out", str(tmp_path / "o")]
    with unread_stdout(monkeypatch):
        assert main(["train", "all", "--config", "small", *given]) == 0
    assert len(calls) == 1


@pytest.mark.parametrize("stage", ["all", "policy"])
def test_a_missing_package_is_reported(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    (tmp_path / "given").mkdir()
    given = ["--config", "small", "--path"] if stage == "all" else ["--kind", "c2t", "--records"]
    assert main(["train", stage, *given, str(tmp_path / "given"), "--out", str(tmp_path / "out")]) == 1
    line = one_line(capsys)
    assert "import of accelerate halted" in line and "; in the clone" in line and not (tmp_path / "out").exists()
