"""What callers of diffusers' pipelines expect: embeddings, negative prompts, engines, offloading, latents, saving."""

import copy
import gc
import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from lantern import LanternPipeline, generate
from lantern.core.io import read_config, weights_digest
from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.decoding.cache import PromptCache
from lantern.engines.engine import EagerEngine
from lantern.generation.pipeline import LanternTransformer
from lantern.generation.requests import Request
from lantern.methods import METHODS
from lantern.models.folder import load_model
from tests.refusals import refused
from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "toy", generation={"method": "plain", "guidance": 3.5})


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LanternPipeline:
    return LanternPipeline.from_pretrained(folder)


@pytest.fixture
def pipe(loaded: LanternPipeline) -> LanternPipeline:
    loaded.engine, loaded.method = "eager", "plain"
    return loaded


def test_what_is_no_model_is_refused_by_its_value(copied: Path) -> None:
    shutil.rmtree(copied / "transformer")
    assert "toy is not a model: it has no transformer/ folder" in refused(LanternPipeline.from_pretrained, copied)
    wanted = "model is None, wanted a name such as 'lantern-emoji', a folder or a hub"
    for load in (LanternPipeline.from_pretrained, load_model):
        refused(load, None, error=TypeError, match=wanted)
    wanted = "parts are vqvae, wanted some of codebook, drafter, text, vq"
    refused(load_model, "lantern-emoji", parts=["vqvae"], match=wanted)


@pytest.mark.parametrize(
    ("error", "given", "message"),
    [
        (TypeError, {"model": "lantern-emoji"}, "model is 'lantern-emoji', wanted a model, as load_model returns it"),
        (TypeError, {"sampling": 5}, "sampling is '5', wanted a Sampling"),
        *((TypeError, {"requested": x}, "of type") for x in ("a red apple", 3, ["a", 4.5], [None], [True])),
        *((ValueError, {"batch": x}, f"batch is {x}, wanted a whole number from 1") for x in (0, -1, 1.5, None)),
        (ValueError, {"requested": [Request("a cat"), Request("a cat", seed=-1)]}, "seed is -1"),
    ],
    ids=str,
)
def test_arguments_of_generate_are_refused_before_passes_are_measured(
    pipe: LanternPipeline, error: type[Exception], given: dict[str, Any], message: str
) -> None:
    how = {"model": pipe.model, "requested": ["a red apple"], "method": "auto"} | given
    refused(generate, **how, error=error, match=message)


def tokens(pipe: LanternPipeline, prompt: Any = "a red apple", **options: Any) -> torch.Tensor:
    merged: dict[str, Any] = {"generator": 5, "output_type": "latent"} | options
    found: Any = pipe(prompt, **merged)
    return found.tokens


def test_embeddings_take_the_place_of_a_prompt(pipe: LanternPipeline) -> None:
    embeddings, mask = pipe.encode_prompt(["a red apple", "blue cat"])
    given = {"prompt_embeds": embeddings, "prompt_attention_mask": mask}
    expected = tokens(
        pipe, ["a red apple", "blue cat"], num_images_per_prompt=numpy.int64(2), batch_size=numpy.int64(4)
    )
    assert torch.equal(tokens(pipe, None, **given, num_images_per_prompt=2), expected)
    words = int(mask[0].sum())  # without its padding a prompt needs no mask
    assert torch.equal(tokens(pipe, None, prompt_embeds=embeddings[:1, -words:]), expected[:1])
    text, pipe.text_encoder = pipe.text_encoder, None
    try:
        assert torch.equal(tokens(pipe, None, **given), tokens(pipe, None, **given, method="eagle1"))
    finally:
        pipe.text_encoder = text


def test_exact_methods_follow_a_negative_prompt(pipe: LanternPipeline) -> None:
    negative = {"negative_prompt": ["blue cat and dog", "two"], "prompt": ["a red apple", "a dog"]}
    expected = tokens(pipe, **negative)
    for method in ("eagle1", "gumbel-jacobi", "eagle3", "medusa", "self-cascade"):
        assert torch.equal(tokens(pipe, **negative, method=method), expected), method
    assert not torch.equal(expected, tokens(pipe, negative["prompt"]))
    same = tokens(pipe, negative["prompt"], negative_prompt="blue cat and dog")  # for both
    assert torch.equal(same[:1], expected[:1]) and not torch.equal(same[1:], expected[1:])


