"""Prompts in words that the training captions never had are read as the nearest name."""

import json
from pathlib import Path

import pytest
import torch

from lantern.cli.assemble import COMMAND as ASSEMBLE
from lantern.cli.command import run_command
from lantern.generation.generator import generate
from lantern.generation.requests import UnknownPromptWarning, as_requests, requests_of_call, with_warnings
from lantern.models.folder import Model, load_model
from lantern.models.names import NAMES_NAME, WORDS_NAME


@pytest.fixture
def model(embedded: Model) -> Model:
    return embedded


READ = {
    "hound": "dog",
    "a red HOUND, 3d": "a red dog, 3d",
    "two  huge sedans": "two car",  # the unknown words together, in the place of the first
    "a bunny on the beach": "a rabbit on beach",
}
KEPT = (
    "a red apple",
    "a photograph of a dog",
    "the government",
    "xqzzt",
    "\U0001f436",
    "",
)  # a subject is known or none is near


@pytest.mark.parametrize(("prompt", "read"), [*READ.items(), *((prompt, prompt) for prompt in KEPT)])
def test_unknown_words_become_the_nearest_name_and_other_prompts_stay(model: Model, prompt: str, read: str) -> None:
    assert model.names is not None and model.names.reading(prompt) == read


def test_every_name_stays_and_is_known(model: Model) -> None:
    assert all(model.names.reading(name) == name for name in model.names.names)
    assert set(" ".join(model.names.names).split()) - {"of", "with"} <= model.names.words


def test_most_synonyms_are_read_as_their_concept(model: Model) -> None:
    assets = Path(__file__).parents[2] / "assets"
    pairs = json.loads((assets / "prompts" / "synonyms.json").read_text())
    right = sum(model.read(pair["prompt"]) == pair["concept"] for pair in pairs)
    assert right >= 78 and len(pairs) == 121  # 80 when the names were added


def test_a_negative_prompt_does_not_undo_it(model: Model) -> None:
    sampling = model.sampling()
    found = [
        requests_of_call(model, sampling, prompt=prompt, negative_prompt="a cat")[0].condition
        for prompt in ("hound", "dog")
    ]
    first, second = (one.embeddings for one in found if one is not None)
    assert first is not None and second is not None and torch.equal(first, second)


def test_images_are_those_of_the_reading(model: Model) -> None:
    with pytest.warns(UnknownPromptWarning, match="not trained on the words of the prompt 'hound': 'dog' is used"):
        made = generate(model, ["hound", "dog"], seed=3, method="plain")
    read, plain = made
    assert torch.equal(read.tokens, plain.tokens)
    assert read.as_dict()["prompt"] == "hound" and "'dog' is used" in read.as_dict()["warning"]
    assert "warning" not in plain.as_dict()


def test_a_reading_is_found_once(model: Model) -> None:
    found = with_warnings(model, as_requests(["hound", "dog"]), warn=lambda line: None)
    assert [one.text for one in found] == ["dog", "dog"] and found[0].prompt == "hound"
    assert with_warnings(model, found, warn=lambda line: pytest.fail("reported again")) == found


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
    assert run_command(ASSEMBLE, [str(copied), "--names", str(names)], prog="lantern assemble") == 0
    assert (copied / NAMES_NAME).read_text() == "red apple\ndog\n"
    for text, reason in (("", "has no names"), ("dog\n--\n", "has a line without a word")):
        names.write_text(text)
        assert run_command(ASSEMBLE, [str(copied), "--names", str(names)], prog="lantern assemble") == 2
        assert f"{names} {reason}, wanted a name on each line" in capsys.readouterr().err
