"""Invalid input and failures of `lantern-generate`."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lantern.cli.generate import main
from tests.cli.calls import Capture, made, refusal
from tests.tiny_folder import save_tiny_model

pytestmark = pytest.mark.usefixtures("elsewhere")
ROOT = Path(__file__).resolve().parents[2]
# options of a call for a red apple, each with a part of its refusal
REFUSED = {
    "--method eagel1": "did you mean 'eagle1'?",
    "--methd plain": "did you mean '--method'?",
    "--guidance nan": "0 to 1000",
    "--temperature 1e-9": "temperature",
    "--top-p 0": "top_p is 0",
    "--seed -1": "whole number",
    f"--seed {'9' * 5000}": "whole number",
    "-n 0": "whole number",
    "--method auto --k -1": "name the method with --method",
    "--method lantern --k -1": "whole number",
    "--omega 1": "omega is a setting of cool, cool-paper: name the method with --method",
    "--method lantern++ --k 24": "k is 24",
    "--method eagle1 --tree wide_51": "did you mean 'wide_15'?",
    "--device cuda:99": "not on this machine",
    "--device gpu": "wanted auto, cpu",
    "--dtype int3": "wanted one of auto",
    "--engine cpu": "vocab_size is 24, the cpu engine needs a multiple of 32",
    "--prompt '   '": "the prompt is empty",
    f"--prompt {'a' * 10_000}": "at most 2000",
    "--prompt ...": "empty after cleaning",
    "--prompt": "expected one argument",
    "--prompts-file .": "Is a directory",
    "--class-label 3": "either words or classes",
    "--guidance 1 --negative-prompt blue": "negative_prompt has no effect without guidance: give guidance above 1",
    "--negative-prompt a --negative-prompt two": "got 2 negative prompts for 1 images, wanted 1",
    "--negative-prompt ...": "the negative prompt '...' is empty after cleaning",
    "--out x.gif": "wanted a folder or a file that ends in .png",
    "--out /dev/null": "wanted a folder or a file that ends in .png",
    "--out -": "not written to standard output",
    "--out x.png --format jpeg": "--format is jpeg",
    "--out x.png --name {seed}": "--name names the files of a folder",
    "--format gif": "wanted one of png, jpeg, webp",
    "--format png --quality 50": "PNG is lossless",
    "--name {promt}": "unknown field {promt}; did you mean 'prompt'?",
    "--name {seed.real}": "unknown field {seed.real}",
    "--name {prompt": "fields are written {prompt}",
    "--name a/b": "give its folder with --out",
    "--name {prompt:d}": "--name is '{prompt:d}'",
    "--name -": "wanted from 1 to 200 bytes",
    f"--name {'a' * 300}": "wanted from 1 to 200 bytes",
    "--name a.webp --format png": "--format is png",
    "--scale 0": "whole number from 1 to 16",
    "--grid 1 -n 200 --scale 16": "give --grid COLUMNS or --scale 1",
    "--grid --compare": "leave one of them out",
    "--batch 2 --compare": "--batch is 2: leave one of them out",
    "--tokens t.json --grid": "--grid is an option of image files",
    "--tokens - --json": "both write to standard output",
    "--tokens a/b.json": "the folder a does not exist",
    "--tokens .": "is a folder",
    "--tokens t.json --compare": "leave one of them out",
    "--tokens x.png --out ./x.png": "--tokens and --out are both x.png",
    "--init-image x.png --keep-rows 1 --out ./x.png": "--out and --init-image are both x.png",
    "--tokens t.json --record t.json --method eagle1": "--record and --tokens are both t.json",
    "--method plain --record x": "so there is nothing to --record",
    "--compare --record x": "leave one of them out",
    "--compare --method plain": "nothing to compare",
    "--method bounded --delta 0.1 --set delta=0.3": "delta is given twice, as 0.1 and 0.3",
    "--method eagle2 --set colour=red": "has no setting colour",
    "--method eagle2 --set nodes": "wanted NAME=VALUE",
    "--method eagle2 --set nodes=0": "nodes is 0, wanted a whole number of at least 1",
    "--method sam --macth grid": "did you mean '--match'?",
    "--method eagle1 --delta 0.1": 'method "eagle1" has no setting delta: it takes tree',
    "--method grouped --p-radius 2": "wanted a number from 0 to 1",
    "--method eagle1 --tree bush --prompt zzqx": 'tree "bush" is unknown',  # before the warning of the prompt
    "--method nosuch": "'nosuch', wanted a method that `lantern methods` lists",
    "--model lantern-emojy": "did you mean",
    "--model /nowhere": "neither a folder nor a hub id",
    "--model .": "is not a model",
}


@pytest.mark.parametrize("options", REFUSED, ids=lambda options: options[:40])
def test_bad_input_is_refused_in_one_line(model: str, capsys: Capture, options: str) -> None:
    words, first = shlex.split(options), [] if "--model" in options else ["--model", model]
    assert REFUSED[options] in refusal(capsys, main([*first, "--prompt", "a red apple", *words]))
    assert not list(Path().iterdir())


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


EARLY = (
    "--methd plain",
    "--method eagle1 --delta 0.1",
    "--method lantern++ --lambda 0",
    "--out x.png --tokens x.png",
    "--method medusa",
    "--method plain --set k=3",
)


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


def test_labels_are_for_models_of_classes_prompts_for_others(model: str, tmp_path: Path, capsys: Capture) -> None:
    classes = str(save_tiny_model(tmp_path / "classes", model_type="c2i", cls_token_num=1))
    labels = ["--class-label", "7", "--class-label", "8"]
    assert main(["--model", classes, *labels, "--out", "c", "--method", "eagle1"]) == 0
    names = [f"class-{label}-eagle1-fp32-g3-seed0-0.png" for label in (7, 8)]
    assert sorted(path.name for path in Path("c").iterdir()) == names
    capsys.readouterr()
    assert "takes class labels" in refusal(capsys, made(classes))
    assert "0 to 999" in refusal(capsys, main(["--model", classes, "--class-label", "1000"]))
    assert "takes prompts" in refusal(capsys, main(["--model", model, "--class-label", "1"]))
    line = refusal(capsys, main(["--model", classes, *labels, "--negative-prompt", "blue"]))
    assert "negative_prompt is not supported" in line


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


@pytest.mark.parametrize("options", ["", "--grid", "--compare --method eagle1"])
def test_a_model_without_a_vq_makes_tokens_only(model: str, tmp_path: Path, capsys: Capture, options: str) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    shutil.rmtree(copy / "vqvae")
    message = f"has no VQ decoder: it can make tokens but no images ({copy}/vqvae is missing)"
    assert message in refusal(capsys, made(str(copy), *options.split()))
    assert made(str(copy), "--tokens", "-") == 0


@pytest.mark.parametrize(
    ("raw", "output"), [(b"", "holds no prompts"), (b"\xff\xfe", "not UTF-8"), (b"a\n" + b"b" * 3000, "line 2")]
)
def test_bad_prompt_files_are_refused_in_one_line(model: str, capsys: Capture, raw: bytes, output: str) -> None:
    Path("p.txt").write_bytes(raw)
    assert output in refusal(capsys, main(["--model", model, "--prompts-file", "p.txt"]))


def test_a_read_only_place_fails_in_one_line(model: str, capsys: Capture) -> None:
    Path("file").write_text("")
    assert "file" in refusal(capsys, made(model, "--out", "file/below"), 1)
    assert "file" in refusal(capsys, made(model, "--tokens", "file/t.json"), 1)
    assert [path.name for path in Path().iterdir()] == ["file"]