def test_a_negative_row_is_that_of_its_caption(folder: Path) -> None:
    model = load_model(folder)
    prompt, other = (model.text.condition([text], slots=6) for text in ("a cat", "a red apple and two dog"))
    with_negative = Condition(embeddings=prompt.embeddings, mask=prompt.mask, negative=other)
    both = model.target.read(with_negative, 2)
    for row, condition in enumerate((prompt, other)):
        one = model.target.read(condition, 1)
        assert torch.allclose(both.entries[:, :, :, row], one.entries[:, :, :, 0], atol=1e-6)
        assert torch.allclose(both.features[:, row], one.features[:, 0], atol=1e-6)
    torch.testing.assert_close(both.scores.exp(), prompt.mask.sum().double().expand(1, 2, 1))
    cache = PromptCache()
    found = [cache.read(model.target, condition, 2) for condition in (prompt, with_negative)]
    assert len(cache) == 2 and not torch.equal(found[0].features, found[1].features)
    assert "takes no negative prompt: use another method" in refused(model.target.read, with_negative, 2, whole=True)


def test_negative_embeddings_equal_their_text_which_statistics_name(pipe: LanternPipeline) -> None:
    embeddings, mask = pipe.encode_prompt("blue cat")
    given = {"negative_prompt_embeds": embeddings, "negative_prompt_attention_mask": mask}
    assert torch.equal(tokens(pipe, **given), tokens(pipe, negative_prompt="blue cat"))
    positive, seen = pipe.encode_prompt("a red apple")
    alone = tokens(pipe, None, prompt_embeds=positive, prompt_attention_mask=seen, **given)
    assert torch.equal(alone, tokens(pipe, negative_prompt="blue cat"))
    found: Any = pipe("a cat", negative_prompt="blue", generator=0, output_type="latent")
    assert (found.stats[0]["prompt"], found.stats[0]["negative_prompt"]) == ("a cat", "blue")
    found = pipe("a cat", negative_prompt="", generator=0, output_type="latent")
    assert "negative_prompt" not in found.stats[0]


def masked(*mask: bool) -> dict[str, Any]:
    return {"prompt": None, "prompt_embeds": torch.ones(1, 2, 8), "prompt_attention_mask": torch.tensor([mask])}


VALUES: list[tuple[dict[str, Any], str]] = [
    *(({name: "2"}, "is '2', wanted a") for name in ("scale", "guidance_scale", "temperature", "top_k")),
    *((masked(*mask), "padding behind words, or no word") for mask in ((True, False), (False, False))),
    (masked(True, True, True), "mask of prompt_embeds is [1, 3], wanted [1, 2]"),
    ({"engine": "gpu"}, "engine is 'gpu', expected one of auto, eager"),
    ({"weights": "int3"}, "weights is 'int3', expected one of full, int8, int4"),
    ({"kv_cache": "int8"}, "kv_cache is 'int8', expected one of full, fp8"),
    ({"negative_prompt": "blue", "guidance_scale": 1}, "negative_prompt has no effect without guidance"),
    ({"negative_prompt": ["a", "b"]}, "got 2 negative prompts for 1 images"),
    ({"prompt": ["a cat", "a dog"], "negative_prompt": ["blue", ""]}, "negative_prompt is empty for some prompts"),
    ({"negative_prompt": "blue", "negative_prompt_embeds": torch.ones(1, 6, 8)}, "give one of them"),
    ({"prompt_embeds": torch.ones(1, 6, 8)}, "or prompt_embeds: give one of them"),
    ({"prompt": None, "prompt_embeds": torch.ones(1, 6, 9)}, "has shape [1, 6, 9], wanted [b, 1 to 6, 8]"),
    ({"prompt": None, "prompt_embeds": torch.ones(1, 7, 8)}, "has shape [1, 7, 8], wanted [b, 1 to 6, 8]"),
    ({"prompt": None, "prompt_embeds": torch.full((1, 6, 8), torch.nan)}, "prompt_embeds holds NaN"),
    ({"prompt_attention_mask": torch.ones(1, 6)}, "prompt_attention_mask is given without prompt_embeds"),
    ({"prompt": []}, "got no prompt and no class label"),
    ({"output_type": "jpg"}, "wanted one of pil, pt, np, latent"),
    ({"num_images_per_prompt": 0}, "wanted a whole number from 1"),
    ({"batch_size": numpy.ones(2)}, "wanted a whole number from 1"),
    ({"generator": [1, 2]}, "2 generators for 1 images"),
    ({"generator": -1}, "seed is -1"),
    ({"class_labels": 1}, "give one of them"),
    ({"method": "lantern++", "delta": 0.1}, "no setting delta"),
    ({"method": "gumbel-jacobi:window=4", "window": 8}, "setting window is given twice, as 4 and 8: give one of them"),
    ({"settings": {"window": 4}, "window": 8}, "setting window is given twice, as 4 and 8: give one of them"),
    ({"method": "eagle1:tree"}, "has the option 'tree', wanted OPTION=VALUE"),
    ({"method": "repeat-left:length=x"}, 'length is "x", wanted a whole number of at least 1'),
    ({"callback_on_step_end_tensor_inputs": ["latents"]}, "'latents', wanted some of tokens"),
]
TYPES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": 3}, "prompt is int '3', wanted a text or a list of texts"),
    ({"prompt": ["a", 4]}, "prompt[1] is int '4', wanted a text"),
    *(({"prompt": None, "class_labels": x}, "wanted a whole number or a list") for x in (["x"], True, [1, True])),
    ({"negative_prompt": 3}, "negative_prompt is int '3'"),
    ({"prompt": None, "prompt_embeds": torch.ones(1, 6, 8).int()}, "is torch.int32, wanted a tensor of floating"),
    ({"settings": 3}, "settings is of type int"),
    ({"generator": True}, "generator is a bool, wanted a torch.Generator"),
    ({"generator": numpy.array([7])}, "generator is a ndarray, wanted a torch.Generator"),
    ({"callback_on_step_end": 3}, "callback_on_step_end is 3, wanted a function"),
]


