"""The bench: results, checked promises, and figures."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.cli.main import main
from lantern.eval.speed import bench as speed
from lantern.eval.speed import race
from lantern.eval.speed.bench import WIDTH, BenchOptions, render
from lantern.eval.speed.contenders import Job, Lineup, Stable, Variant, built, kinds_of, line_up, variants
from lantern.eval.speed.race import Entry, Made, identity, results
from lantern.eval.speed.surroundings import commit, surroundings
from lantern.generation import generator
from lantern.models.folder import Model, load_model
from tests.eval.variants import CPU, EAGER
from tests.tiny import tiny_target
from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder)


def scripted_entries(model: Model, plain: list[float], mine: list[float]) -> list[Entry]:
    lineup = line_up(Stable(model), ["eagle1"], EAGER, built(model.sampling()))
    tokens = torch.zeros(1, 16, dtype=torch.long)
    return [
        Entry(one, seconds, [Made(tokens, 16, 0.0, 0.0)] * len(seconds))
        for one, seconds in zip(lineup.contenders, (plain, mine), strict=True)
    ]


# results


def test_the_fastest_plain_variant_is_the_baseline(model: Model) -> None:
    entries = scripted_entries(model, [4.0] * 10, [1.0] * 10)
    faster = Entry(entries[0].contender, [2.0] * 10, entries[0].made)
    (result,) = results([*entries, faster], batch=1)
    assert result["claim"] == 2.0 and result["baseline"] == "eager fp32" and result["method"] == "eagle1"


# promises


def test_differing_tokens_in_fp32_are_a_failure(model: Model) -> None:
    entries = scripted_entries(model, [1.0] * 3, [1.0] * 3)
    (same,) = identity(entries)
    assert (same["images"], same["differing_tokens"], same["must_be_identical"]) == (3, 0, True)
    entries[1].made[1] = Made(torch.ones(1, 16, dtype=torch.long), 16, 0.0, 0.0)
    (other,) = identity(entries)
    assert (other["differing_images"], other["differing_tokens"]) == (1, 16)
    assert len(speed.broken_promises([{"batch": 1, "identity": [other]}])) == 1
    assert speed.broken_promises([{"batch": 1, "identity": [other | {"must_be_identical": False}]}]) == []


@pytest.mark.parametrize(("name", "is_promised"), [("eagle1", True), ("eagle1-rejection", False), ("lantern++", False)])
def test_only_gumbel_match_promises_plain_tokens(model: Model, name: str, is_promised: bool) -> None:
    lineup = line_up(Stable(model), [f"{name}"], EAGER, built(model.sampling()))
    assert lineup.contenders[1].is_identical == is_promised


# the whole


def test_methods_that_are_plain_decoding_here_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(name="bare", target=tiny_target())
    assert speed.own_methods(model) == ["auto"]
    monkeypatch.setattr(generator, "pass_times", lambda *_, **__: {1: 1.0, 2: 2.0})
    with pytest.raises(ValueError, match="are plain decoding on this machine: give --methods"):
        speed.own_methods(model)


@pytest.fixture(scope="module")
def figures(folder: Path) -> dict[str, Any]:
    options = BenchOptions(
        model=str(folder),
        methods=("eagle1", "lantern++:k=3"),
        images=2,
        batches=(1, 2),
        kinds=("eager",),
        is_quiet=True,
    )
    return speed.measure(options)


def test_figures_of_a_model_have_the_documented_form(figures: dict[str, Any]) -> None:
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    one, two = figures["races"]
    assert (one["batch"], one["rounds"], two["batch"], two["images"]) == (1, 2, 2, 4)
    assert {(entry["method"], entry["dtype"]) for entry in one["contenders"]} == {
        (method, dtype) for method in ("plain", "eagle1", "lantern++:k=3") for dtype in ("fp32", "bf16")
    }
    relaxed = [entry for entry in one["contenders"] if not entry["exact"]]
    assert relaxed and all(entry["total_variation"] > 0 for entry in relaxed)
    assert all(entry["tokens_per_step"] == 1 for entry in one["contenders"] if entry["method"] == "plain")
    assert all(result["claim"] is None for race in figures["races"] for result in race["results"])
    assert figures["failures"] == [] and figures["failed"] == []
    plain, *drafted = two["phases"]
    assert plain["method"] == "plain" and all(set(one["shares"]) >= {"propose", "score"} for one in drafted)
    assert all(sum(one["shares"].values()) == pytest.approx(1, abs=1e-3) for one in two["phases"])


def test_tables_fit_120_columns(figures: dict[str, Any]) -> None:
    text = render(figures | {"failed": [{"method": "plain", "variant": "int8 bf16", "reason": "x" * 200}]})
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert "no claim: 2 images each, expected at least 10" in text and "not measured: plain int8 bf16" in text
    assert "no token differs from plain decoding in 2 images" in text
    assert "roofline" in text and "the fastest of the 2 variants of plain decoding above" in text
    assert "baseline: plain as eager" in text
    installed = render(figures | {"surroundings": figures["surroundings"] | {"lantern": "1.0.0", "commit": "1.0.0"}})
    assert "; lantern 1.0.0" in installed.splitlines()[0] and ", commit" not in installed.splitlines()[0]


def test_plain_decoding_runs_in_more_variants_than_methods() -> None:
    found = variants(("eager",), ("bf16",), ("cpu", "cpu+int8"))
    assert list(map(str, found["plain"])) == ["eager bf16", "cpu bf16", "cpu+int8 bf16"]
    assert list(map(str, found["others"])) == ["eager bf16"]


def test_the_command_runs_plain_decoding_in_every_way_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BenchOptions] = []

    def measure(options: BenchOptions) -> dict[str, Any]:
        seen.append(options)
        raise ValueError("enough")

    monkeypatch.setattr(speed, "measure", measure)
    for words in ([], ["--baseline", "eager"]):
        assert main(["bench", "--variants", "cpu", "--device", "cpu", *words]) == 2
    assert [tuple(one.kinds) for one in seen] == [("cpu",)] * 2
    assert seen[0].baselines == kinds_of(CPU) and list(seen[1].baselines) == ["eager"]
    assert {"cpu+int8", "eager+int8"} <= set(seen[0].baselines)


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        ((), {"graph bf16", "cpu bf16", "cpu+int8 bf16"}),  # within 1.5 of the fastest
        (("eager",), {"eager bf16", "graph bf16", "cpu bf16", "cpu+int8 bf16"}),
    ],
)
def test_slow_variants_that_nobody_asked_for_are_left_out(
    model: Model, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...], left: set[str]
) -> None:
    milliseconds = {"eager": 16.0, "graph": 14.0, "cpu": 12.0, "cpu+int8": 10.0}
    parts = line_up(Stable(model), ["eagle1"], EAGER, built(model.sampling())).contenders
    every = [dataclasses.replace(one, variant=Variant(kind, "bf16")) for kind in milliseconds for one in parts]
    monkeypatch.setattr(race, "pass_seconds", lambda one, job, device: milliseconds[one.variant.kind] / 1e3)
    lineup, (job, *_) = Lineup(every), speed.jobs_of(model, BenchOptions(images=1), 1)
    race.leave_out_slow(lineup, job, asked, device=CPU)
    assert {str(one.variant) for one in lineup.contenders} == left and len(lineup.contenders) == 2 * len(left)
    assert [one["variant"] for one in lineup.slow] == ([] if asked else ["eager bf16"])


def test_the_two_fastest_variants_are_always_measured(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    milliseconds = {"eager": 16.0, "graph": 99.0, "cpu": 1.0}
    plain = line_up(Stable(model), [], EAGER, built(model.sampling())).contenders[0]
    lineup = Lineup([dataclasses.replace(plain, variant=Variant(kind, "bf16")) for kind in milliseconds])
    monkeypatch.setattr(race, "pass_seconds", lambda one, job, device: milliseconds[one.variant.kind] / 1e3)
    lines: list[str] = []
    race.leave_out_slow(lineup, speed.jobs_of(model, BenchOptions(images=1), 1)[0], (), device=CPU, report=lines.append)
    assert lines == [
        "warming up 1 of 3: plain as eager bf16",
        "warming up 2 of 3: plain as graph bf16",
        "warming up 3 of 3: plain as cpu bf16",
    ]
    assert [one.variant.kind for one in lineup.contenders] == ["eager", "cpu"]
    assert lineup.slow == [{"variant": "graph bf16", "pass_ms": 99.0}]


def test_a_pass_is_timed_in_a_few_steps(model: Model) -> None:
    plain = line_up(Stable(model), [], EAGER, built(model.sampling())).contenders[0]
    (job, *_) = speed.jobs_of(model, BenchOptions(images=1), 1)
    assert 0 < race.pass_seconds(plain, job, CPU) < 10


def test_all_contenders_make_the_pictures_of_a_round(model: Model) -> None:
    jobs = speed.jobs_of(model, BenchOptions(images=10), 4)
    assert [len(job.keys) for job in jobs] == [4, 4, 4]
    assert [key for job in jobs for key in job.keys] == [(0, number) for number in range(12)]
    assert isinstance(jobs[0], Job)


def test_surroundings_name_no_person_and_no_host(tmp_path: Path) -> None:
    found = surroundings(CPU)
    assert {"torch", "torchao", "cpu", "cores", "threads", "commit", "python"} <= set(found)
    assert os.path.expanduser("~") not in json.dumps(found)
    assert commit(tmp_path) == found["lantern"]


def test_commands_print_no_library_warnings() -> None:
    pytest.importorskip("torchao")
    code = """
from lantern.cli.command import Command, run_command
def run(args):
    import diffusers.quantizers.torchao
    return 0
raise SystemExit(run_command(Command("quiet", "Imports much.", lambda parser: None, run), []))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
