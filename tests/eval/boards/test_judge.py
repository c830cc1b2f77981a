"""Quality networks of the frontier with the real classes at toy size, without Inception's weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.cli.frontier import main
from lantern.core.config import read_json_object
from lantern.eval.boards import judge as judging
from lantern.eval.boards.axes import QUALITY
from lantern.eval.boards.judge import Judge
from lantern.eval.boards.study import Study
from lantern.eval.metrics import efficientnet
from lantern.eval.metrics.distances import kernel_distance
from lantern.eval.metrics.efficientnet import EfficientNet
from lantern.models.folder import load_model
from lantern.training.data import Prepared, Record
from tests.tiny_folder import save_tiny_model
from tests.training.drawings import prepared

CONCEPTS = ("red", "apple", "cat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three concepts in two styles."""
    made = []
    generator = torch.Generator().manual_seed(0)
    for concept in CONCEPTS:
        for style in ("3d", "flat"):
            picture = torch.randint(0, 256, (8, 8, 3), dtype=torch.uint8, generator=generator).numpy()
            made.append((picture, Record(0, ((concept, 1.0),), "plain", (concept,), style, "train")))
    return prepared(tmp_path_factory.mktemp("prepared") / "emoji", made)


@pytest.fixture(autouse=True)
def networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An EfficientNet of random weights, and in Inception's place the mean of each row of pixels."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = EfficientNet().eval().requires_grad_(False)
    monkeypatch.setattr(EfficientNet, "from_package", lambda packages: network)
    monkeypatch.setattr(judging, "load_inception", lambda found: lambda pictures: pictures.float().mean(3).flatten(1))


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "inception.pt").write_bytes(b"weights")
    return {"inception": tmp_path / "inception.pt"}


def study(folder: Path, data: Path) -> Study:
    model = load_model(folder)
    return Study(model, Prepared.open(data), data, data, data, model.sampling())


def test_real_pictures_are_nearest_to_their_own_concepts(folder: Path, data: Path, tmp_path: Path) -> None:
    real = study(folder, data)
    requested = Judge(real, weights={}, has_packages=True, cache=tmp_path)
    found = requested.estimates(real.images, [r.concepts[0] for r in real.records("train")])
    assert found["retrieval"].value == 1.0 and found["likeness"].value == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(ValueError, match="expected one of the 3"):
        requested.estimates(real.images[:1], ["zebra"])


def test_kid_matches_the_metric_and_features_are_cached(
    folder: Path, data: Path, weights: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = study(folder, data)
    made = real.images.flip(2)
    requested = Judge(real, weights=weights, has_packages=False, cache=tmp_path / "run")
    found = requested.estimates(made, ["apple"] * len(made))
    seen = [one.float().mean(3).flatten(1) for one in (made, real.images)]
    assert found["kid"] == kernel_distance(*seen, seed=0) and set(found) == {"kid", "fid"}
    monkeypatch.setattr(Judge, "see", lambda self, pictures: seen[0] if pictures is made else 1 / 0)
    again = Judge(real, weights=weights, has_packages=False, cache=tmp_path / "run")
    assert again.estimates(made, [])["kid"] == found["kid"]


def test_facts_report_weights_and_pictures(folder: Path, data: Path, weights: dict[str, Path], tmp_path: Path) -> None:
    facts = Judge(study(folder, data), weights=weights, has_packages=True, cache=tmp_path, references=4).facts
    assert facts["inception"]["real_pictures"] == 4 and len(facts["inception"]["sha256"]) == 64
    assert facts["retrieval"] == {"network": efficientnet.NAME, "data": "emoji", "concepts": 3}


def test_clip_scores_stay_within_the_bounds_of_a_cosine(tmp_path: Path) -> None:
    from transformers import CLIPConfig, CLIPModel

    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config=sizes | {"max_position_embeddings": 77},
        vision_config=sizes | {"image_size": 16, "patch_size": 8},
        projection_dim=6,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        CLIPModel(config).save_pretrained(tmp_path / "clip")
    requested = Judge(None, weights={"clip": tmp_path / "clip"}, has_packages=False, cache=tmp_path)
    pictures = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = requested.estimates(pictures, ["a cat", "a dog", "a red apple"])["clip"]
    assert found.low is not None and found.high is not None and -100 <= found.low <= found.value <= found.high <= 100
    assert requested.clip_scores(pictures, ["a cat"] * 3)[0] == pytest.approx(
        requested.clip_scores(pictures[:1], ["a cat"])[0]
    )


def test_every_judged_figure_is_an_axis_of_the_frontier(
    folder: Path, data: Path, weights: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(CONCEPTS))
    words = ["--model", str(folder), "--points", "gumbel-jacobi:window=4", "--images", "8", "--shown", "0"]
    words += ["--baseline", "eager", "--prompts-file", str(tmp_path / "prompts.txt"), "--quiet"]
    words += ["--data", str(data), "--packages", str(data), "--weights", f"inception={weights['inception']}"]
    assert main([*words, "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    figures = read_json_object(tmp_path / "out" / "frontier.json")
    names = ["total-variation", "kid", "kid-efficientnet", "fid", "retrieval", "likeness"]
    assert [list(point["quality"]) for point in figures["points"]] == [names, names]
    assert set(names) < set(QUALITY) and set(figures["fronts"]["speedup"]) == set(names)
    plain, exact = (point["quality"] for point in figures["points"])
    assert plain == exact
