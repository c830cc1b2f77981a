"""The commands `bench`, on the pictures of a model, and on random weights with scripted acceptance."""

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.cli.main import main
from lantern.core.sampling import Sampling
from lantern.core.types import Step, Verifier
from lantern.drafters.trees import named
from lantern.engines.engine import engine
from lantern.eval.json_lines import Line
from lantern.eval.speed import bench as speed
from lantern.eval.speed import shapes
from lantern.eval.speed.bench import BenchOptions, render
from lantern.eval.speed.contenders import Contender, RoundImages, Stable, Variant, built, jobs_of, kinds_of
from lantern.eval.speed.race import pack, pass_seconds, results, take, unpack
from lantern.eval.speed.shapes import ShapeOptions, deepest, script
from lantern.eval.speed.surroundings import commit, load_average, surroundings
from lantern.generation import choice
from lantern.models.folder import Model
from lantern.models.llamagen.transformer import TransformerConfig
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.scripted import ScriptedVerifier
from tests.eval.workers import CPU, PROMPTS, Patch, eager
from tests.refusals import refused
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_decoder import tiny_decoder


def job(model: Model) -> list[RoundImages]:
    return jobs_of(model, PROMPTS, rounds=1, batch=1, seed=0)


def scripted(field: Sequence[Contender], *seconds: float) -> list[Line]:
    """Records of ten rounds of one image for contenders that take these seconds."""
    image = {"steps": 16, "total_variation": 0.0, "relaxed": 0.0, "tokens": pack(torch.zeros(16, dtype=torch.long))}
    return [
        {"round": number, "contender": one.name, "seconds": spent, "images": [image]}
        for number in range(10)
        for one, spent in zip(field, seconds, strict=True)
    ]


def test_the_fastest_plain_variant_is_the_baseline(model: Model) -> None:
    plain, method = eager(model, "eagle1")
    field = [plain, method, dataclasses.replace(plain, variant=Variant("cpu", "bf16"))]
    (result,) = results(field, scripted(field, 4.0, 1.0, 2.0))
    assert result["claim"] == 2.0 and result["baseline"] == "cpu bf16" and result["method"] == "eagle1"


def test_differing_tokens_in_fp32_are_a_failure(model: Model) -> None:
    field = eager(model, "eagle1")
    lines = scripted(field, 1.0, 1.0)
    (same,) = speed.identities(field, lines, 1)
    assert (same["images"], same["differing_tokens"], same["must_be_identical"]) == (10, 0, True)
    lines[3]["images"] = [lines[3]["images"][0] | {"tokens": pack(torch.ones(16, dtype=torch.long))}]
    (other,) = speed.identities(field, lines, 1)
    assert (other["differing_images"], other["differing_tokens"]) == (1, 16)
    assert len(speed.broken_promises([{"batch": 1, "identity": [other]}])) == 1
    assert speed.broken_promises([{"batch": 1, "identity": [other | {"must_be_identical": False}]}]) == []


def test_plain_decoding_alone_is_no_contender(folder: Path, monkeypatch: Patch) -> None:
    refused(speed.measure, BenchOptions(PROMPTS, str(folder), ("plain",)), match="give methods that draft")
    model = Model(name="bare", target=tiny_target())
    assert speed.own_methods(model) == ["auto"]
    monkeypatch.setattr(choice, "pass_times", lambda *_, **__: {1: 1.0, 2: 2.0})
    refused(speed.own_methods, model, match="are plain decoding on this machine: give --methods")


@pytest.fixture(scope="module")
def figures(folder: Path) -> dict[str, Any]:
    what: Any = {"model": str(folder), "methods": ("eagle1", "lantern++:k=3"), "kinds": ("eager",)}
    return speed.measure(BenchOptions(PROMPTS, images=2, batches=(1, 2), is_quiet=True, **what))


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


def test_tables_state_what_was_measured_and_what_was_not(figures: dict[str, Any]) -> None:
    failed = {"method": "plain", "variant": "int8 bf16", "reason": "x" * 200}
    text = render(figures | {"failed": [failed]})
    assert "no claim: 2 rounds, wanted at least 10" in text and f"not measured: plain int8 bf16: {'x' * 200}" in text
    assert "no token differs from plain decoding in 2 images" in text
    assert "roofline" in text and "the fastest of the 2 variants of plain decoding above" in text
    assert "baseline: plain as eager" in text
    where, race = figures["surroundings"] | {"lantern": "1.0.0", "commit": "1.0.0"}, figures["races"][0]
    unknown = [one | {"total_variation": None} for one in race["contenders"]]
    first, *others = render(figures | {"surroundings": where, "races": [race | {"contenders": unknown}]}).splitlines()
    assert "; lantern 1.0.0" in first and ", commit" not in first
    rows = [line for line in others if line.startswith("  lantern++:k=3  eager")]
    assert len(rows) == 2 and all(row.endswith(" -") for row in rows)


