"""Invalid input and failures of all commands: one line, an exit code, and no file."""

import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lantern.cli.command import OneOf, existing, number
from lantern.cli.generate import main
from lantern.cli.main import COMMANDS
from lantern.cli.main import main as lantern
from tests.cli.calls import Capture, made, refusal

pytestmark = pytest.mark.usefixtures("elsewhere")
ROOT = Path(__file__).resolve().parents[2]
NAMELESS = "; a prompt is given with --prompt, in quotes"
NO_PIXELS = "has no VQ decoder: it can make tokens but no images (BLIND/vqvae is missing)"
TRAIN = " --config here/config.json --out out"
FILES = {"config.json": b"{}", "board.jsonl": b"{}\n", "none": b"", "binary": b"\xff\xfe", "long": b"a\n" + b"b" * 3000}
# calls, each with a part of its refusal; `here` is a folder of FILES, TOY a model, CLASSES one that makes images of
# classes, BLIND one without a VQ tokenizer
REFUSED = {
    "genrate": "unknown command 'genrate'; did you mean 'generate'?",
    "--debug doctor": "a command comes before its options",
    "zzz": "known are assemble, bench, completion, convert, demo, doctor, eval, generate",
    "generate apple": NAMELESS,
    "generate --prompts-file here/none": "holds no prompts",
    "generate --prompts-file here/binary": "not UTF-8",
    "generate --prompts-file here/long": "line 2",
    "generate": "wanted prompts or class labels, got neither",
    "generate --model CLASSES --prompt apple": "takes class labels",
    "generate --model CLASSES --class-label 1000": "0 to 999",
    "generate --model TOY --class-label 1": "takes prompts",
    "generate --model BLIND --prompt apple": NO_PIXELS,
    "generate --model BLIND --prompt apple --compare --method eagle1": NO_PIXELS,
    "methods medsua": "did you mean 'medusa'?",
    "methods plain --model nowhere": "nowhere",
    "convert nowhere out": "does not exist",
    "convert here out": "here",
    "convert here out --image-size 100": "wanted a multiple of 16",
    "convert here out --image-size 64 --grid 4": "not allowed with",
    "assemble out --transformer nowhere": "does not exist",
    "train data --config data-foldr --out out": "did you mean 'data-folder'?",
    "train data": "--out",
    "train data --recipe emojis" + TRAIN: "recipe 'emojis' is not in",
    "train data --packages ." + TRAIN: "stage data takes no --packages; it takes --path",
    "train tokeniser" + TRAIN: "invalid choice: 'tokeniser'",
    "train target" + TRAIN: "stage target needs --data",
    "train target --records ." + TRAIN: "unknown argument '--records'",
    "train all --steps 3 --minutes 1" + TRAIN: "got --steps and --minutes: give one of them",
    "train policy --kind c2t --records here --out out": "holds no *.safetensors",
    "train tables --config tables-sam --kind fr-spec --prompts . --out out": "a config of kind sam, got --kind fr-spec",
    "doctor --model .": "is not a model: it has neither config.json nor transformer/config.json",
    "doctor --size 7by7": "wanted width and height in pixels",
    "doctor --size 64x64": "--size is an option of --model, which is missing",
    "doctor --batch 2": "--batch is an option of --model",
    "doctor --model TOY --size 64x64": "makes images of one size: omit the size",
    "tune --model nowhere": "nowhere",
    "tune --out here": "is a folder",
    "tune --model CLASSES --prompts-file x": "leave --prompts-file out",
    "tune --max-nodes 1": "from 2 to 256",
    "tune --model TOY --prompts-file missing.txt": "No such file",
    "tune --model TOY --temperature 1e-9": "temperature",
    "eval nowhere": "does not exist",
    "bench --model no-such-model": "neither a folder nor a hub id",
    "bench --out here": "is a folder, wanted a file",
    "bench --tau 2": "--tau is an option of --shape",
    "bench --shape L --methods eagle1": "--methods is an option of a model",
    "bench --shape M": "wanted one of B, L",
    "bench --model TOY --methods eagel1": "did you mean 'eagle1'",
    "reproduce emoji --actors 2": "--actors is an option of --ray",
    "reproduce coco2014-3k": "did you mean 'coco2014-30k'",
    "reproduce nowhere/row.json": "nowhere",
    "leaderboard --from nowhere.json": "does not exist",
    "leaderboard --from here/config.json": "here/config.json",
    "leaderboard --from here/board.jsonl": "has no fingerprint",
    "leaderboard --from here/board.jsonl --metrics fid --top-k 5": "--metrics, --top-k, which --from does not use",
    "leaderboard --out here": "is a folder",
    "leaderboard --model TOY --methods plain": "always measured",
    "leaderboard --model TOY --methods eagle9": "did you mean",
    "leaderboard --model TOY --pairs eagle1": "wanted METHOD==METHOD",
    "leaderboard --model TOY --metrics kidd": "kidd",
    "leaderboard --model TOY --metrics kid": "kid: it compares with real images: give them with --reference",
    "leaderboard --from here": "here holds no leaderboard",
    "leaderboard --model TOY --metrics fid --reference here/config.json": "fid: no weights of inception",
    "leaderboard --model TOY --reference here/config.json": "--metrics, which is missing",
    "leaderboard --metrics clip --weights clpi=here": "did you mean 'clip'?",
    "completion": "SHELL",
    "demo nowhere": "nowhere",
    "serve nowhere": "nowhere",
    "serve CLASSES --port 0": "class labels",
    "serve BLIND --port 0": NO_PIXELS,
    "serve --replicas 2": "--replicas is an option of --ray",
    "serve nowhere --ray": "nowhere",
}
# options of a call for a red apple, each with a part of its refusal
OF_GENERATE = {
    "--method eagel1": "did you mean 'eagle1'?",
    "--methd plain": "did you mean '--method'?",
    "--guidance nan": "0 to 1000",
    "--temperature 1e-9": "temperature",
    f"--seed {'9' * 5000}": "whole number",
    "--method auto --k -1": "name the method with --method",
    "--method lantern --k -1": "whole number",
    "--omega 1": "omega is a setting of cool, cool-paper: name the method with --method",
    "--method lantern++ --k 24": "k is 24",
    "--method eagle1 --tree wide_51": "did you mean 'wide_15'?",
    "--device cuda:99": "not on this machine",
    "--device gpu": "wanted auto, cpu",
    "--weights bf16 --dtype fp32": "--weights bf16 contradicts --dtype fp32",
    "--engine cpu": "vocab_size is 24, the cpu engine needs a multiple of 32",
    "--prompt '   '": "the prompt is empty",
    f"--prompt {'a' * 10_000}": "at most 2000",
    "--prompt ...": "empty after cleaning",
    "--prompt": "expected one argument",
    "--prompts-file .": "Is a directory",
    "--class-label 3": "either words or classes",
    "--negative-prompt ...": "the negative prompt '...' is empty after cleaning",
    "--out x.gif": "wanted a folder or a file that ends in .png",
    "--out /dev/null": "wanted a folder or a file that ends in .png",
    "--out -": "not written to standard output",
    "--out x.png --format jpeg": "--format is jpeg",
    "--out x.png --name {seed}": "--name names the files of a folder",
    "--format png --quality 50": "PNG is lossless",
    "--name {promt}": "unknown field {promt}; did you mean 'prompt'?",
    "--name {seed.real}": "unknown field {seed.real}",
    "--name {seed:9999999999d}": "the field {seed:9999999999d}, wanted a width below 1000",
    "--name {prompt:{seed}}": "the field {prompt:{seed}}, wanted a width below 1000, no field within it",
    "--name {image:c}": "the field {image:c}, wanted",
    "--name {prompt": "fields are written {prompt}",
    "--name a/b": "give its folder with --out",
    "--name {prompt:d}": "--name is '{prompt:d}'",
    "--name -": "wanted from 1 to 200 bytes",
    f"--name {'a' * 300}": "wanted from 1 to 200 bytes",
    "--name a.webp --format png": "--format is png",
    "--grid 1 -n 200 --scale 16": "give --grid COLUMNS or --scale 1",
    "--grid --compare": "leave one of them out",
    "--batch 2 --compare": "--batch is given: leave one of them out",
    "--tokens t.json --grid": "--grid is an option of image files",
    "--tokens - --json": "both write to standard output",
    "--tokens a/b.json": "the folder a does not exist",
    "--tokens x.png --out ./x.png": "--tokens and --out are both x.png",
    "--init-image x.png --keep-rows 1 --out ./x.png": "--out and --init-image are both x.png",
    "--tokens t.json --record t.json --method eagle1": "--record and --tokens are both t.json",
    "--method plain --record x": "so there is nothing to --record",
    "--compare --record x": "leave one of them out",
    "--compare --method plain": "nothing to compare",
    "--method bounded --delta 0.1 --set delta=0.3": "delta is given twice, as 0.1 and 0.3",
    "--method eagle2 --set colour=red": "has no setting colour",
    "--method eagle2 --set nodes": "wanted NAME=VALUE",
    "--method sam --macth grid": "did you mean '--match'?",
    "--method eagle1 --delta 0.1": 'method "eagle1" has no setting delta: it takes tree',
    "--method grouped --p-radius 2": "wanted a number from 0 to 1",
    "--method eagle1 --tree bush --prompt zzqx": 'tree "bush" is unknown',  # before the warning of the prompt
    "--method lantern:delta=0.2": "wanted lantern: its settings are options, such as --delta=0.2",
    "--model lantern-emojy": "did you mean",
    "--model here/none": "is a file, wanted a folder: see lantern convert --help",
    "--model /nowhere": "neither a folder nor a hub id",
    "--model .": "is not a model",
}
REFUSED |= {f"generate --model TOY --prompt 'a red apple' {words}": part for words, part in OF_GENERATE.items()}


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: call[:90])
def test_bad_input_is_refused_in_one_line(
    call: str, model: str, classes: str, blind: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANTERN_CACHE", str(Path().resolve()))  # without weights
    Path("here").mkdir()
    for name, content in FILES.items():
        Path("here", name).write_bytes(content)
    part = REFUSED[call]
    for name, folder in {"TOY": model, "CLASSES": classes, "BLIND": blind}.items():
        call, part = call.replace(name, folder), part.replace(name, folder)
    assert part in refusal(capsys, lantern(shlex.split(call)))
    assert sorted(map(str, Path().rglob("*"))) == ["here", *(f"here/{name}" for name in sorted(FILES))]
    assert not (Path(model) / "profile.json").exists()


def test_refusals_of_every_command_are_tested() -> None:
    assert {call.split()[0] for call in REFUSED} >= set(COMMANDS)


@pytest.mark.parametrize("kind", [number(int, 0, 100), number(float, 0, 100), OneOf(["plain", "lantern"]), existing])
@settings(deadline=None)
@given(text=st.one_of(st.text(max_size=60), st.floats().map(str), st.integers().map(str), st.just("0x10")))
@example(text="\U00018cd6" * 60)  # ten characters each in a message
def test_a_text_gives_a_value_within_its_bounds_or_a_short_error(kind: Callable[[str], Any], text: str) -> None:
    try:
        value = kind(text)
    except ArgumentTypeError as error:
        assert len(str(error)) < 200
    else:
        assert not isinstance(value, int | float) or (0 <= value <= 100 and value == float(text))


OPTIONS = ["--prompt", "--method", "--seed", "-n", "--guidance", "--temperature", "--top-k", "--top-p", "--tokens"]
OPTIONS += ["--device", "--dtype", "--json", "--compare", "--quiet", "--k", "--delta", "--lambda", "--tree", "--batch"]
OPTIONS += ["--prompts-file", "--class-label", "--out", "--guidance-interval", "--residual"]
VALUES = ["a red apple", "plain", "eagle1", "lantern++", "auto", "0", "1", "2", "0.5", "-1", "nan", "inf", "1e400", ""]
VALUES += ["9" * 30, "chain_3", "chain_99", "cpu", "cuda:7", "fp32", "x.png", "t.json", "..", "a\0b", "\ud800"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.sampled_from(OPTIONS), st.sampled_from(VALUES), st.text(max_size=8)), max_size=6))
def test_no_arguments_end_in_a_traceback(model: str, capsys: Capture, arguments: list[str]) -> None:
    code = main(["--model", model, "--prompt", "a red apple", "--out", "fuzz", *arguments])
    output = capsys.readouterr().err
    assert code in (0, 1, 2) and "Traceback" not in output
    assert code == 0 or len(output.splitlines()) == 1


