"""The choice of names whose images are recognised."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lantern.cli.command import run_command
from lantern.eval.boards import names
from lantern.eval.boards.study import Prompts
from lantern.eval.metrics.retrieval import Gallery
from lantern.models.folder import RECOGNISED_NAME

CONCEPTS = tuple("abcdefgh")
GALLERY = Gallery(torch.eye(8), torch.arange(8), ("flat",) * 8, CONCEPTS)


@dataclass
class Painter:
    """Makes images whose features are nearest to five other concepts for "a" in odd seeds, and for "b" always."""

    seed: int = 0
    gallery: Gallery = GALLERY
    painted: list[int] = field(default_factory=list)

    def trained_prompts(self) -> Prompts:
        return Prompts("trained", ("b", "a", "c"), ("b", "a", "c"))

    def paint(self, prompts: Prompts) -> Any:
        self.painted.append(self.seed)
        features = torch.tensor([[float(name == other) for other in CONCEPTS] for name in prompts.concepts])
        for row in (0, 1):
            if row == 0 or self.seed % 2:
                features[row] = torch.tensor([0.0, 0, 0, 1, 1, 1, 1, 1])
        return SimpleNamespace(pictures=features)

    def features(self, pictures: torch.Tensor) -> torch.Tensor:
        return pictures


def test_shares_are_those_of_images_among_the_nearest_five() -> None:
    study: Any = Painter()
    assert names.recognised_shares(study, seeds=range(1, 5)) == {"a": 0.5, "b": 0.0, "c": 1.0}
    assert study.painted == [1, 2, 3, 4]  # not the card's seed 0


def test_the_file_has_the_name_that_model_folders_use() -> None:
    assert names.RECOGNISED == RECOGNISED_NAME


def test_data_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(names.NAMES, ["--images", "2"]) == 2
    assert "--data" in capsys.readouterr().err