def test_the_command_runs_plain_decoding_in_every_way_by_default(monkeypatch: Patch) -> None:
    seen: list[BenchOptions] = []
    monkeypatch.setattr(speed, "measure", lambda options: seen.append(options) or {"results": ["one"]})
    monkeypatch.setattr(speed, "render", str)
    for words in (["--variants", "cpu"], ["--baseline", "eager"]):
        assert main(["bench", "--device", "cpu", *words]) == 0
    assert [list(one.kinds) for one in seen] == [["cpu"], ["eager"]]
    assert seen[0].baselines == kinds_of(CPU) and list(seen[1].baselines) == ["eager"]
    assert {"cpu+int8", "eager+int8"} <= set(seen[0].baselines)
    assert len(set(seen[0].prompts)) == len(seen[0].prompts) == 478  # another one for every image
    monkeypatch.setattr(speed, "measure", lambda options: {"results": []})
    assert main(["bench", "--device", "cpu"]) == 1  # all methods failed


@pytest.mark.parametrize(
    ("asked", "milliseconds", "slow"),
    [
        ((), {"eager": 16.0, "cpu": 12.0, "cpu+int8": 10.0}, ["eager"]),
        (("eager",), {"eager": 16.0, "cpu": 12.0, "cpu+int8": 10.0}, []),
        ((), {"eager": 99.0, "cpu": 1.0}, []),  # the two fastest are always measured
    ],
)
def test_slow_variants_that_nobody_asked_for_are_left_out(
    model: Model, monkeypatch: Patch, asked: tuple[str, ...], milliseconds: dict[str, float], slow: list[str]
) -> None:
    def line_up(_: object, entries: Any, build: object, run: Any, *__: object, **___: object) -> list[Contender]:
        field = [dataclasses.replace(parts[label], variant=variant) for label, variant in entries]
        for one in field:
            run(one)
        return field

    parts = {one.label: one for one in eager(model, "eagle1")}
    monkeypatch.setattr(speed.contenders, "line_up", line_up)
    monkeypatch.setattr(speed.racing, "warm", lambda one, jobs: None)
    monkeypatch.setattr(speed.racing, "pass_seconds", lambda one, job: milliseconds[one.variant.kind] / 1e3)
    options = BenchOptions((), images=1, kinds=asked, baselines=tuple(milliseconds), dtypes=("fp32",), is_quiet=True)
    monkeypatch.setattr(speed.contenders, "kinds_of", lambda device: tuple(milliseconds))
    field, _, found = speed.field_of(Stable(model), ["eagle1"], options, built(model.sampling()), job(model))
    left = [kind for kind in milliseconds if kind not in slow]
    assert [one.variant.kind for one in field if one.is_plain] == left
    assert [one.variant.kind for one in field if not one.is_plain] == (list(asked) or left)
    assert [one["variant"] for one in found] == [f"{kind} fp32" for kind in slow]


def test_rounding_is_measured_along_the_first_variants_images(model: Model) -> None:
    """By hand: decoding the same tokens again gives the logits that each was sampled from."""
    stable, jobs = Stable(model), jobs_of(model, PROMPTS, rounds=2, batch=2, seed=0)
    variants = [Variant(kind, dtype) for kind, dtype in (("eager", "fp32"), ("eager", "bf16"), ("eager+fp8", "fp32"))]
    build = built(model.sampling(temperature=1.0))
    field = [Contender("plain", one, build("plain", stable.model(one))) for one in variants]
    lines = [take(one, number, job) for number, job in enumerate(jobs) for one in field[:1]]
    found = list(speed.rounding(field, lines, jobs))
    assert [(one["variant"], one["from"]) for one in found] == [(str(one), "eager fp32") for one in variants[1:]]
    for one, moved in zip(field[1:], found, strict=True):
        assert 0 < moved["interval_95"][0] < moved["total_variation"] < moved["interval_95"][1] < 0.5
        variations = []
        for job, line in zip(jobs, lines, strict=True):
            tokens = unpack([image["tokens"] for image in line["images"]])
            sides = [decoded_log_probs(side, job, tokens) for side in (field[0], one)]
            variations.append((sides[0].exp() - sides[1].exp()).abs().sum(-1).mean() / 2)
        assert moved["total_variation"] == pytest.approx(float(torch.stack(variations).mean()), rel=2e-3)