@pytest.mark.parametrize(
    ("error", "options", "text"),
    [*((ValueError, *row) for row in VALUES), *((TypeError, *row) for row in TYPES)],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused_by_name(
    pipe: LanternPipeline, error: type[Exception], options: dict[str, Any], text: str
) -> None:
    assert text in refused(tokens, pipe, **options, error=error)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("eagle1", "tree", "chain_2"), ("repeat-left", "length", 2), ("specmquant", "width", 1)],
)
def test_options_are_settings_or_keywords_or_in_the_name(
    pipe: LanternPipeline, name: str, option: str, value: Any
) -> None:
    def accepted(**form: Any) -> list[float | None]:
        found: Any = pipe("a red apple", generator=5, **form)
        return found.stats[0]["accepted_by_depth"]

    wanted = accepted(method=name, settings={option: value})
    assert wanted != accepted(method=name)
    pipe.method = f"{name}:{option}={value}"
    assert accepted() == accepted(method=pipe.method) == wanted
    pipe.method = f"{name}:{option}={METHODS[name].settings[option]}"  # which a call replaces
    assert accepted(settings={option: value}) == wanted
    if option != "width":  # that of the image
        assert accepted(method=name, **{option: value}) == wanted


def test_engine_and_weights_are_those_of_the_call(pipe: LanternPipeline, folder: Path) -> None:
    full, eight = tokens(pipe, guidance_scale=1), tokens(pipe, guidance_scale=1, weights="int8")
    assert torch.equal(tokens(pipe, guidance_scale=1), full)  # of the call alone
    given = LanternPipeline.from_pretrained(folder, engine="eager", weights="int8")
    assert torch.equal(tokens(given, guidance_scale=1), eight) and given.engine == EagerEngine(weights="int8")
    assert torch.equal(tokens(given, guidance_scale=1, weights="full"), full)
    assert torch.equal(tokens(pipe, guidance_scale=1, engine=EagerEngine(weights="int8")), eight)
    assert "engine is 'x'" in refused(LanternPipeline.from_pretrained, folder, engine="x")
    assert LanternPipeline.from_pretrained(folder, engine="eager", kv_cache="fp8").engine == EagerEngine(kv_cache="fp8")
    assert "a KV cache in fp8 was given" in refused(pipe, "a red apple", engine="wide", kv_cache="fp8")