EARLY = ("--methd plain", "--method eagle1 --delta 0.1", "--method lantern++ --lambda 0", "--method medusa")
EARLY += ("--out x.png --tokens x.png", "--method plain --set k=3")


def test_what_can_be_refused_is_refused_before_torch_is_imported(model: str, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    shutil.rmtree(copy / "parts" / "medusa")
    calls = [["--model", str(copy), "--prompt", "a red apple", *options.split()] for options in EARLY]
    code = "import sys; from lantern.cli.generate import main; "
    code += f"print([(main(words), 'torch' in sys.modules) for words in {calls}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == f"{[(2, False)] * len(EARLY)}\n"
    assert all(line.startswith("lantern: error: ") for line in done.stderr.splitlines())


def test_no_prompt_writes_outside_of_the_folder(model: str, tmp_path: Path) -> None:
    prompts = ["../../etc/passwd", "/abs/path", "../.. a", "a" * 300, "a\0b"]
    prompts += ["\u202eelppa", "🍎🍏", "\ud83d apple", "con"]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert main(["--model", model, *words, "--out", "inner/deep"]) == 0
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(paths) == len(prompts) and {path.parent for path in paths} == {tmp_path / "inner/deep"}
    assert all(len(path.name) < 130 and path.name.isascii() for path in paths)


@pytest.mark.parametrize(
    ("broken", "message"),
    [("", "it has no transformer/config.json"), ("config.json", "is not JSON"), ("model.safetensors", "is missing")],
)
def test_a_broken_target_is_named_before_a_missing_drafter(
    copied: Path, capsys: Capture, broken: str, message: str
) -> None:
    shutil.rmtree(copied / "drafter")
    path = copied / "transformer" / broken
    shutil.rmtree(path) if not broken else path.write_text("{") if broken == "config.json" else path.unlink()
    assert message in refusal(capsys, made(str(copied), "--method", "eagle1"))


def test_a_read_only_place_fails_in_one_line(model: str, capsys: Capture) -> None:
    Path("file").write_text("")
    assert "file" in refusal(capsys, made(model, "--out", "file/below"), 1)
    assert "file" in refusal(capsys, made(model, "--tokens", "file/t.json"), 1)
    assert [path.name for path in Path().iterdir()] == ["file"]
