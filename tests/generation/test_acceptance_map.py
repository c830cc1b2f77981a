import xml.etree.ElementTree as ET

import pytest
import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Cost, Generation, Step, Verdict
from lantern.decoding.loop import NO_SCORES
from lantern.generation.acceptance_map import MARK, SHADES, AcceptanceMap, draw_map, read_map, shade_of
from lantern.generation.decoder import build_decoder
from lantern.methods import METHODS
from lantern.verifiers.relaxations.neighbours import proximity_table
from tests.tiny import tiny_condition, tiny_eagle, tiny_target

SAMPLING = Sampling(guidance=2.0)


def generation(method: str, images: int = 1) -> Generation:
    target = tiny_target()
    codebook = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    options = {"k": 6, "delta": 0.5} if method == "lantern" else {}
    parts = build_decoder(
        METHODS[method].with_options(**options),
        target,
        sampling=SAMPLING,
        drafter_module=tiny_eagle(target),
        neighbours=proximity_table(codebook, 23),
        codebook=codebook,
    )
    keys = [(0, number) for number in range(images)]
    return parts.generate(tiny_condition((4, 2)[:images]), keys=keys, keep_history=True)


def step(start: int, count: int, relaxed: list[float] | None = None, length: int | None = None) -> Step:
    verdict = None
    if relaxed is not None:
        verdict = Verdict(
            path=torch.zeros(1, len(relaxed), dtype=torch.long),
            length=torch.tensor([count - 1 if length is None else length]),
            next_token=torch.zeros(1, dtype=torch.long),
            cost=Cost(torch.tensor([relaxed]), torch.zeros(1, len(relaxed) + 1)),
        )
    ends = torch.tensor([start]), torch.tensor([count])
    return Step(0, *ends, torch.zeros(1, count, dtype=torch.long), NO_SCORES, verdict=verdict)


# reading


@pytest.mark.parametrize("method", ["plain", "eagle1", "gumbel-jacobi", "lantern"])
def test_runs_fill_every_picture_of_a_batch(method: str) -> None:
    made = generation(method, images=2)
    for image in range(2):
        found = read_map(made.history, image, 16, 4)
        assert found.cells == 16 and len(found.runs) == int(made.steps[image])


def test_relaxed_cells_match_the_generation_count() -> None:
    made = generation("lantern")
    found = read_map(made.history, 0, 16, 4)
    assert found.marked and sum(p for _, p in found.relaxed) == pytest.approx(float(made.relaxed[0]), abs=0.01)


def test_only_accepted_drafts_are_relaxed() -> None:
    # the second step commits two drafts and the target's own token; nodes after the path were not accepted
    steps = [step(0, 1), step(1, 3, [0.0, 0.9, 1.0])]
    assert read_map(steps, 0, 4, 2).relaxed == ((2, 0.9),)


def test_drafts_past_the_end_are_ignored() -> None:
    steps = [step(0, 1), step(1, 3, [0.7, 0.7, 0.7, 0.7], length=4)]
    assert read_map(steps, 0, 4, 2).relaxed == tuple((cell, 0.7) for cell in (1, 2, 3))


def test_steps_of_half_a_picture_are_rejected() -> None:
    with pytest.raises(ValueError, match="keep_history=True"):
        read_map([step(0, 1)], 0, 4, 2)
    with pytest.raises(ValueError, match="expected 1"):
        read_map([step(0, 1), step(2, 2)], 0, 4, 2)


# drawing


def test_every_cell_is_shaded_by_its_run() -> None:
    assert [shade_of(run).least for run in (1, 2, 3, 4, 7, 8, 64)] == [1, 2, 2, 4, 4, 8, 8]
    found = AcceptanceMap((1, 2, 4, 1, 8), ((1, 1.0), (2, 0.1)), 4)
    assert found.marked == [1]
    root = ET.fromstring(draw_map(found, "data:,", title='a "cat" & more'))
    paths = {path.get("fill"): path.get("d", "") for path in root.iter("path")}
    assert set(paths) == {*(shade.colour for shade in SHADES[1:]), MARK}
    assert paths[SHADES[1].colour] == "M10 0h20v10h-20z"
    # a run over the end of a row is two rectangles
    assert paths[SHADES[2].colour] == "M30 0h10v10h-10zM0 10h30v10h-30z"
    assert paths[MARK].count("M") == 1 and root.find("title") is not None
