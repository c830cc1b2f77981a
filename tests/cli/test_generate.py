"""What `lantern-generate` makes, prints and reports, with a toy model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lantern import LanternPipeline
from lantern.cli.generate import main
from lantern.cli.main import main as lantern
from lantern.core.io import save_component
from lantern.drafters.records import Records
from lantern.generation.requests import read_prompts
from lantern.models.llamagen.text import NAMES_NAME, RECOGNISED_NAME, write_names, write_words
from lantern.models.llamagen.vqvae import VQVAE
from tests.cli.calls import Capture, figures, grid, made, printed, refusal, unread_stdout
from tests.refusals import refused
from tests.tiny_folder import VQ, save_tiny_model

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_a_picture_has_its_settings_as_metadata_with_or_without_the_prompt(model: str, capsys: Capture) -> None:
    assert made(model, "--seed", "7", "--method", "plain", "--out", "x.png") == 0
    seen = capsys.readouterr()
    assert seen.out == "x.png\n" and len(seen.err.splitlines()) == 1 and seen.err.endswith(" tokens per second\n")
    with Image.open("x.png") as image:
        text = image.info
    assert (text["prompt"], text["model"], text["method"], text["seed"]) == ("a red apple", "toy", "plain", "7")
    assert text["Source"] == "AI generated" and json.loads(text["versions"])["lantern"]
    assert "trainedAlgorithmicMedia" in text["XML:com.adobe.xmp"] and json.loads(text["sampling"])["top_k"] == 12
    words = ["--model", model, "--prompt", "a red apple", "--no-prompt-in-metadata", "--out", "y.png", "--quiet"]
    assert lantern(["generate", *words]) == 0
    seen = capsys.readouterr()
    assert (seen.out, seen.err) == ("y.png\n", "") and b"apple" not in Path("y.png").read_bytes()


def test_seed_method_and_options_determine_the_tokens_and_exact_methods_give_those_of_plain(model: str) -> None:
    plain = grid(model, "--method", "plain")
    for same in (["--method", "eagle1"], ["--method", "auto"], [], ["--guidance", "3", "--top-k", "12"]):
        assert grid(model, *same) == plain
    for other in (["--seed", "1"], ["--guidance", "9", "--top-k", "0"]):
        assert grid(model, "--method", "plain", *other) != plain


def test_tokens_need_no_vq_and_go_beside_pictures_or_to_stdout(model: str, blind: str, capsys: Capture) -> None:
    tokens = grid(blind)
    assert [len(row) for row in tokens] == [4] * 4 and all(0 <= token < 24 for row in tokens for token in row)
    several = grid(model, "-n", "3", "--batch", "2")
    assert len(several) == 3 and several[0] == tokens and not list(Path().glob("*.png"))
    relaxed = ["--method", "lantern++", "--k", "4"]  # without pictures the codebook alone is read
    for method, expected in (([], tokens), (relaxed, grid(model, *relaxed))):
        capsys.readouterr()
        assert made(model, "--tokens", "-", "--out", "x.png", "--quiet", *method) == 0
        assert json.loads(capsys.readouterr().out) == expected and Path("x.png").is_file()


def test_json_is_one_object_with_all_figures(model: str, capsys: Capture) -> None:
    own = ["--method", "lantern++", "--k", "4", "--tree", "chain_5"]
    found = figures(capsys, model, *own, "--seed", "3", "-n", "5", "--batch", "3")
    assert (found["method"], found["exact"], found["seed"]) == ("lantern++", False, 3)
    assert found["settings"] == {"k": 4, "tree": "chain_5"}
    assert found["tokens"] == 80 and found["tokens_per_step"] == pytest.approx(80 / found["steps"], abs=1e-3)
    assert len(found["accepted_by_depth"]) == 5 and found["latent_distance"] >= 0 <= found["relaxed_share"] <= 1
    assert 0 <= found["total_variation"] <= found["total_variation_max"] <= 1
    assert max(one["total_variation_max"] for one in found["pictures"]) == found["total_variation_max"]
    assert [(one["image"], one["batch"]) for one in found["pictures"]] == [(0, 3), (1, 3), (2, 3), (3, 2), (4, 2)]
    assert len(set(found["tokens_sha256"])) == 5 and all(Path(path).is_file() for path in found["paths"])
    assert (found["batch"], found["batch_halved"], found["asked"], found["stopped"]) == (3, None, 5, None)
    assert set(found["seconds"]) == {"text", "decode", "vq"}
    seconds = sum(found["seconds"].values())
    assert found["images_per_second"] == pytest.approx(5 / seconds, rel=0.02)
    assert found["tokens_per_second"] == pytest.approx(80 / seconds, rel=0.02)
    for one in found["pictures"]:
        assert one["latency"] == pytest.approx(one["batch"] * sum(one["seconds"].values()), rel=0.05, abs=1e-3)
    assert found["latency"] == found["pictures"][0]["latency"]
    unmeasured = figures(capsys, model, "--method", "zipar", "--set", "measured=false", "--out", "x.png")
    assert unmeasured["total_variation"] is None


def test_a_picture_may_have_one_token(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m", block_size=1)
    # group norm needs more than one value per channel group, also of a single token
    vq = VQVAE(replace(VQ, ch=64))
    save_component(vq.state_dict(), vq.config, folder / "vqvae")
    assert made(str(folder), "--method", "eagle1", "--out", "x.png") == 0
    with Image.open("x.png") as image:
        assert image.size == (2, 2)


def test_comparison_saves_the_two_side_by_side_and_reports_what_differs(model: str, capsys: Capture) -> None:
    assert made(model, "--compare", "--method", "eagle1", "--out", "pair.png") == 0
    out = capsys.readouterr().out
    for word in ("seconds", "steps", "tokens per step", "speedup", "relaxed tokens", "total variation", "identical"):
        assert word in out
    with Image.open("pair.png") as image:
        assert image.size == (8 + 8 + 8, 8)
        assert list(image.crop((0, 0, 8, 8)).tobytes()) == list(image.crop((16, 0, 24, 8)).tobytes())
    [found] = figures(capsys, model, "--compare", "--method", "lantern", "--k", "8", "--delta", "0.5")["comparisons"]
    assert found["plain"]["steps"] == 16 and found["method"]["total_variation"] > 0
    assert found["identical"] == (found["plain"]["tokens_sha256"] == found["method"]["tokens_sha256"])


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("p.txt", "# a comment\n  # another\na red apple\n\n  blue cat \n", ["a red apple", "blue cat"]),
        ("p.json", '["a red apple", {"prompt": "blue cat"}]', ["a red apple", "blue cat"]),
        ("p.jsonl", '{"caption": "a cat", "by": "a\u2028b"}\n"blue cat"\n', ["a cat", "blue cat"]),
        ("p.tsv", "Category\tPrompt\tNumber\nfood\ta cat\t1\n\tblue cat\t2\n", ["a cat", "blue cat"]),
        ("p.csv", 'Prompt\n"a red apple"\nblue cat\n', ["a red apple", "blue cat"]),
        ("p.csv", 'id,prompt\n1,a red apple\n2,"blue cat"\n', ["a red apple", "blue cat"]),
        ("p.csv", 'prompt\tid\n"Hello" sign\t1\n', ['"Hello" sign']),  # as LlamaGen's
        ("p.csv", 'id,prompt\n1,"""Hello"" sign"\n\n# 2,red\n', ['"Hello" sign']),
        ("p.csv", 'prompt\n"""Hello"" sign"\n', ['"Hello" sign']),
        ("p.tsv", 'id\tprompt\n1\t"Hello" sign\t\n', ['"Hello" sign']),
    ],
)
def test_prompts_come_from_files_in_several_forms(name: str, text: str, prompts: list[str]) -> None:
    Path(name).write_text(text, encoding="utf-8")
    assert read_prompts(name) == prompts


