"""Coverage of draft vocabularies, against adding up by hand, and the command that writes it down."""

import json
from pathlib import Path

import pytest
import torch

from lantern.core.io import load_component
from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.drafters.eagle.fr_spec import FrequencyConfig, FrequencyTable
from lantern.models.folder import load_model
from lantern.models.llamagen.transformer import Scores
from lantern.training.frequency_table import Coverage, main, measure, sizes_for
from lantern.verifiers.relaxations.neighbours import proximity_table
from tests.tiny_folder import save_tiny_model


def test_sizes_are_powers_of_two_and_all() -> None:
    assert sizes_for(100) == [16, 32, 64, 100]
    assert sizes_for(64) == [16, 32, 64] and sizes_for(10) == [10]


def test_coverage_is_the_mass_of_the_codes_that_are_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    codebook = torch.randn(40, 3, generator=generator)
    table = FrequencyTable.of_codes(torch.randint(0, 40, (1, 90), generator=generator), 40)
    counts = torch.randint(0, 3, (2, 40), generator=generator)
    found = Coverage(table, codebook, sampling=Sampling(guidance=1), counts=counts, block_size=4)
    near, ranking, output = proximity_table(codebook, 8), table.ranking.tolist(), []
    totals, places = {way: [0.0] * 3 for way in ("frequent", "prompt", "neighbours")}, 0
    for place in range(4):
        logits = torch.randn(2, 1, 40, generator=generator)
        codes = torch.randint(0, 40, (2, 1), generator=generator)
        scores = Scores(logits, logits)
        start = torch.full((2,), place)
        found.add([0, 1], Step(place, start, torch.ones_like(start), codes, scores))
        for image in range(2):
            p, own = logits[image, 0].double().softmax(0), counts[image].tolist()
            mine = sorted(range(40), key=lambda code, own=own: (-own[code], ranking.index(code)))
            for i, size in enumerate((16, 32, 40)):
                kept = set(ranking[: size // 2])
                for neighbour in [place - 1] * (place % 2) + [place - 2] * (place >= 2):
                    code = int(output[neighbour][image, 0])
                    kept |= {code, *near[code, : size // 4 - 1].tolist()}
                kept = set(range(40)) if size == 40 else kept
                for way, chosen in (
                    ("frequent", ranking[:size]),
                    ("prompt", mine[:size]),
                    ("neighbours", sorted(kept)),
                ):
                    totals[way][i] += float(p[chosen].sum())
            places += 1
        output.append(codes)
    curve = found.curve()
    assert curve["sizes"] == [16, 32, 40] and curve["places"] == places == 8
    for way, sums in totals.items():
        assert curve["coverage"][way] == pytest.approx([value / places for value in sums], abs=1e-4)
    assert curve["held_by_neighbours"][-1] == 40


def test_the_command_writes_curve_and_table(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red apple\na cat\ntwo dog\n")
    out, parts = tmp_path / "curve.json", folder / "parts"
    arguments = ["--model", str(folder), "--prompts", str(prompts), "--limit", "2"]
    main([*arguments, "--parts", str(parts), "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["prompts"] == ["a red apple", "a cat"] and written["places"] == 32
    for row in written["coverage"].values():
        assert row == sorted(row) and row[-1] == pytest.approx(1.0, abs=1e-4)
    model = load_model(folder)
    table = model.add_ons["fr-spec"]
    assert isinstance(table, FrequencyTable) and int(table.counts.sum()) == 32
    assert torch.equal(load_component(FrequencyTable, FrequencyConfig, parts / "fr-spec").counts, table.counts)
    again, curve = measure(model, written["prompts"])
    assert torch.equal(again.counts, table.counts) and curve["coverage"] == written["coverage"]
