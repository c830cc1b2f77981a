"""The documents: their commands and examples run, and their links and paths resolve."""

import argparse
import inspect
import json
import math
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import patch

import pytest
import torch
from PIL import Image

from lantern.decoding.loop import State
from lantern.methods import METHODS, PROMISES
from lantern.models.llamagen.transformer import SIZES
from lantern.models.llamagen.vqvae import VQVAE
from tests import tiny_transformers as tiny
from tests.models.test_checkpoint import released_drafter
from tests.tiny import tiny_target
from tests.tiny_folder import VQ, save_tiny_model, tiny_text_encoder

ROOT = Path(__file__).resolve().parents[1]
CARD = ROOT / "assets" / "lantern-emoji" / "README.md"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EVERYWHERE = [*PAGES, *sorted((ROOT / "docs").glob("*/*.md")), ARCHITECTURE, CARD]
EVERYWHERE += [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    return [text for name, text in FENCE.findall(path.read_text(encoding="utf-8")) if name == language]


def commands(path: Path) -> list[str]:
    found = []
    for block in blocks(path, "sh"):
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        found += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return found


@dataclass(frozen=True)
class Exercise:
    """How a command is run: with words more, and others replaced; `{model}` in a word is the tiny model's folder."""

    extra: str = ""
    replace: dict[str, str] = field(default_factory=dict)
    prepare: "Callable[[Path], object] | None" = None
    is_slow: bool = False
    codes: tuple[int, ...] = (0,)


def images(folder: Path) -> None:
    from tests.eval.tiny_metrics import save_pictures, save_tiny_inception

    save_pictures(folder / "images", 12, prompts=True)
    save_pictures(folder / "real", 12, seed=1)
    save_tiny_inception(folder / "default_1.pt")


def trained(folder: Path) -> None:
    model = save_tiny_model(folder / "my-model" / "model")
    places = (("transformer", "target"), ("vqvae", "tokenizer"), ("drafter", "drafter"), ("drafter", "eagle1"))
    for part, place in places:
        shutil.copytree(model / part, folder / "runs" / place / part)


def trained_on_classes(folder: Path) -> None:
    save_tiny_model(folder / "my-classes" / "model", model_type="c2i", cls_token_num=1)


def mask(folder: Path) -> None:
    """A mask of the tiny model's size, whose lower half is white."""
    made = Image.new("L", (8, 8))
    made.paste(255, (0, 4, 8, 8))
    made.save(folder / "mask.png")


def models_of_transformers(folder: Path) -> None:
    tiny.save("janus", folder / "Janus-Pro-1B")
    tiny.save("emu3", folder / "Emu3-Gen-hf")


def released(folder: Path) -> None:
    """Files in the layout of the releases, at toy size: 8 x 8 tokens, as 128 pixels have."""
    heads, vocab = SIZES["XL"]["n_head"], 1024
    sizes: Any = {"dim": 4 * heads, "n_head": heads, "cls_token_num": 120, "vocab_size": vocab, "block_size": 64}
    torch.save({"model": VQVAE(replace(VQ, codebook_size=vocab)).state_dict()}, folder / "vq_ds16_t2i.pt")
    saved = {"model": tiny_target(**sizes).state_dict(), "args": argparse.Namespace(gpt_model="GPT-XL")}
    torch.save(saved, folder / "t2i_XL_stage2_512.pt")
    (folder / "llamagen2_drafter").mkdir()
    config = {"hidden_size": 4 * heads, "num_attention_heads": heads, "model_type": "llamagen"}
    (folder / "llamagen2_drafter" / "config.json").write_text(json.dumps(config))
    torch.save(released_drafter(4 * heads, 8 * heads, vocab), folder / "llamagen2_drafter" / "pytorch_model.bin")
    encoder = tiny_text_encoder()
    encoder.save_pretrained(folder / "flan-t5-xl", folder / "flan-t5-xl")


def prompts(folder: Path) -> None:
    (folder / "prompts.txt").write_text("a red apple\na blue cat\n")


# Commands of one page run in one folder, in the order of the page: they may use what an earlier one wrote. An exercise
# is of those that hold its text. Others run as they are, but for trainings, installations and requests to a server.
NOT_RUN = ("lantern train ", "-m venv", "pip install", "curl ")
FOLDER, SWEPT = "assets/lantern-emoji", "bounded-window:delta=0.05/0.2"
EXERCISES: dict[str, Exercise] = {
    "convert vq_ds16_t2i.pt": Exercise(prepare=released),
    "--image-size 512": Exercise(replace={"512": "128"}),
    "torchrun": Exercise("--out shared.png", is_slow=True),
    "generate --model Janus-Pro-1B": Exercise(prepare=models_of_transformers),
    "Emu3-Gen-hf": Exercise(replace={"512x512": "32x24"}),
    ".venv/bin/lantern doctor": Exercise(codes=(0, 1)),
    # refused before they listen; tests/generation/test_serving.py sends requests to a server
    "--port 8000": Exercise(replace={"8000": "80000"}, codes=(2,)),
    "--replicas 2": Exercise(replace={"2": "0"}, codes=(2,)),
    "--port 7860": Exercise(replace={"7860": "78600"}, codes=(2,)),
    "--negative-prompt": Exercise("--guidance 2"),
    "--prompts-file prompts.txt --out": Exercise(prepare=prompts),
    "--keep-rows 8": Exercise(replace={"8": "2"}),
    "--mask mask.png --out": Exercise(prepare=mask),
    "--engine cpu": Exercise("--model lantern-emoji", is_slow=True),
    "lantern tune": Exercise("--model {model} --images 1 --max-nodes 4 --max-depth 2 --methods eagle1", is_slow=True),
    "--metrics kid fid": Exercise("--draws 20", prepare=images),
    "--metrics psnr": Exercise("--draws 20"),
    "lantern reproduce": Exercise(is_slow=True),
    'my-model/model --prompt "a sandy beach"': Exercise(prepare=trained),
    "my-classes/model": Exercise(prepare=trained_on_classes),
    "assemble my-model --transformer": Exercise(
        replace={f"{FOLDER}/{part}": f"{{model}}/{part}" for part in ("text_encoder", "tokenizer")}
    ),
    "lantern bench --methods": Exercise("--model {model} --variants eager --baseline eager --images 1 --dtype fp32"),
    "lantern bench --shape": Exercise(
        "--tokens 2 --tau 2 --images 1 --baseline eager", replace={"cpu+int8": "eager"}, is_slow=True
    ),
    "lantern leaderboard --methods": Exercise(
        "--model {model} --baseline eager", replace={"4": "2", SWEPT: f"{SWEPT},window=4"}
    ),
    "lantern leaderboard --pairs": Exercise("--model {model} --engine eager --baseline eager", replace={"4": "1"}),
    "lantern.eval.gpu_headline": Exercise("--device cpu --toy", is_slow=True),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LANTERN_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(words: list[str]) -> int:
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    if program == "python":
        assert arguments[0] == "-m", words
        program, *arguments = arguments[1:]
    modules = {
        "lantern": "lantern.cli.main",
        "lantern-generate": "lantern.cli.generate",
        "torchrun": "torch.distributed.run",
    }
    return int(import_module(modules.get(program, program)).main(arguments) or 0)


def test_the_loop_in_the_architecture_is_that_of_the_code() -> None:
    quoted = "".join(blocks(ARCHITECTURE, "python"))
    for method in (State.round, State.draft, State.finish):
        assert dedent(inspect.getsource(method)) in quoted, f"copy State.{method.__name__} to ARCHITECTURE.md"


def test_every_exercise_is_of_a_command_of_a_page() -> None:
    every = [command for path in PAGES for command in commands(path)]
    assert [text for text in EXERCISES if not any(text in command for command in every)] == []


def exercises(path: Path, is_slow: bool) -> list[tuple[str, Exercise]]:
    """Return the commands of a page in order; those that are not slow come with those that are."""
    run = [one for one in commands(path) if not any(part in one for part in NOT_RUN)]
    known = [(one, next((EXERCISES[text] for text in EXERCISES if text in one), Exercise())) for one in run]
    has_slow = any(one.is_slow for _, one in known)
    return [pair for pair in known if is_slow or not pair[1].is_slow] if has_slow or not is_slow else []


@pytest.mark.parametrize("is_slow", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", [path for path in PAGES if commands(path)], ids=shown)
def test_commands_of_a_page_run(path: Path, is_slow: bool, copied: Path, place: Path) -> None:
    for command, exercise in exercises(path, is_slow):
        if exercise.prepare is not None:
            exercise.prepare(place)
        words = [exercise.replace.get(word, word) for word in shlex.split(command)] + shlex.split(exercise.extra)
        words += ["--model", "{model}"] if words[0] == "lantern-generate" and "--model" not in words else []
        words = [word.replace("{model}", str(copied)) for word in words]
        assert run(words) in exercise.codes, f"{shown(path)}: {shlex.join(words)}"


VALUES = ("--config", "--kind", "--steps", "--decay", "--minutes", "--recipe", "--only")


@pytest.mark.parametrize("path", [*PAGES, CARD], ids=shown)
def test_training_commands_name_what_there_is(path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lantern.cli import train
    from tests.cli.calls import record_stages

    variables: dict[str, str] = {}
    for command in commands(path):
        assignment = re.fullmatch(r'(\w+)="(.*)"', command)
        if assignment:
            variables[assignment[1]] = assignment[2]
        if not command.startswith("lantern train "):
            continue
        for name, value in variables.items():
            command = command.replace(f"${name}", value)
        words = shlex.split(command)
        for option, value in pairwise(words):
            if option.startswith("--") and option not in VALUES:
                Path(value).mkdir(parents=True, exist_ok=True)
            if option == "--model":  # that of the page's other trainings
                assert f"--target {value}/transformer" in path.read_text(encoding="utf-8"), command
        with monkeypatch.context() as patched:
            calls = record_stages(patched)
            patched.setattr(train, "run_all", lambda *given, calls=calls: calls.append(given) or 0)
            assert run(words) == 0, f"{shown(path)}: {command}"
        assert len(calls) == 1, command


@pytest.mark.parametrize(
    ("path", "block"),
    [(path, block) for path in PAGES for block in blocks(path, "python")],
    ids=lambda value: shown(value) if isinstance(value, Path) else "",
)
def test_python_examples_run(path: Path, block: str, copied: Path, place: Path) -> None:
    if path.name != "README.md":
        block = block.replace('"lantern-emoji"', repr(str(copied)))
    if path.name == "models.md":
        models_of_transformers(place)
    with patch.dict(METHODS), address(path, copied) as url:
        exec(compile(block.replace("http://127.0.0.1:8000", url), shown(path), "exec"), {"__name__": "example"})


@contextmanager
def address(path: Path, model: Path) -> Iterator[str]:
    """The address of a server of the tiny model, for the page about serving."""
    if path.name != "serve.md":
        yield ""
        return
    from lantern.generation.serving.app import Limits
    from lantern.models.folder import load_model
    from tests.generation.served import Served

    with Served(load_model(model, device="cpu", engine="eager"), Limits()) as server:
        yield server.url


def headings(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    lines = re.findall(r"^#+ (.*)$", text, re.M)
    named = re.findall(r'<a id="([^"]+)"></a>', text)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines} | {*named}


def links(path: Path) -> Iterator[str]:
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            yield target


@pytest.mark.parametrize("path", EVERYWHERE, ids=shown)
def test_relative_links_resolve(path: Path) -> None:
    for link in links(path):
        name, _, anchor = link.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), f"{shown(path)}: {link}"
        if anchor and found.suffix == ".md":
            assert anchor in headings(found), f"{shown(path)}: {link}"


INTERVAL = re.compile(r"(\d+\.\d+) \((\d+\.\d+) to (\d+\.\d+)\)")


def results_of(path: Path) -> set[Path]:
    return {(path.parent / link).resolve() for link in links(path) if link.endswith(".json")}


def estimates(value: Any) -> Iterator[tuple[float, float, float]]:
    """The figures with intervals that a result file has."""
    match value:
        case {"value": figure, "low": low, "high": high, **rest}:
            yield figure, low, high
            yield math.exp(figure), math.exp(low), math.exp(high)
        case {"interval_95": [low, high], **rest}:
            yield from ((rest[name], low, high) for name in ("median_of_ratios", "total_variation") if name in rest)
        case dict() as rest:
            pass
        case list():
            rest = dict(enumerate(value))
        case _:
            return
    for one in rest.values():
        yield from estimates(one)


def test_figures_with_intervals_are_those_of_result_files() -> None:
    """But for notes, where figures without a file are of runs that were not kept."""
    files = set().union(*map(results_of, PAGES))
    found = [one for file in files for one in estimates(json.loads(file.read_text(encoding="utf-8")))]
    known = {tuple(f"{end:.{digits}f}" for end in one) for one in found for digits in (2, 3)}
    figures = [(shown(path), *INTERVAL.findall(path.read_text(encoding="utf-8"))) for path in PAGES]
    wrong = {name: [one for one in given if one not in known] for name, *given in figures if name != "docs/notes.md"}
    assert sum(len(given) for _, *given in figures) > 300 and {name: one for name, one in wrong.items() if one} == {}


def test_figures_of_draft_passes_and_counts_of_equal_tokens_are_those_of_their_files() -> None:
    results, pages = ROOT / "eval" / "results", {path.name: path.read_text(encoding="utf-8") for path in PAGES}
    for name, one in json.loads((results / "draft_passes.json").read_text())["against"].items():
        paragraph = pages["methods.md"].split(f'<a id="{name}"></a>')[1].split("<a id=")[0].replace("\n", " ")
        value, low, high = (f"{math.exp(one['log_of_tokens_ratio'][end]):.2f}" for end in ("value", "low", "high"))
        assert f"{value} ({low} to {high}) times" in paragraph
    for name, end in (("leaderboard", "methods and trees"), ("leaderboard_greedy", "at temperature 0")):
        (board,) = json.loads((results / f"{name}.json").read_text())["boards"]
        counted = [row["differing_tokens"] for row in board["rows"] if row["promise"] == "tokens"]
        assert f"each of {len(counted)} {end}" in pages["exactness.md"].replace("\n", " ") and not any(counted)


def test_fields_of_requests_are_those_of_the_server() -> None:
    from lantern.generation.serving.app import EditRequest

    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    assert [name for name in EditRequest.model_fields if name != "images" and f"`{name}`" not in page] == []


def test_every_method_has_a_paragraph_and_stands_in_the_row_of_its_promise() -> None:
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert {method.page for method in METHODS.values() if method.page} <= {*re.findall(r'<a id="([^"]+)">', text)}
    rows = [sorted(re.findall(r"`([^`]+)`", row)) for row in re.findall(r"^\| \*\*(?:the same|relaxed).*", text, re.M)]
    paged = [method for method in METHODS.values() if method.page]
    assert rows == [sorted(one.name for one in paged if one.promise == promise) for promise in PROMISES]