def test_prompts_of_a_file_are_those_of_the_command_line(model: str) -> None:
    Path("p.txt").write_text("a red apple\nblue cat\n")
    first, second = (grid(model, *words) for words in ([], ["--prompt", "blue cat"]))
    assert main(["--model", model, "--prompts-file", "p.txt", "--tokens", "t.json", "--quiet"]) == 0
    assert json.loads(Path("t.json").read_text()) == second and second[0] == first


@pytest.mark.parametrize(("rank", "processes", "code"), [("1", "", 0), ("0", "abc", 0), ("1", "1", 2), ("3", "2", 2)])
def test_numbers_of_processes_that_no_launcher_sets(
    model: str, rank: str, processes: str, code: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", processes)
    assert made(model, "--out", "o.png") == code and Path("o.png").exists() == (code == 0)
    assert code == 0 or f"RANK is {rank}, wanted a number below WORLD_SIZE, {processes}" in capsys.readouterr().err


def test_a_run_goes_on_when_nobody_reads_its_paths_any_more(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with unread_stdout(monkeypatch):
        assert made(model, "--method", "plain", "-n", "4", "--out", "o") == 0
    assert len(list(Path("o").iterdir())) == 4


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("id,prompt\n1,red, blue\n", "line 2 has more cells"),
        ('id,prompt\n1,"red\n2,blue\n', "is no row of a table"),
        ("id,text\n", "holds no prompts"),
        ("# nothing\n", "has no column"),
        ("", "has no column"),
    ],
)
def test_tables_of_other_forms_are_refused(rows: str, message: str) -> None:
    Path("p.csv").write_text(rows)
    refused(read_prompts, "p.csv", match=message)