def test_latents_have_a_way_back(pipe: LanternPipeline) -> None:
    made: Any = pipe("a red apple", generator=5, output_type="pt")
    assert torch.equal(pipe.decode_latents(tokens(pipe), output_type="pt"), made.images)
    for given, message in (
        (torch.full((1, 4, 4), 99), "tokens are from 99 to 99, wanted 0 to 23"),
        (torch.full((1, 4, 4), -1), "tokens are from -1 to -1, wanted 0 to 23"),
        ([1, 2], "tokens are list, wanted a tensor of whole numbers"),
        (torch.zeros(1, 4, 4), "tokens are torch.float32, wanted a tensor of whole numbers"),
        (torch.zeros(4, 4, dtype=torch.int64), r"tokens have shape \[4, 4\], wanted \[b, 4, 4\]"),
        (torch.zeros(0, 4, 4, dtype=torch.int64), r"tokens have shape \[0, 4, 4\], wanted \[b, 4, 4\], b at least 1"),
        (torch.zeros(1, 2, 2, dtype=torch.int64), r"tokens have shape \[1, 2, 2\], wanted \[b, 4, 4\]"),
    ):
        refused(pipe.decode_latents, given, error=(TypeError, ValueError), match=message)


def test_a_pipeline_of_another_has_its_add_ons_method_and_engine(pipe: LanternPipeline) -> None:
    pipe.method = "eagle1"
    other = LanternPipeline.from_pipe(pipe)
    assert (other.method, other.engine) == ("eagle1", "eager") and set(other.model.add_ons) == set(pipe.model.add_ons)
    assert torch.equal(tokens(other, method="sam"), tokens(pipe, method="sam"))
    assert LanternPipeline.from_pipe(pipe, generation={"method": "sjd"}).method == "sjd"
    pipe.transformer.to(torch.bfloat16)
    parts = [LanternPipeline.from_pipe(pipe).components, pipe.components]
    assert all((one["transformer"].dtype, one["drafter"].dtype) == (torch.bfloat16, torch.float32) for one in parts)
    assert LanternPipeline.from_pipe(pipe, dtype=torch.bfloat16).drafter.dtype == torch.bfloat16


def test_a_pipeline_of_components_has_the_defaults_of_the_model(folder: Path, pipe: LanternPipeline) -> None:
    other = LanternPipeline(**pipe.components)
    assert other.config["generation"] == {"method": "plain", "guidance": 3.5} and other.method == "plain"
    other.engine = "eager"
    assert torch.equal(tokens(other), tokens(pipe))
    given = LanternPipeline(**pipe.components, generation={})
    assert (given.method, given.model.sampling()) == ("auto", Sampling())
    target: Any = LanternTransformer.from_pretrained(folder / "transformer")
    parts: dict[str, Any] = pipe.components | {"transformer": target}
    assert LanternPipeline(**parts).model.sampling() == Sampling()
    alone = LanternTransformer(target.config)  # of no model, until it is given one
    alone.load_state_dict(target.state_dict())
    for one in (target, alone, load_model(folder).target):
        made: Any = LanternPipeline.from_pretrained(folder, transformer=one)
        assert made.model.add_ons["eagle3"] is not None and made.transformer.loaded["add_ons"].loaded
        assert not copy.deepcopy(made.transformer).loaded["add_ons"].loaded


