"""The command that compares exact methods with plain decoding, on a model of random weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.core.noise import Noise
from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.decoding import loop, plain
from lantern.decoding.loop import Programs
from lantern.engines.compiled import CompiledEngine
from lantern.engines.engine import EagerEngine, Engine
from lantern.eval.speed import equality
from lantern.eval.speed.equality import ULPS, Margins, Place, first_difference, tie
from lantern.eval.speed.surroundings import HERE, commit
from lantern.generation.generator import Generator
from lantern.methods.registry import METHODS, build_decoder
from lantern.models.folder import load_model
from lantern.models.llamagen.transformer import Scores, Transformer
from tests.tiny import select, tiny_condition, tiny_eagle, tiny_target
from tests.tiny_folder import save_tiny_model

SMALL = ["--seeds", "2", "--prompts", "2", "--guidance", "3", "--batch", "3", "--plain-batch", "3", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def compare(folder: Path, out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code = equality.main(["--model", str(folder), *SMALL, "--out", str(out), *more])
    return code, json.loads(out.read_text(encoding="utf-8"))


def test_every_exact_gumbel_method_matches_plain_decoding(folder: Path, tmp_path: Path) -> None:
    code, report = compare(folder, tmp_path / "equality.json")
    assert code == 0
    model = load_model(str(folder), parts=("drafter",))
    assert [cell["what"]["method"]["name"] for cell in report["cells"]] == equality.promising(model)
    assert {"eagle1", "gumbel-jacobi"} <= set(equality.promising(model))
    shipped = equality.promising(load_model(parts=("drafter",)))
    assert {"sam", "sam-eagle1", "fr-spec", "c2t", "radar"} <= set(shipped) < set(equality.promising(model))
    for cell in report["cells"]:
        assert (cell["pictures"], cell["of"], cell["codes"]) == (4, 4, 64)
        assert cell["differing_codes"] == cell["differing_pictures"] == 0 and cell["ties"] == []
        assert cell["surroundings"]["torch"] == torch.__version__ and cell["smallest_gap"] > 0
        assert cell["commits"] == [cell["surroundings"]["commit"]]
        assert cell["largest_gap_change"] < 1e-4


def test_a_line_is_printed_once(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "equality.json"
    compare(folder, out, "--methods", "eagle1")
    printed = capsys.readouterr()
    assert ["3 of 4 images" in line for line in printed.err.splitlines()] == [True]
    assert ["4 of 4 images" in line for line in printed.out.splitlines()] == [True]


def test_a_run_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, decode, sampled = tmp_path / "equality.json", Generator.decode, list[str]()

    def counted(self: Generator, *given: Any) -> Any:
        sampled.append(self.method.name)
        if len(sampled) == 4:
            raise KeyboardInterrupt
        return decode(self, *given)

    monkeypatch.setattr(Generator, "decode", counted)
    assert equality.main(["--model", str(folder), *SMALL, "--out", str(out), "--methods", "eagle1"]) == 130
    assert json.loads(out.read_text(encoding="utf-8"))["cells"][0]["pictures"] == 3
    sampled[:] = [""] * 4
    first = commit(HERE)
    monkeypatch.setattr("lantern.eval.speed.surroundings.commit", lambda folder: "a later one")
    code, report = compare(folder, out, "--methods", "eagle1")
    assert code == 0 and report["cells"][0]["pictures"] == 4
    assert report["cells"][0]["commits"] == [first, "a later one"]
    assert sampled[4:] == ["plain", "eagle1"]  # the block that was not finished, of one picture
    assert compare(folder, out, "--methods", "eagle1")[1] == report and len(sampled) == 6
    out.write_text(json.dumps(report | {"fingerprint": "another"}), encoding="utf-8")
    capsys.readouterr()
    assert compare(folder, out, "--methods", "eagle1")[1]["cells"][0]["pictures"] == 4
    assert "belongs to other weights" in capsys.readouterr().err and len(sampled) > 6


def test_compiled_decoding_has_cells_of_its_own(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = list[Engine]()
    for kind in (EagerEngine, CompiledEngine):
        monkeypatch.setattr(kind, "_prepare", lambda engine, target: engines.append(engine) or target)
        monkeypatch.setattr(kind, "programs", lambda engine: Programs())
    more = ["--methods", "eagle1", "--reproducible"]
    compare(folder, tmp_path / "equality.json", *more)
    _, report = compare(folder, tmp_path / "equality.json", *more, "--engine", "compile")
    assert [cell["what"]["engine"] for cell in report["cells"]] == ["eager", "compile"]
    assert {engine.name for engine in engines} == {"eager", "compile"} and all(one.reproducible for one in engines)


def test_a_difference_is_counted_described_and_fails_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = loop.generate

    def spoilt(*given: Any, **named: Any) -> Any:
        made = generate(*given, **named)
        made.codes[0, 5] = (made.codes[0, 5] + 1) % 24
        return made

    monkeypatch.setattr(loop, "generate", spoilt)
    code, report = compare(folder, tmp_path / "equality.json", "--methods", "eagle1")
    (cell,) = report["cells"]
    assert code == 1 and cell["differing_codes"] == cell["differing_pictures"] == 2
    assert [(tie["picture"], tie["code"]) for tie in cell["ties"]] == [(0, 5), (3, 5)]
    assert cell["ties_beyond_rounding"] == 2  # no tie at all


def test_differences_by_rounding_are_ties_within_the_bound(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = Transformer.head

    def rounded(self: Transformer, features: Tensor) -> Tensor:
        logits = head(self, features)
        up = 1 + 2.0**-8 * (torch.arange(24) % 2 * 2 - 1)  # at most one unit in the last place of bf16, up or down
        return logits * up if features.shape[1] > 1 else logits

    monkeypatch.setattr(Transformer, "head", rounded)
    more = ["--dtype", "bf16", "--seeds", "16", "--plain-batch", "32", "--methods", "eagle1"]
    code, report = compare(folder, tmp_path / "equality.json", *more)
    (cell,) = report["cells"]
    assert code == 0  # in half precision nothing was promised
    assert cell["differing_pictures"] == len(cell["ties"]) > 0
    assert cell["ties_beyond_rounding"] == 0 and 0 < cell["largest_share_of_bound"] <= 1
    assert 0 < cell["largest_gap_change"] < max(tie["bound"] for tie in cell["ties"])


def test_margins_match_the_sampled_codes() -> None:
    target, condition, keys = tiny_target(), select(tiny_condition((4, 1, 6)), [0, 1]), [(1, 0), (1, 1)]
    sampling = Sampling(guidance=3, temperature=0.8)
    noise = Noise(keys, positions=16, vocab_size=24)
    watched = [Margins(sampling, noise, torch.float32, 2) for _ in range(2)]
    made = plain.generate(target, condition, sampling=sampling, keys=keys, callback=watched[0])

    parts = build_decoder(METHODS["eagle1"], target, sampling=sampling, drafter_module=tiny_eagle(target))
    again = parts.generate(condition, keys=keys, callback=watched[1])
    assert torch.equal(made.codes, again.codes)
    torch.testing.assert_close(watched[0].gaps, watched[1].gaps, atol=1e-4, rtol=0)
    assert (watched[0].gaps > 0).all() and torch.equal(watched[0].ulps, watched[1].ulps)


def test_the_unit_in_the_last_place_is_of_the_largest_logit() -> None:
    margins = Margins(Sampling(guidance=1.0), Noise([(0, 0)], positions=1, vocab_size=3), torch.bfloat16, 1)
    scores = Scores(torch.tensor([[[20.0, 19.0, -90.0]]]), torch.zeros(1, 1, 1))
    margins(Step(0, torch.tensor([0]), torch.tensor([1]), torch.tensor([[0]]), scores))
    assert margins.ulps.item() == 0.125  # 16 to 32 has 2**7 steps
    found = tie(0, 0, Place(margins, 0), Place(margins, 0))
    assert found.bound == 2 * ULPS[torch.bfloat16] * 0.125 and found.plain_gap == found.method_gap > 0


def test_first_differences() -> None:
    one, other = torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[1, 0, 0], [1, 2, 3]])
    assert first_difference(one, other) == [1, None]
