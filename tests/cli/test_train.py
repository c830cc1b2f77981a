import inspect
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lantern.cli import train
from lantern.cli.main import main
from lantern.training import stages
from lantern.training.stages import CONFIGS, OPTIONS, STAGES, find_config, find_recipe, find_recipes, find_stage

EMOJI = find_recipe("emoji")
RECIPES = list(find_recipes().values())
EVERY_STAGE = [*STAGES.items(), *(item for recipe in RECIPES for item in recipe.stages.items())]
EVERY_CONFIG = sorted(path for folder in (CONFIGS, *(r.configs for r in RECIPES)) for path in folder.glob("*.json"))


@pytest.mark.parametrize(("name", "stage"), EVERY_STAGE)
def test_options_of_a_stage_are_the_keywords_of_its_function(name: str, stage: stages.Stage) -> None:
    module = import_module(stage.module)
    parameters = inspect.signature(getattr(module, stage.function)).parameters
    _, *keywords = parameters.values()
    names = {keyword.name for keyword in keywords}
    assert names == {"out", *stage.options} | ({"progress"} if stage.reports_progress else set())
    required = {keyword.name for keyword in keywords if keyword.default is inspect.Parameter.empty}
    assert required == {"out", *stage.required}
    known = {*OPTIONS}.union(*(recipe.options for recipe in RECIPES))
    assert {*stage.options} <= known
    assert callable(getattr(module, stage.config_class).load)


