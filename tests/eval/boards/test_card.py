"""The model card's command with the real classes at toy size, and the committed card."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from lantern.core.io import save_component
from lantern.eval.boards import card
from lantern.eval.boards.card import BEGIN, END, insert, render
from lantern.eval.boards.card_figures import FIGURES, count_parameters
from lantern.eval.boards.results import DECISIVE, weight_hashes
from lantern.eval.metrics.efficientnet import EfficientNet
from lantern.models.folder import RECOGNISED_NAME, write_names
from lantern.models.llamagen.text import TextEncoder
from lantern.models.llamagen.vqvae import VQVAE, VQConfig
from lantern.training.data import Record
from tests.tiny import tiny_target
from tests.training.drawings import prepared

ROOT = Path(__file__).resolve().parents[3]
CONCEPTS, STYLES = ("apple", "cat", "dog"), ("3d", "flat", "noto")
WORDS = ["<pad>", "</s>", "<unk>", "a", ",", "style", "fruit", "kitty", *CONCEPTS, *STYLES]
SLOTS = 12


def save_text_encoder(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    torch.manual_seed(0)
    config = T5Config(vocab_size=len(WORDS), d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    TextEncoder(T5EncoderModel(config), fast).save_pretrained(folder / "text_encoder", folder / "tokenizer")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights for images of 8 x 8 pixels."""
    folder = tmp_path_factory.mktemp("model")
    target = tiny_target(cls_token_num=SLOTS)
    save_component(target.state_dict(), target.config, folder / "transformer")
    torch.manual_seed(0)
    config = VQConfig(ch=32, encoder_ch_mult=(1, 1), decoder_ch_mult=(1, 1), z_channels=8, codebook_size=24)
    save_component(VQVAE(config).state_dict(), config, folder / "vqvae")
    save_text_encoder(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three concepts in three styles, one cell of them held out, and a composite."""
    made = []
    generator = torch.Generator().manual_seed(0)
    cells = [(concept, style, "plain") for concept in CONCEPTS for style in STYLES] + [("cat", "flat", "count")]
    for concept, style, kind in cells:
        picture = torch.randint(0, 256, (8, 8, 3), dtype=torch.uint8, generator=generator).numpy()
        split = "heldout" if (concept, style) == ("dog", "noto") else "train"
        captions = ((f"{concept}", 0.3), (f"a {concept}", 0.7))
        made.append((picture, Record(0, captions, kind, (concept,), style, split)))
    return prepared(tmp_path_factory.mktemp("prepared") / "data", made)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / "contact_sheet.txt").write_text("a cat\n\na dog\nan apple\n")
    (folder / "synonyms.json").write_text(json.dumps([{"prompt": "kitty", "concept": "cat"}]))
    return folder


@pytest.fixture(autouse=True)
def judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judging network with random weights: its package is not part of the tests."""
    torch.manual_seed(0)
    network = EfficientNet().eval().requires_grad_(False)
    monkeypatch.setattr(EfficientNet, "from_package", lambda packages: network)


def take(model: Path, data: Path, prompts: Path, out: Path, *more: str) -> int:
    options = ["--model", str(model), "--data", str(data), "--packages", str(data), "--prompts", str(prompts)]
    return card.main([*options, "--device", "cpu", "--out", str(out), "--card", str(out), *more])


RETRIEVED = ("trained", "styled", "heldout", "synonyms", "synonyms_by_name")


def read(out: Path) -> dict:
    return json.loads((out / card.RESULTS_NAME).read_text())


def test_every_figure_is_computed_and_shown(model: Path, data: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"# A card\n{BEGIN}\n{END}\nThe end.\n")
    assert take(model, data, prompts, tmp_path) == 0
    found = read(tmp_path)
    assert tuple(found["figures"]) == card.NAMES
    readme = (tmp_path / "README.md").read_text()
    assert readme == f"# A card\n{BEGIN}\n{render(found)}\n{END}\nThe end.\n"
    for name in card.NAMES:
        assert f"| {name} |" in readme and f"--only {name}" in readme
    assert {path.name for path in tmp_path.glob("*.png")} == {"contact_sheet.png", "nearest_training.png"}


def test_figures_depend_only_on_the_seed(model: Path, data: Path, prompts: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("first", "again", "other")]
    for out, seed in zip(runs, ("3", "3", "4"), strict=True):
        assert take(model, data, prompts, out, "--only", "entropy", "sheet", "--seed", seed) == 0
    first, again, other = (read(out)["figures"] for out in runs)
    assert first == again
    assert first["sheet"]["codes_sha256"] != other["sheet"]["codes_sha256"]


def test_sets_are_counted(model: Path, data: Path, prompts: Path, tmp_path: Path) -> None:
    assert take(model, data, prompts, tmp_path, "--only", "retrieval", "memorisation", "reconstruction") == 0
    figures = read(tmp_path)["figures"]
    counts = {name: figures["retrieval"][name]["n"] for name in RETRIEVED}
    assert counts == {"trained": 3, "styled": 8, "heldout": 1, "synonyms": 1, "synonyms_by_name": 1}
    references = {name: figures["retrieval"][name]["n"] for name in ("reconstructed", "heldout_real")}
    assert references == {"reconstructed": 8, "heldout_real": 1}
    assert figures["retrieval"]["chance_top1"] == round(1 / 3, 5)
    assert figures["memorisation"]["training_pictures"] == 9
    assert figures["memorisation"]["generated"]["n"] == 11
    assert figures["reconstruction"]["heldout_pictures"] == 1


def test_names_whose_images_are_recognised_have_figures_of_their_own(
    model: Path, data: Path, prompts: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model, tmp_path / "listed")
    write_names(folder / RECOGNISED_NAME, ["apple", "dog"])
    assert take(folder, data, prompts, tmp_path, "--only", "retrieval") == 0
    figure = read(tmp_path)["figures"]["retrieval"]
    assert figure["trained_recognised"]["n"] == 2
    assert "synonyms_by_name_recognised" not in figure  # the only synonym is one of "cat"


def test_limit_bounds_every_set(model: Path, data: Path, prompts: Path, tmp_path: Path) -> None:
    assert take(model, data, prompts, tmp_path, "--only", "retrieval", "sheet", "--limit", "2") == 0
    figures = read(tmp_path)["figures"]
    assert (
        figures["retrieval"]["trained"]["n"] == figures["retrieval"]["styled"]["n"] == figures["sheet"]["prompts"] == 2
    )
    assert "--limit 2" in figures["sheet"]["command"]


def test_option_only_keeps_other_figures(model: Path, data: Path, prompts: Path, tmp_path: Path) -> None:
    assert take(model, data, prompts, tmp_path, "--only", "loss") == 0
    before = read(tmp_path)["figures"]["loss"]
    assert take(model, data, prompts, tmp_path, "--only", "size") == 0
    assert read(tmp_path)["figures"]["loss"] == before


def test_figures_of_other_weights_are_dropped(model: Path, data: Path, prompts: Path, tmp_path: Path) -> None:
    assert take(model, data, prompts, tmp_path, "--only", "size") == 0
    found = read(tmp_path)
    (tmp_path / card.RESULTS_NAME).write_text(json.dumps(found | {"weights": {"transformer": "0"}}))
    assert take(model, data, prompts, tmp_path, "--only", "loss") == 0
    assert tuple(read(tmp_path)["figures"]) == ("loss",)


def test_recognised_count_is_kept_for_the_same_pictures(model: Path, data: Path, prompts: Path, tmp_path: Path) -> None:
    counts = []
    for more in (("--recognised", "2"), (), ("--seed", "9")):
        assert take(model, data, prompts, tmp_path, "--only", "sheet", *more) == 0
        counts.append(read(tmp_path)["figures"]["sheet"]["recognised"])
    assert counts == [2, 2, None]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--only", "los"), "did you mean loss?"),
        (("--only", "sheet", "--recognised", "4"), "has 3 images"),
        (("--only", "sheet", "--top-p", "0"), "top_p is 0"),
        (("--only", "sheet", "--guidance", "nan"), "wanted a number"),
        (("--only", "sheet", "--prompts", "nowhere"), "contact_sheet.txt"),
    ],
)
def test_a_mistake_gives_one_line_and_exit_status_2(
    model: Path, data: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture, more: tuple, message: str
) -> None:
    try:
        code = take(model, data, prompts, tmp_path, *more)
    except SystemExit as stop:
        code = stop.code
    errors = [line for line in capsys.readouterr().err.splitlines() if line]
    assert code == 2 and len(errors) == 1 and message in errors[0]


def test_names_are_those_of_the_figures() -> None:
    assert set(card.NAMES) == {"size", *FIGURES}


def test_a_readme_without_marks_is_rejected() -> None:
    with pytest.raises(ValueError, match="figures: begin"):
        insert("# A card", "table")


def test_parameters_are_counted_without_scales(tmp_path: Path) -> None:
    save_component({"a": torch.ones(3, 4), "b": torch.ones(5)}, {}, tmp_path, int8=["a"])
    assert count_parameters(tmp_path / "model.safetensors") == 17


def test_committed_table_matches_the_committed_figures() -> None:
    figures = json.loads((ROOT / "eval" / "results" / card.RESULTS_NAME).read_text())
    readme = (ROOT / "assets" / "lantern-emoji" / "README.md").read_text()
    assert insert(readme, render(figures)) == readme


def test_committed_figures_belong_to_the_committed_weights() -> None:
    found = json.loads((ROOT / "eval" / "results" / card.RESULTS_NAME).read_text())
    if not found["figures"]:
        pytest.skip("no figures yet")
    assert found["weights"] == weight_hashes(ROOT / "assets" / "lantern-emoji")
    assert set(found["weights"]) == set(DECISIVE)