def decoded_log_probs(one: Contender, job: RoundImages, tokens: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of each token but the first, from passes over one token each."""
    parts, found = one.parts, list[torch.Tensor]()
    state = parts.begin(job.condition, keys=job.keys)
    for place in range(1, tokens.shape[1]):
        state.tokens[:, :place] = tokens[:, :place]
        state.take()
        places = torch.full((len(tokens), 1), place)
        found.append(parts.sampling.log_probs(state.step.scores.logits, places).double())
    return torch.cat(found, 1)


def test_all_contenders_make_the_pictures_of_a_round_and_a_pass_is_timed(model: Model) -> None:
    found = jobs_of(model, PROMPTS, rounds=3, batch=4, seed=0)
    assert [len(job.keys) for job in found] == [4, 4, 4]
    assert [key for job in found for key in job.keys] == [(0, number) for number in range(12)]
    (plain,), (one,) = eager(model), job(model)
    assert 0 < pass_seconds(plain, one) < 10


def test_surroundings_name_no_person_and_no_host(tmp_path: Path, monkeypatch: Patch) -> None:
    found = surroundings(CPU)
    assert {"torch", "torchao", "cpu", "cores", "threads", "commit", "python"} <= set(found)
    assert os.path.expanduser("~") not in json.dumps(found)
    assert commit(tmp_path) == found["lantern"]
    monkeypatch.setattr("platform.system", lambda: "Windows")
    monkeypatch.delattr(os, "getloadavg")
    assert load_average() == []


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
ON_CPU = ("eagle1", "lantern++")
TINY = {"dim": 32, "n_layer": 2, "n_head": 2, "multiple_of": 16, "caption_dim": 8, "cls_token_num": 6}


@pytest.mark.parametrize("tau", [1.0, 2.0, 2.3, 3.0, 3.5, 4.0])
def test_a_script_has_its_mean(tau: float) -> None:
    counts = script(tau, 200)
    sums = torch.tensor(counts).cumsum(0)
    ideal = tau * torch.arange(1, len(counts) + 1)
    assert float((sums - ideal).abs().max()) < 1
    assert sum(counts) >= 200 > sum(counts[:-1])


@pytest.mark.parametrize(("tau", "images"), [(1.0, 3), (2.5, 1), (2.5, 3), (3.0, 3)])
@pytest.mark.parametrize(
    ("kind", "method"), [("eager", "eagle1"), *(pytest.param("cpu", name, marks=NEEDS_COMPILER) for name in ON_CPU)]
)
def test_a_scripted_verifier_gives_the_requested_tau(tau: float, images: int, kind: str, method: str) -> None:
    target, counts = tiny_target(block_size=64, dim=64, vocab_size=32), script(tau, 63)
    made = tiny_decoder(method, target, Sampling(guidance=3.0), tree="grown_8_2", engine=engine(kind))
    parts = shapes.scripted(made, counts, named("grown_8_2").shape())
    keys, steps = [(0, number) for number in range(images)], list[Step]()
    made = parts.generate(tiny_condition((4,) * images), keys=keys, callback=steps.append)
    assert (made.steps - 1).tolist() == [len(counts)] * images
    assert [int(step.counts[0]) for step in steps[1:-1]] == counts[:-1]
    assert isinstance(parts.verifier, Verifier) and float(made.total_variation.abs().max()) == 0


def test_random_models_hold_no_values_that_were_not_written() -> None:
    config = TransformerConfig(model_type="t2i", vocab_size=32, block_size=16, **TINY)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    try:
        made = shapes.random_model(config, ["eagle1"], CPU, torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(before, warn_only=True)
    networks = [made.target, made.vq, made.drafter]
    values = {name: value for one in networks if one is not None for name, value in one.state_dict().items()}
    assert len(networks) == 3 and "cls_embedding.uncond_embedding" in values
    assert [name for name, value in values.items() if not value.isfinite().all()] == []


def test_the_scripted_path_descends_the_tree_and_a_deeper_script_is_rejected() -> None:
    shape = named("narrow_10").shape()
    path = deepest(shape)
    assert [int(shape.depths[node]) for node in path] == [1, 2, 3, 4, 5]
    assert [int(shape.parents[node]) for node in path] == [0, *path[:-1]]
    message = "the script accepts 2 drafted tokens in a step, the tree has depth 1"
    refused(ScriptedVerifier, GumbelVerifier(), (3,), (1,), 16, match=message)
    refused(script, 0.5, 10, match="at least 1")
    options = ShapeOptions("B", taus=(4.0,), tree="chain_2", changes=TINY, device="cpu")
    refused(shapes.measure, options, match="choose a deeper --tree")


@pytest.mark.parametrize("drafters", [["eagle1"], ["parallelspec", "lantern++:drafts=parallelspec", "eagle1"]])
def test_a_size_is_measured_with_scripted_acceptance(drafters: list[str]) -> None:
    how: Any = {"dtypes": ("fp32",), "kinds": ("eager",), "changes": TINY | {"vocab_size": 64, "block_size": 64}}
    what: Any = {"drafters": drafters, "taus": (2.0, 2.5), "tokens": 12, "tree": "grown_8_2", "images": 2}
    found = shapes.measure(ShapeOptions("B", is_quiet=True, **what, **how))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    one_each = [f"{name}, tau {tau}" for name in drafters for tau in ("2", "2.5")]
    names = one_each if len(drafters) > 1 else ["tau 2", "tau 2.5"]
    assert [one["method"] for one in found["contenders"]] == ["plain", *names]
    assert [one["method"] for one in found["results"]] == names and found["drafter"] == ", ".join(drafters)
    assert all(one["ms_per_token"]["median"] > 0 and one["roofline"] > 0 for one in found["contenders"])
    assert [one["method"] for one in found["phases"]] == ["plain", *names]
    assert all(sum(one["shares"].values()) == pytest.approx(1, abs=1e-3) for one in found["phases"])
    assert "scripted acceptance, tree grown_8_2" in render(found)