@pytest.mark.parametrize("path", EVERY_CONFIG, ids=lambda path: path.stem)
def test_every_committed_config_loads(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if path.stem.startswith("all-"):
        return  # tests/training/test_own_pictures.py
    recipe = next((recipe for recipe in RECIPES if path.is_relative_to(recipe.configs)), None)
    stage = find_stage(path.stem.split("-")[0], recipe)
    getattr(import_module(stage.module), stage.config_class).load(path)
    assert capsys.readouterr().err == ""


def test_a_stage_is_called_with_its_config_and_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []
    fake = SimpleNamespace(
        train=lambda config, **options: calls.append({"config": config} | options),
        TargetConfig=SimpleNamespace(load=lambda path: path.name),
    )
    monkeypatch.setattr(train, "import_module", lambda name: fake)
    (tmp_path / "mine.json").write_text("{}")
    folder = str(tmp_path)
    given = ["--data", folder, "--vq", folder, "--text-encoder", folder, "--steps", "7"]
    assert main(["train", "target", "--config", str(tmp_path / "mine.json"), "--out", folder, *given]) == 0
    folders = {"out": tmp_path, "data": tmp_path, "vq": tmp_path, "text_encoder": tmp_path}
    assert calls == [{"config": "mine.json", "steps": 7} | folders]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tokeniser"], "did you mean tokenizer?"),
        (["target", "--steps", "-1"], "wanted a whole number from 0"),
        (["target"], "stage target needs --data"),
        (["data", "--vq", "."], "stage data takes no --vq; it takes --path"),
        (["target", "--data", "no-such-folder"], "does not exist"),
        (["data", "--recipe", "emojis"], "recipe 'emojis' is not in"),
        (["text"], "stage text needs --packages"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert main(["train", *arguments, "--config", str(tmp_path / "x.json"), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--config", "data-emoji"], ["--recipe", "emoji"], ["--config", "mine.json"]])
def test_a_recipe_is_found_by_name_by_its_config_and_by_the_source_of_a_data_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    calls: list[tuple[str, Any]] = []

    def fake(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            prepare=lambda config, **options: calls.append((name, config)),
            EmojiConfig=SimpleNamespace(load=lambda path: path.stem),
        )

    monkeypatch.setattr(train, "import_module", fake)
    monkeypatch.chdir(tmp_path)
    Path("mine.json").write_text('{"source": "emoji"}')
    assert main(["train", "data", "--packages", "p", "--out", "o", *arguments]) == 0
    assert calls == [("recipes.emoji.dataset", "mine" if "mine.json" in arguments else "data-emoji")]


def test_without_recipes_a_stage_of_one_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages, "RECIPES", tmp_path / "recipes")
    assert find_recipes() == {}
    given = ["--out", str(tmp_path)]
    for arguments in (
        ["text", "--config", "text-emoji"],
        ["data", "--recipe", "emoji"],
        ["data", "--config", "data-emoji"],
    ):
        assert main(["train", *arguments, *given]) == 2
        error = capsys.readouterr().err
        assert "come with a clone of lantern" in error and error.count("\n") == 1


def test_a_kind_names_its_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    fake = SimpleNamespace(
        train=lambda config, **options: calls.append((config, options["kind"])),
        DrafterConfig=SimpleNamespace(load=lambda path: path.stem),
    )
    monkeypatch.setattr(train, "import_module", lambda name: fake)
    folder = str(tmp_path)
    given = ["train", "drafter", "--out", folder, "--data", folder, "--target", folder, "--text-encoder", folder]
    assert main([*given, "--kind", "eagle1"]) == 0
    assert calls == [("drafter-eagle1", "eagle1")]
    assert main([*given, "--kind", "eagle9"]) == 2
    assert main(given) == 2


def test_a_config_of_another_kind_is_refused(tmp_path: Path) -> None:
    from lantern.training.drafter import DrafterConfig
    from lantern.training.drafter import train as train_drafter

    config, here = DrafterConfig.load(find_config("drafter-eagle1")), tmp_path
    with pytest.raises(ValueError, match="trains kind eagle1, got --kind medusa"):
        train_drafter(config, out=here, data=here, target=here, text_encoder=here, kind="medusa")


def test_data_preparation_reports_progress(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(config: object, *, out: Path, progress: Any) -> str:
        progress(3, 0)
        progress(5, 10)
        return "5 images"

    fake = SimpleNamespace(prepare=prepare, DataConfig=SimpleNamespace(load=lambda path: None))
    monkeypatch.setattr(train, "import_module", lambda name: fake)
    (tmp_path / "x.json").write_text("{}")
    folder = str(tmp_path)
    assert main(["train", "data", "--config", f"{folder}/x.json", "--out", folder]) == 0
    assert "5 images" in capsys.readouterr().out


def test_the_error_for_a_misspelt_config_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean tokenizer-emoji"):
        find_config("tokenizer-emoij")


def test_a_committed_config_is_found_by_name() -> None:
    assert find_config("tokenizer-emoji") == EMOJI.configs / "tokenizer-emoji.json"


def test_help_of_a_stage_has_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["policy", "--help"], ["--out", "target", "policy", "-h"]):
        assert main(["train", *arguments]) == 0
        text = capsys.readouterr().out
        assert "Stage policy: train a tree policy" in text and "--records" in text and "required" in text
        assert not any(f"--{name.replace('_', '-')} " in text for name in set(OPTIONS) - set(STAGES["policy"].options))
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name} " in text and stage.summary in text for name, stage in STAGES.items() if stage.summary)
    assert all(stage.summary for stage in STAGES.values())


def test_a_missing_package_is_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lantern.training.loop.find_spec", lambda name: None)
    (tmp_path / "photos").mkdir()
    out = tmp_path / "out"
    assert main(["train", "all", "--config", "small", "--path", str(tmp_path / "photos"), "--out", str(out)]) == 1
    assert "No module named 'accelerate'; in the clone" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize("stage", ["all", "tokenizer"])
def test_a_time_of_no_minutes_is_refused(stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = [stage, "--config", "small" if stage == "all" else "tokenizer-small", "--minutes", "0"]
    assert main(["train", *call, "--out", str(tmp_path / "out")]) == 2
    assert "--minutes is 0, wanted a number above 0" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_help_without_recipes_says_where_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "find_recipes", lambda: {})
    assert main(["train", "--help"]) == 0
    assert "recipes come with a clone of lantern" in " ".join(capsys.readouterr().out.split())
