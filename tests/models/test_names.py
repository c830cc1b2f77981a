"""Prompts in words that the training captions never had are read as the nearest name."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from lantern import LanternPipeline
from lantern.cli.command import run_command
from lantern.cli.folders import assemble
from lantern.cli.generate import main
from lantern.generation.generator import generate
from lantern.generation.requests import UnknownPromptWarning, as_requests, with_warnings
from lantern.models.folder import Model, load_model
from lantern.models.llamagen.text import NAMES_NAME, WORDS_NAME, named_emoji
from recipes.emoji.captions import count_captions, pair_captions, plain_captions
from recipes.emoji.packages import Concept
from tests.cli.calls import Capture
from tests.refusals import refused
from tests.tiny_folder import save_tiny_model, tiny_text_encoder

ASSETS = Path(__file__).parents[2] / "assets"
READ = {
    "hound": "dog",
    "a red HOUND, 3d": "a red dog, 3d",
    "two  huge sedans": "two car",  # the unknown words together, in the place of the first
    "a bunny on the beach": "a rabbit on beach",
    "a pair of scissors": "scissors",
    "A pair of red jeans, 3d": "red jeans, 3d",
    "a pair of trousers": "jeans",
    "a pair of qwertz jeans": "qwertz jeans",
}
# a subject is known or none is near
KEPT = (
    *("a pair of cats", "a pair of cats wearing glasses", "a red apple", "a photograph of a dog", "the government"),
    *("xqzzt", "\U0001f436", ""),
)


@pytest.mark.parametrize(("prompt", "read"), [*READ.items(), *((prompt, prompt) for prompt in KEPT)])
def test_unknown_words_become_the_nearest_name_and_other_prompts_stay(embedded: Model, prompt: str, read: str) -> None:
    assert embedded.names is not None and embedded.names.reading(prompt) == read


def test_every_name_is_known_and_most_synonyms_are_read_as_their_concept(embedded: Model) -> None:
    assert all(embedded.names.reading(name) == name for name in embedded.names.names)
    assert set(" ".join(embedded.names.names).split()) - {"of", "with"} <= embedded.names.words
    pairs = json.loads((ASSETS / "prompts" / "synonyms.json").read_text())
    right = sum(embedded.read(pair["prompt"]) == pair["concept"] for pair in pairs)
    assert right >= 78 and len(pairs) == 121  # 80 when the names were added


def test_usual_prompts_names_and_training_captions_are_known(embedded: Model) -> None:
    files = ("prompts/contact_sheet.txt", "prompts/concepts.txt", "lantern-emoji/names.txt")
    usual = [line for file in files for line in (ASSETS / file).read_text().splitlines()]
    apple, cat = Concept("1", "red apple", ("apple",)), Concept("2", "cat")
    for style in ("3d", "flat", "noto"):
        made = plain_captions(apple, style, ("fruit",), colour="red") + count_captions(cat, style, 3, colour="blue")
        usual += [text for text, _ in made + pair_captions(apple, cat, style)]
    lines: list[str] = []
    with_warnings(embedded, as_requests(usual), warn=lines.append)
    assert len(lines) == 5 and all(line.endswith("trained on") for line in lines)  # synonyms of the contact sheet


def test_negative_prompts_have_warnings_too(embedded: Model) -> None:
    texts = ["qwertz", "a red pomegranate", "a red apple " * 12, "a cat"]
    call = [replace(one, negative_prompt=text) for text in texts for one in as_requests(["hound", "dog"])]
    lines: list[str] = []
    found = with_warnings(embedded, call, warn=lines.append)
    assert len(lines) == 4 and [one.reading for one in found] == ["dog", ""] * 4
    assert [one.warning for one in found[1::2]] == [*lines[1:], None]
    assert "has 'pomegranate' of the negative prompt" in lines[2] and "tokens of a negative prompt: 5" in lines[3]


def test_images_are_those_of_the_reading(embedded: Model) -> None:
    wanted = "reads the prompt 'hound' as 'dog', words that it was trained on"
    with pytest.warns(UnknownPromptWarning, match=wanted) as caught:
        numbers: dict[str, Any] = {"seed": numpy.int64(3), "batch": numpy.int64(1)}
        read, plain = generate(embedded, ["hound", "dog"], **numbers, method="plain")
    assert [one.filename for one in caught] == [__file__]
    assert torch.equal(read.tokens, plain.tokens)
    assert read.as_dict()["prompt"] == "hound" and "as 'dog'" in read.as_dict()["warning"]
    assert "warning" not in plain.as_dict()


def test_means_of_names_follow_the_text_encoder_and_are_of_all_models_with_it(
    embedded: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    text: Any = copy.deepcopy(embedded.text)
    counts, encode = list[int](), text.encode
    monkeypatch.setattr(text, "encode", lambda texts, **how: counts.append(len(texts)) or encode(texts, **how))
    for _ in range(2):  # as a pipeline makes a model for each call
        assert replace(embedded, text=text).read("hound") == "dog"
    assert counts == [1, 478, 1]
    with torch.no_grad():
        text.model.shared.weight.zero_()
    assert replace(embedded, text=text).read("hound") != "dog" and counts[3:] == [1, 478]


def test_names_need_their_list_and_that_of_words(copied: Path) -> None:
    assert load_model(copied, device="cpu").names is None
    (copied / NAMES_NAME).write_text("dog\n")
    assert load_model(copied, device="cpu").names is None
    (copied / WORDS_NAME).write_text("a\ndog\n")
    names = load_model(copied, device="cpu").names
    assert names is not None and names.names == ("dog",) and names.reading("a dog") == "a dog"


def test_assemble_takes_names(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = tmp_path / "names"
    names.write_text("Red Apple\n\ndog\nred apple\n")
    assert run_command(assemble, [str(copied), "--names", str(names)], prog="lantern assemble") == 0
    assert (copied / NAMES_NAME).read_text() == "red apple\ndog\n"
    for text, reason in (("", "has no names"), ("dog\n--\n", "has a line without a word")):
        names.write_text(text)
        assert run_command(assemble, [str(copied), "--names", str(names)], prog="lantern assemble") == 2
        assert f"{names} {reason}, wanted a name on each line" in capsys.readouterr().err


def test_emoji_and_plurals_are_known_by_their_names() -> None:
    assert named_emoji("two \U0001f34e\ufe0f", lambda c: True).split() == ["two", "red", "apple"]
    assert named_emoji("\U0001f44d\U0001f3fd", lambda c: True).strip() == "thumbs up sign"
    assert named_emoji("\U0001f34e", lambda c: False) == "\U0001f34e"
    encoder = tiny_text_encoder()
    named, plain = (encoder.encode([text], slots=6)[0] for text in ("a \U0001f34e", "a red apple"))
    assert torch.equal(named, plain)
    text = tiny_text_encoder()
    assert [text.knows(prompt) for prompt in ("apple", "apples", "zzz", "zzzs")] == [True, True, False, False]


ARABIC = "\u0633\u064a\u0628 \u0623\u062d\u0645\u0631"
NO_WORD, NO_TRAINED_WORD = "is in the vocabulary of", "was trained on no word of the prompt"
WARNINGS = {
    **{prompt: None for prompt in ("a red apple", "\U0001f34e", "\U0001f436\U0001f3fd")},
    **{prompt: NO_WORD for prompt in (ARABIC, "xyzzy qwrtp")},
    **{prompt: NO_TRAINED_WORD for prompt in ("democracy", "a nazar amulet", "\U0001f9ff", "zzz qqq")},
    "hound": "as 'dog', words that it was trained on",
    "a red qwertzon": "has 'qwertzon' of the",
    "a pair of qwertz jeans": "has 'qwertz' of the",
    "a smiling pomegranate": "has 'pomegranate' of the",
    "the owl's dog, two actors \U0001f9ff": None,
    "a qwertz and xqzzts": "has 'qwertz' or 'xqzzts' of the",
    "a black-and-white cat next to 100 dogs": None,
    "a red-and-qwertz cat": "has 'red-and-qwertz' of the",
    "a red apple " * 10 + "dog": None,
    "a red apple " * 12: "reads 32 tokens of a prompt: 5 at the end of 'a red apple",
}


def test_prompts_that_the_model_does_not_read_whole_have_a_warning_which_is_reported_once(embedded: Model) -> None:
    lines: list[str] = []
    found = with_warnings(embedded, as_requests([*WARNINGS, *WARNINGS]), warn=lines.append)
    for one, wanted in zip(found, [*WARNINGS.values()] * 2, strict=True):
        assert (one.warning is None) if wanted is None else wanted in (one.warning or ""), one.prompt
    assert lines == list(dict.fromkeys(one.warning for one in found if one.warning))
    with_warnings(embedded, found, warn=lambda line: pytest.fail("reported again"))


def test_the_command_warns_in_one_line_and_in_its_statistics(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    prompt = ARABIC
    command = ["--model", str(folder), "--prompt", prompt, "--prompt", "a red apple", "-n", "2"]
    command += ["--method", "plain"]
    assert main([*command, "--tokens", str(tmp_path / "tokens.json"), "--json"]) == 0
    seen = capsys.readouterr()
    found = json.loads(seen.out)
    assert [line.removeprefix("lantern: ") for line in seen.err.splitlines()] == found["warnings"]
    assert len(found["warnings"]) == 1 and repr(prompt) in found["warnings"][0]
    assert [one.get("warning") for one in found["pictures"]] == [*found["warnings"] * 2, None, None]
    comparison = ["--compare", "--method", "eagle1", "--out", str(tmp_path / "x.png")]
    assert main(["--model", str(folder), "--prompt", prompt, *comparison]) == 0
    assert capsys.readouterr().err.count("is in the vocabulary of") == 1


def test_a_pipeline_gives_a_python_warning(folder: Path) -> None:
    pipe: Any = LanternPipeline.from_pretrained(folder)
    with pytest.warns(UnknownPromptWarning, match="no word of the prompt 'zzz qqq' is in the vocabulary") as caught:
        stats = pipe(["zzz qqq", "a red apple"], output_type="latent").stats
    assert [one.filename for one in caught] == [__file__]
    assert "is in the vocabulary of" in stats[0]["warning"] and "warning" not in stats[1]


def test_images_are_enlarged_by_scale_or_size(tmp_path: Path) -> None:
    pipe: Any = LanternPipeline.from_pretrained(save_tiny_model(tmp_path / "m", generation={"scale": 2}))
    raw = pipe("a red apple", generator=1, scale=1, output_type="np").images
    assert pipe.size == 8 and raw.shape == (1, 8, 8, 3)
    assert pipe("a red apple", generator=1).images[0].size == (16, 16)
    near = pipe("a red apple", generator=1, height=24, width=24, resample="nearest", output_type="np").images
    assert (near[:, ::3, ::3] == raw).all()
    tokens = pipe("a red apple", generator=1, output_type="latent").tokens
    assert (pipe.decode_latents(tokens, "np", scale=1) == raw).all()
    assert pipe.decode_latents(tokens)[0].size == (16, 16)
    both: list[Any] = [{"scale": 2, "height": 8}, {"height": 8, "width": 16}]
    for given in [*both, {"scale": 0}, {"width": 7}, {"resample": "cubic"}]:
        refused(pipe, "a red apple", generator=1, **given, match="scale|width|height|resample")
