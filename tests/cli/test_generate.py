"""Files and output of `lantern-generate`, with a toy model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lantern import LanternPipeline
from lantern.cli.generate import main
from lantern.methods import METHODS
from tests.cli.calls import Capture, grid, made, refusal

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_a_picture_is_saved_and_its_path_is_printed(model: str, capsys: Capture) -> None:
    from PIL import Image

    assert made(model) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.name == "a-red-apple-eagle1-fp32-g3-seed0-0.png" and list(Path().iterdir()) == [path]
    with Image.open(path) as image:
        assert image.size == (8, 8)


def test_the_picture_has_its_settings_as_metadata(model: str) -> None:
    from PIL import Image

    assert made(model, "--seed", "7", "--method", "plain", "--out", "x.png") == 0
    with Image.open("x.png") as image:
        text = image.info
    assert (text["prompt"], text["model"], text["method"], text["seed"]) == ("a red apple", "toy", "plain", "7")
    assert text["Source"] == "AI generated" and json.loads(text["versions"])["lantern"]
    assert "trainedAlgorithmicMedia" in text["XML:com.adobe.xmp"] and json.loads(text["sampling"])["top_k"] == 12


def test_the_prompt_can_be_left_out_of_the_metadata(model: str) -> None:
    assert made(model, "--no-prompt-in-metadata", "--out", "x.png") == 0
    assert b"apple" not in Path("x.png").read_bytes()


def test_the_command_is_also_a_subcommand_of_lantern(model: str, capsys: Capture) -> None:
    from lantern.cli.main import main as lantern

    assert lantern(["generate", "--model", model, "--prompt", "two cat", "--out", "y.png"]) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()


def test_the_seed_determines_the_picture(model: str) -> None:
    assert grid(model) == grid(model) != grid(model, "--seed", "1")


@pytest.mark.parametrize("method", ["eagle1", "auto"])
def test_exact_methods_give_the_tokens_of_plain_decoding(model: str, method: str) -> None:
    assert grid(model, "--method", method) == grid(model, "--method", "plain")


def test_options_replace_the_defaults_of_the_model(model: str) -> None:
    assert grid(model, "--method", "plain") == grid(model, "--method", "plain", "--guidance", "3", "--top-k", "12")
    assert grid(model, "--method", "plain") != grid(model, "--method", "plain", "--guidance", "9", "--top-k", "0")


def test_writing_tokens_needs_no_vq_and_makes_no_picture(model: str, tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(model, tmp_path / "copy")
    shutil.rmtree(copy / "vqvae")
    tokens = grid(str(copy), "--method", "eagle1")
    assert [len(row) for row in tokens] == [4] * 4 and all(0 <= token < 24 for row in tokens for token in row)
    assert not list(Path().glob("*.png"))


def test_tokens_of_several_pictures_are_a_list_of_grids(model: str) -> None:
    tokens = grid(model, "-n", "3", "--batch", "2")
    assert len(tokens) == 3 and tokens[0] == grid(model)


def test_tokens_and_pictures_can_be_written_together(model: str) -> None:
    assert made(model, "--tokens", "t.json", "--out", "pictures/") == 0
    assert Path("t.json").is_file() and len(list(Path("pictures").glob("*.png"))) == 1


def test_json_is_one_object_with_all_figures(model: str, capsys: Capture) -> None:
    own = ["--method", "lantern++", "--k", "4", "--tree", "chain_5"]
    assert made(model, "--json", *own, "--seed", "3", "-n", "2") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["method"], found["exact"], found["seed"]) == ("lantern++", False, 3)
    assert found["settings"] == {"k": 4, "tree": "chain_5"}
    assert found["tokens"] == 32 and 2 <= found["steps"] <= 32
    assert found["tokens_per_step"] == pytest.approx(32 / found["steps"], abs=1e-3)
    assert set(found["seconds"]) == {"text", "decode", "vq"} and 0 <= found["relaxed_share"] <= 1
    assert len(found["accepted_by_depth"]) == 5 and found["total_variation"] >= 0
    assert found["total_variation"] <= found["total_variation_max"] <= 1 and found["latent_distance"] >= 0
    assert all(one["total_variation_max"] <= found["total_variation_max"] for one in found["pictures"])
    assert [one["image"] for one in found["pictures"]] == [0, 1]
    assert len(set(found["prompt_sha256"])) == 2 and all(Path(path).is_file() for path in found["paths"])


def test_json_reports_latency_and_throughput_of_batches(model: str, capsys: Capture) -> None:
    assert made(model, "--json", "-n", "5", "--batch", "3") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["batch"] for one in found["pictures"]] == [3, 3, 3, 2, 2]
    assert (found["batch"], found["batch_halved"], found["asked"], found["stopped"]) == (3, None, 5, None)
    seconds = sum(found["seconds"].values())
    assert found["images_per_second"] == pytest.approx(5 / seconds, rel=0.02)
    assert found["tokens_per_second"] == pytest.approx(80 / seconds, rel=0.02)
    for one in found["pictures"]:
        assert one["latency"] == pytest.approx(one["batch"] * sum(one["seconds"].values()), rel=0.05, abs=1e-3)
    assert found["latency"] == found["pictures"][0]["latency"]


def test_the_summary_reports_throughput(model: str, capsys: Capture) -> None:
    assert made(model, "-n", "2", "--batch", "2") == 0
    assert re.search(r" s, [0-9.]+ images and [0-9]+ tokens per second$", capsys.readouterr().err.strip())


@pytest.mark.parametrize("method", [name for name in METHODS if not METHODS[name].is_plain])
def test_every_method_makes_a_picture(model: str, method: str, capsys: Capture) -> None:
    settings_of = {
        "lantern": ["--k", "4", "--delta", "0.2"],
        "lantern-paper": ["--k", "4"],
        "lantern++-paper": ["--k", "4"],
        "lantern++": ["--k", "4", "--lambda", "3"],
        "bounded": ["--k", "4", "--cap", "3", "--rounds", "1", "--width", "9"],
        "bounded-window": ["--k", "4", "--window", "3"],
        "cool": ["--omega", "2", "--nu", "0"],
        "grouped": ["--group", "4", "--p-radius", "0.5", "--d-radius", "1"],
        "tolerance": ["--samples", "3"],
        "vadusa": ["--samples", "3"],
    }
    tree = ["--tree", "chain_3"] if METHODS[method].tree else []
    assert made(model, "--method", method, *tree, *settings_of.get(method, [])) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()


def test_comparison_reports_figures_and_saves_the_two_side_by_side(model: str, capsys: Capture) -> None:
    from PIL import Image

    assert made(model, "--compare", "--method", "eagle1", "--out", "pair.png", "--repeats", "2") == 0
    out = capsys.readouterr().out
    for word in ("seconds", "steps", "tokens per step", "speedup", "relaxed tokens", "total variation", "identical"):
        assert word in out
    with Image.open("pair.png") as image:
        assert image.size == (8 + 8 + 8, 8)
        assert list(image.crop((0, 0, 8, 8)).tobytes()) == list(image.crop((16, 0, 24, 8)).tobytes())


def test_comparison_as_json_reports_what_relaxation_costs(model: str, capsys: Capture) -> None:
    assert made(model, "--compare", "--json", "--method", "lantern", "--k", "8", "--delta", "0.5") == 0
    [found] = json.loads(capsys.readouterr().out)["comparisons"]
    assert found["plain"]["steps"] == 16 and found["method"]["total_variation"] > 0
    assert found["identical"] == (found["plain"]["prompt_sha256"] == found["method"]["prompt_sha256"])


def test_plain_decoding_is_not_compared_with_itself(model: str, capsys: Capture) -> None:
    assert "nothing to compare" in refusal(capsys, made(model, "--compare", "--method", "plain"))


def test_prompts_come_from_files_in_several_forms(model: str) -> None:
    forms = {
        "p.txt": "a red apple\n\n  blue cat \n",
        "p.json": '["a red apple", {"prompt": "blue cat"}]',
        "p.jsonl": '{"caption": "a red apple"}\n"blue cat"\n',
        "p.tsv": "Prompt\tCategory\na red apple\tfood\nblue cat\tanimal\n",
    }
    grids = []
    for name, text in forms.items():
        Path(name).write_text(text, encoding="utf-8")
        assert main(["--model", model, "--prompts-file", name, "--tokens", "t.json", "--quiet"]) == 0
        grids.append(json.loads(Path("t.json").read_text()))
    assert grids == [grids[0]] * len(forms) and len(grids[0]) == 2


def test_negative_prompts_are_those_of_the_pipeline(model: str, capsys: Capture) -> None:
    prompts, negative = ["a red apple", "a dog"], ["blue cat", "two"]
    words = [word for text in prompts for word in ("--prompt", text)]
    pipe = LanternPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    for texts, more in ((["blue cat"], []), (negative, ["--compare"]), (negative, ["-n", "2"])):
        given = [word for text in texts for word in ("--negative-prompt", text)]
        comparing = "--compare" in more
        where = ["--out", "pairs"] if comparing else ["--tokens", "tokens.json"]
        tail = ["--method", "eagle1", "--json", "--seed", "5", *where, *more]
        assert main(["--model", model, *words, *given, *tail]) == 0
        report = json.loads(capsys.readouterr().out)
        made = report["comparisons" if comparing else "pictures"]
        assert list(dict.fromkeys(one["negative_prompt"] for one in made)) == texts
        if not comparing:
            call: Any = pipe(
                prompts, negative_prompt=texts, generator=5, output_type="latent", num_images_per_prompt=len(made) // 2
            )
            assert json.loads(Path("tokens.json").read_text()) == call.tokens.tolist()


def test_prompts_with_equal_file_names_do_not_overwrite_each_other(model: str) -> None:
    prompts = ["a cat", "a cat!", "A CAT", "a cat"]
    arguments = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert main(["--model", model, *arguments, "-n", "2", "--out", "here"]) == 0
    assert len(list(Path("here").iterdir())) == 8
    assert main(["--model", model, *arguments, "--out", "one/cat.png"]) == 0
    assert sorted(path.name for path in Path("one").iterdir()) == [f"cat-{i}.png" for i in range(4)]


def test_the_bar_is_off_if_stderr_is_not_a_terminal(model: str, capsys: Capture) -> None:
    assert made(model) == 0
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert made(model, "--quiet", "--overwrite") == 0
    assert capsys.readouterr().err == ""


def test_drafts_are_recorded(model: str, capsys: Capture) -> None:
    from lantern.drafters.policies.records import Records

    assert made(model, "--method", "eagle1", "--tokens", "a.json", "--record", "drafts.safetensors", "-n", "2") == 0
    records = Records.load(Path("drafts.safetensors"))
    assert len(records) > 0 and sorted(set(records.picture.tolist())) == [0, 1]
    assert records.about["method"] == "eagle1" and len(records.about["target"]) == 64
    capsys.readouterr()
    refused = "so there is nothing to --record"
    assert refused in refusal(capsys, made(model, "--method", "plain", "--record", "x.safetensors"))
    assert "leave one of them out" in refusal(capsys, made(model, "--compare", "--record", "x.safetensors"))


def test_any_setting_of_a_method_can_be_given_by_name(model: str, capsys: Capture) -> None:
    own = grid(model, "--method", "plain")
    changed = ("--set", "nodes=5", "--set", "depth=2", "--set", "value=q")
    assert grid(model, "--method", "eagle2", "--record", "r.safetensors", *changed) == own
    from lantern.drafters.policies.records import Records

    assert Records.load(Path("r.safetensors")).parents.shape[1] == 6
    capsys.readouterr()
    assert "has no setting colour" in refusal(capsys, made(model, "--method", "eagle2", "--set", "colour=red"))
    assert "wanted NAME=VALUE" in refusal(capsys, made(model, "--method", "eagle2", "--set", "nodes"))


def test_rounded_weights_are_reported(model: str, capsys: Capture) -> None:
    from PIL import Image

    pytest.importorskip("torchao", reason="torchao is not installed: extra eval or dev")
    for option, weights in ((), "full"), (("--weights", "int8"), "int8"):
        assert made(model, *option, "--json", "--out", "one.png") == 0
        engine = json.loads(capsys.readouterr().out)["engine"]
        assert engine["name"] == "eager" and engine["weights"] == weights and "vocab_size" in engine["reason"]
        with Image.open("one.png") as image:
            assert json.loads(image.info["engine"]) == engine


def test_the_window_of_the_machine_is_reported_unless_one_is_given(
    model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lantern.generation.generator.suited", lambda _, method: method.with_options(window=3))
    note = "window 3, chosen by the times of passes on this machine"
    assert made(model, "--method", "gumbel-jacobi", "--out", "a.png") == 0
    assert note in capsys.readouterr().err
    assert made(model, "--method", "gumbel-jacobi", "--window", "5", "--out", "b.png") == 0
    assert note not in capsys.readouterr().err