def test_weights_are_freed_with_their_pipeline(folder: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        held = weakref.ref(LanternPipeline.from_pretrained(folder).transformer)
        assert held() is None
    finally:
        gc.enable()


def test_what_only_other_pipelines_can_is_refused_by_name(pipe: LanternPipeline, folder: Path, tmp_path: Path) -> None:
    load: Any = LanternPipeline.from_pretrained
    refused(load, folder, torch_dtype="int", match="dtype is 'int', wanted auto, fp32")
    message = "variant is 'fp16', which lantern does not have: omit it, and give torch_dtype"
    refused(load, folder, variant="fp16", match=message)
    refused(load, folder, device_map="balanced", match="device_map is 'balanced', which lantern does not have: omit it")
    for offload in (pipe.enable_model_cpu_offload, pipe.enable_sequential_cpu_offload):
        refused(offload, device="cpu", match="^offloading is not supported: ")
    refused(pipe.save_pretrained, tmp_path / "saved", safe_serialization=False, match="^safe_serialization is False, ")
    refused(pipe.save_pretrained, tmp_path / "saved", variant="fp16", match="^variant is given")
    refused(pipe.save_pretrained, tmp_path / "saved", True, "fp16", match="^variant is given")
    assert not (tmp_path / "saved").exists()
    refused(pipe.save_pretrained, "", match="^save_directory is empty")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("transformer", "transformer is None, wanted a LanternTransformer, as from_pretrained loads it"),
        ("text_encoder", "model toy has no text encoder, which prompts need"),
        ("tokenizer", "model toy has no text encoder, which prompts need"),
        ("vqvae", "model toy has no VQ decoder: it can make tokens but no images"),
    ],
)
def test_a_pipeline_without_a_part_says_so(folder: Path, part: str, message: str) -> None:
    without: Any = {part: None}
    refused(
        lambda: LanternPipeline.from_pretrained(folder, **without)("a red apple", engine="eager"), match=f"^{message}$"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_weights_save_to_a_folder_that_loads(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    pipe = LanternPipeline.from_pretrained(folder)
    pipe.transformer.output.weight.data[0, 0] = 1.00391  # fp16 and bf16 round it apart
    loaded = LanternPipeline.from_pretrained(_saved(pipe, tmp_path / "first"), dtype=dtype)
    for one in (loaded, LanternPipeline(**loaded.components)):  # add-ons are those of the weights as they were stored
        assert one.model.add_ons["eagle3"] is not None and one.model.folder == tmp_path / "first"
    pipe = LanternPipeline.from_pretrained(tmp_path / "first").to(dtype).to(torch.float32)
    again = load_model(_saved(pipe, tmp_path / "saved"))
    assert again.drafter is not None and set(again.add_ons) >= {"sam", "eagle3", "c2t"}
    digest = weights_digest(pipe.transformer.state_dict())
    assert read_config(tmp_path / "saved" / "drafter")["target"] == digest
    assert again.add_ons["eagle3"] is not None
    assert torch.equal(tokens(LanternPipeline.from_pretrained(tmp_path / "saved")), tokens(pipe))


def test_a_drafter_of_other_weights_is_refused_and_never_signed(folder: Path, tmp_path: Path) -> None:
    changed = LanternPipeline.from_pretrained(folder)
    changed.transformer.output.weight.data[0, 0] += 1
    drafter = LanternPipeline.from_pretrained(_saved(changed, tmp_path / "other")).drafter
    mixed = LanternPipeline.from_pretrained(folder)
    mixed.drafter = drafter
    for call in (
        lambda: tokens(mixed),
        lambda: mixed.save_pretrained(tmp_path / "mixed"),
        lambda: LanternPipeline(**mixed.components),
        lambda: LanternPipeline.from_pretrained(folder, drafter=drafter),
    ):
        refused(call, match=rf"^drafter {tmp_path}/other/drafter was trained for a target of digest .* model toy")
    drafter.config = replace(drafter.config, target=None)
    assert read_config(_saved(LanternPipeline(**mixed.components), tmp_path / "mixed") / "drafter")["target"] is None


def test_weights_that_are_changed_and_saved_in_place_keep_drafter_and_add_ons(copied: Path) -> None:
    pipe = LanternPipeline.from_pretrained(copied)
    for _ in range(2):
        pipe.transformer.output.weight.data[0, 0] += 1
        pipe.save_pretrained(copied)
        for model in (pipe.model, load_model(copied)):
            assert model.drafter is not None and model.add_ons["eagle3"] is not None


def _saved(pipe: LanternPipeline, folder: Path) -> Path:
    pipe.save_pretrained(folder)
    return folder


def test_tuning_from_python_chooses_for_auto(folder: Path, tmp_path: Path) -> None:
    pipe = LanternPipeline.from_pretrained(folder, engine="eager")
    profile = pipe.tune(images=1, methods=["gumbel-jacobi"], prompts=["a cat"], out=tmp_path / "profile.json")
    assert profile["choice"]["method"] in ("plain", "gumbel-jacobi")
    assert json.loads((tmp_path / "profile.json").read_text())["pictures"] == 1
    pipe.transformer.loaded = None  # as that of a transformer that was not loaded with a model
    other = LanternPipeline(**pipe.components)
    assert "has no folder for its profile: give out" in refused(other.tune)