def test_a_closed_standard_input_holds_no_prompts(model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input is closed" in refusal(capsys, main(["--model", model, "--prompts-file", "-"]))


def test_negative_prompts_are_those_of_the_pipeline(model: str, capsys: Capture) -> None:
    prompts, negative = ["a red apple", "a dog"], ["blue cat", "two"]
    words = [f"--prompt={prompts[1]}", *(f"--negative-prompt={text}" for text in negative), "--method", "eagle1"]
    for extra in ([], ["--compare"]):
        where = ["--out", "pairs"] if extra else ["--seed", "5", "-n", "2", "--tokens", "tokens.json"]
        found = figures(capsys, model, *words, *where, *extra)["comparisons" if extra else "pictures"]
        assert list(dict.fromkeys(one["negative_prompt"] for one in found)) == negative
    how: dict[str, Any] = {"generator": 5, "output_type": "latent", "num_images_per_prompt": 2}
    same: Any = LanternPipeline.from_pretrained(model)(prompts, negative_prompt=negative, **how)
    assert json.loads(Path("tokens.json").read_text()) == same.tokens.tolist()


def test_drafts_are_recorded_with_settings_given_by_name(model: str, capsys: Capture) -> None:
    changed = ("--set", "nodes=5", "--set", "depth=2", "--set", "value=q")
    own = grid(model, "--method", "plain", "-n", "2")
    assert grid(model, "--method", "eagle2", "--record", "r.safetensors", "-n", "2", *changed) == own
    assert capsys.readouterr().out.splitlines()[-2:] == ["grid.json", "r.safetensors"]
    records = Records.load(Path("r.safetensors"))
    assert len(records) > 0 and sorted(set(records.picture.tolist())) == [0, 1] and records.parents.shape[1] == 6
    assert records.about["method"] == "eagle2" and len(records.about["target"]) == 64


def test_engine_and_weights_are_reported(model: str, capsys: Capture) -> None:
    small = "vocab_size"  # why the toy model has no other engine
    cases = (((), "full", small), (("--weights", "int8"), "int8", small), (("--debug",), "full", "--debug"))
    for option, weights, reason in cases:
        engine = figures(capsys, model, *option, "--out", "one.png")["engine"]
        assert engine["name"] == "eager" and engine["weights"] == weights and reason in engine["reason"]
        with Image.open("one.png") as image:
            assert json.loads(image.info["engine"]) == {"name": "eager", "weights": weights, "kv_cache": "full"}


def test_the_window_is_reported_unless_it_is_given(
    model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lantern.generation.choice.suited", lambda _, method: method.with_options(window=3))
    note = "window 3, chosen by the times of passes on this machine"
    for name, option, is_reported in (("a.png", [], True), ("b.png", ["--window", "5"], False)):
        assert made(model, "--method", "gumbel-jacobi", *option, "--out", name) == 0
        assert (note in capsys.readouterr().err) == is_reported


def test_words_and_names_are_listed_where_they_are_recorded(copied: Path, capsys: Capture) -> None:
    for option, file in (("--list-words", "words.txt"), ("--list-names", "names.txt")):
        assert f"{file} is missing: the " in refusal(capsys, main(["--model", str(copied), option]))
    write_words(copied, ["A red apple", "a well-known cat's caf\u00e9, two"])
    words = printed(capsys, "generate", "--model", str(copied), "--list-words").split()
    assert words == ["a", "apple", "caf\u00e9", "cat's", "red", "two", "well-known"]
    for name, names in ((NAMES_NAME, ["dog", "red apple"]), (RECOGNISED_NAME, ["red apple"])):
        write_names(copied / name, names)
        assert printed(capsys, "generate", "--model", str(copied), "--list-names").splitlines() == names
    write_names(copied / RECOGNISED_NAME, ["\x1b[31mdog"])  # which would colour the terminal
    assert printed(capsys, "generate", "--model", str(copied), "--list-names").strip() == r"\x1b[31mdog"
