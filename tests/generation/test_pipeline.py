"""LanternPipeline as a diffusers pipeline, and its agreement with the command."""

import inspect
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from huggingface_hub import ModelCard
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from lantern import LanternPipeline
from lantern.core.io import read_checksums
from lantern.generation.generator import generate
from lantern.generation.pipeline import LanternDrafter, LanternOutput, LanternTransformer, LanternVQ
from lantern.models.folder import INDEX_NAME, load_model, record_tokens_per_step
from lantern.models.llamagen.text import CLASSES_NAME, read_words, write_words
from lantern.models.llamagen.transformer import Transformer
from tests.cli.calls import Capture
from tests.refusals import refused
from tests.tiny_folder import save_tiny_model


@pytest.fixture
def pipe(folder: Path) -> LanternPipeline:
    return LanternPipeline.from_pretrained(folder)


def call(pipe: Any, prompt: Any = "a red apple", **options: Any) -> LanternOutput:
    merged: dict[str, Any] = {"generator": 5} | options
    found = pipe(prompt, **merged)
    assert isinstance(found, LanternOutput)
    return found


def test_it_is_a_diffusers_pipeline(pipe: LanternPipeline) -> None:
    assert isinstance(pipe, DiffusionPipeline)
    assert set(pipe.components) == {"transformer", "vqvae", "text_encoder", "tokenizer", "drafter"}
    kinds = (type(pipe.transformer), type(pipe.vqvae), type(pipe.drafter))
    assert kinds == (LanternTransformer, LanternVQ, LanternDrafter)
    with pytest.raises(ValueError, match="did you mean"):
        pipe.method = "lantern+"
    assert pipe.method == "auto"


def test_a_prompt_gives_picture_tokens_and_statistics(pipe: LanternPipeline, capsys: Capture) -> None:
    found = call(pipe)
    assert "16/16" in capsys.readouterr().err  # the tokens of the progress bar
    assert found.images[0].size == (8, 8) and found.tokens.shape == (1, 4, 4)
    images, tokens, [figures] = pipe("a red apple", generator=5, return_dict=False)
    assert images == found.images and torch.equal(tokens, found.tokens) and set(figures) == set(found.stats[0])
    assert figures["seed"] == 5 and figures["tokens"] == 16 and figures["steps"] <= 16 and figures["exact"]
    assert figures["promise"] == "distribution"


def test_warming_up_caches_the_prompt_for_later_calls(pipe: LanternPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    read, steps = Transformer.read, list[int]()

    def counted(target: Any, condition: Any, rows: int, **how: Any) -> Any:
        steps.append(condition.batch)
        return read(target, condition, rows, **how)

    monkeypatch.setattr(Transformer, "read", counted)
    pipe.warmup("a red apple")
    assert steps == [1]
    call(pipe, "a red apple", generator=6)
    call(pipe, ["a red apple", "a red apple"], generator=[1, 2])
    assert steps == [1]
    call(pipe, ["a cat", "a red apple"], generator=[1, 2])
    assert steps == [1, 1]
    pipe.warmup(batch_size=2)
    assert steps == [1, 1]


def test_a_saved_pipeline_reloads_to_the_same_picture(pipe: LanternPipeline, tmp_path: Path) -> None:
    pipe.method = "eagle1"
    pipe.save_pretrained(tmp_path / "saved")
    again = LanternPipeline.from_pretrained(tmp_path / "saved")
    assert again.method == "eagle1"
    for path in (tmp_path / "saved").rglob("*.safetensors"):
        assert path.name in read_checksums(path.parent), path
    for method in ("plain", "lantern++"):
        before, after = call(pipe, method=method), call(again, method=method)
        assert torch.equal(before.tokens, after.tokens)
        assert before.images[0].tobytes() == after.images[0].tobytes()
    assert again.config["generation"]["top_k"] == 12
    late = LanternPipeline.from_pretrained(tmp_path / "saved", drafter=None)
    late.drafter = again.drafter
    late.save_pretrained(tmp_path / "late")
    assert LanternPipeline.from_pretrained(tmp_path / "late").drafter is not None
    assert str(tmp_path) not in (tmp_path / "saved" / "model_index.json").read_text()
    late.drafter = torch.compile(late.drafter, backend="eager")
    late.transformer.layers[0] = torch.compile(late.transformer.layers[0], backend="eager")
    late.save_pretrained(tmp_path / "late")
    late.transformer = torch.compile(late.transformer, backend="eager")
    late.save_pretrained(tmp_path / "late")
    compiled = call(LanternPipeline.from_pretrained(tmp_path / "late"), method="eagle1").tokens
    assert torch.equal(compiled, call(late, method="eagle1").tokens)


def test_weights_under_other_names_are_not_saved(pipe: Any, tmp_path: Path) -> None:
    linear = pipe.transformer.layers[1].feed_forward.w13
    names = pipe.transformer.state_dict().keys()
    register_parametrization(linear, "weight", torch.nn.Identity())
    message = "transformer has no weight 'layers.1.feed_forward.w1.weight': merge adapters"
    refused(pipe.save_pretrained, tmp_path / "saved", match=message)
    assert not (tmp_path / "saved").exists()
    remove_parametrizations(linear, "weight")
    assert pipe.transformer.state_dict().keys() == names


def test_a_saved_pipeline_has_the_words_and_classes_of_its_training(copied: Path, tmp_path: Path) -> None:
    write_words(copied, ["A red apple"])
    pipe = LanternPipeline.from_pretrained(copied)
    for place in (tmp_path / "saved", copied):
        pipe.save_pretrained(place)
        assert read_words(place) == ["a", "apple", "red"]
    folder = save_tiny_model(tmp_path / "c", model_type="c2i", cls_token_num=1)
    (folder / "transformer" / CLASSES_NAME).write_text('{"classes": ["cat", "dog"]}')
    LanternPipeline.from_pretrained(folder).save_pretrained(tmp_path / "classes")
    assert (tmp_path / "classes" / "transformer" / CLASSES_NAME).read_text() == '{"classes": ["cat", "dog"]}'


def test_a_folder_with_parts_of_another_model_is_not_saved_to(pipe: LanternPipeline, copied: Path) -> None:
    write_words(copied, ["A red apple"])
    before = sorted((path, path.stat().st_mtime_ns) for path in copied.rglob("*"))
    parts: dict[str, Any] = pipe.components | {"drafter": None}
    alone = LanternPipeline(**parts)
    refused(alone.save_pretrained, copied, match="has drafter, words.txt, which this pipeline lacks: remove it, or")
    alone.transformer = LanternTransformer(pipe.transformer.config)  # of no model
    refused(alone.save_pretrained, copied, match="has drafter, parts/.*, words.txt, which this pipeline lacks")
    assert sorted((path, path.stat().st_mtime_ns) for path in copied.rglob("*")) == before


def test_tokens_per_pass_of_windows_are_those_of_the_folder(folder: Path, copied: Path, tmp_path: Path) -> None:
    known = {2: 1.5, 4: 2.25}
    record_tokens_per_step(copied, known)
    pipe = LanternPipeline.from_pretrained(copied)
    pipe.save_pretrained(tmp_path / "saved")
    assert pipe.model.tokens_per_step == load_model(tmp_path / "saved").tokens_per_step == known
    assert LanternPipeline(**pipe.components).model.tokens_per_step == known
    pipe.transformer = LanternPipeline.from_pretrained(folder).transformer
    assert pipe.model.tokens_per_step == {}


def test_a_folder_without_an_index_is_described_by_its_components(copied: Path) -> None:
    (copied / "model_index.json").unlink()
    pipe = LanternPipeline.from_pretrained(copied)
    assert call(pipe, guidance_scale=3.0, top_k=12).tokens.shape == (1, 4, 4)


def test_output_types_hold_the_same_picture(pipe: LanternPipeline) -> None:
    pil = numpy.asarray(call(pipe).images[0])
    points = call(pipe, output_type="pt").images
    array = call(pipe, output_type="np").images
    assert points.shape == (1, 3, 8, 8) and array.shape == (1, 8, 8, 3) and array.dtype == numpy.float32
    assert numpy.array_equal((array[0] * 255).round().astype(numpy.uint8), pil)
    assert torch.equal(points.permute(0, 2, 3, 1), torch.from_numpy(array))
    latent = call(pipe, output_type="latent")
    assert torch.equal(latent.images, latent.tokens)


def test_pictures_depend_on_their_seed_and_not_on_the_batch(pipe: LanternPipeline) -> None:
    prompts, seeds = ["a red apple", "blue cat"], [torch.Generator().manual_seed(7), numpy.int64(8)]
    torch.rand(3, generator=seeds[0])  # only the seed of a generator matters
    together = call(pipe, prompts, generator=seeds).tokens
    alone = [call(pipe, prompt, generator=seed).tokens[0] for prompt, seed in zip(prompts, (7, 8), strict=True)]
    assert torch.equal(together, torch.stack(alone))
    many = call(pipe, prompts, num_images_per_prompt=2).tokens
    assert len({tuple(tokens.flatten().tolist()) for tokens in many}) == 4
    assert torch.equal(many, call(pipe, prompts, num_images_per_prompt=2, batch_size=1).tokens)
    assert torch.equal(many[:2], call(pipe, num_images_per_prompt=2).tokens)
    first, second = call(pipe, generator=None), call(pipe, generator=None)
    assert not torch.equal(first.tokens, second.tokens)
    assert torch.equal(call(pipe, generator=first.stats[0]["seed"]).tokens, first.tokens)


def test_the_callback_sees_the_grid_fill(pipe: LanternPipeline) -> None:
    seen = []

    def watch(given: LanternPipeline, step: int, timestep: int, tensors: dict[str, Any]) -> dict[str, Any]:
        assert given is pipe
        seen.append((step, timestep, int((tensors["tokens"] >= 0).sum())))
        grids.append(tensors["tokens"])
        return tensors

    grids = list[torch.Tensor]()
    found = call(pipe, method="eagle1", callback_on_step_end=watch)
    assert [int((grid >= 0).sum()) for grid in grids] == [known for _, _, known in seen]
    assert [step for step, _, _ in seen] == list(range(found.stats[0]["steps"]))
    assert seen[-1][1:] == (16, 16) and all(timestep == known for _, timestep, known in seen)


def test_an_interrupted_call_returns_partial_pictures(pipe: LanternPipeline) -> None:
    def stop(given: LanternPipeline, step: int, timestep: int, tensors: dict[str, Any]) -> dict[str, Any]:
        given._interrupt = step == 3 or bool(given.method == "lantern")
        return tensors

    whole = call(pipe, method="plain").tokens.flatten()
    part = call(pipe, method="plain", callback_on_step_end=stop)
    assert torch.equal(part.tokens.flatten()[:4], whole[:4]) and not part.tokens.flatten()[4:].any()
    assert [part.stats[0][name] for name in ("steps", "tokens", "promise", "tokens_per_step")] == [4, 4, None, 1.0]
    assert part.stats[0]["warning"] == "interrupted: 4 of 16 tokens were decoded, the others are 0"
    assert torch.equal(call(pipe, method="plain").tokens.flatten(), whole)
    several = {"prompt": ["a red apple"] * 2, "batch_size": 1, "callback_on_step_end": stop}
    found = call(pipe, **several, method="plain", generator=[5, 6])
    assert [len(found.images), len(found.tokens), len(found.stats)] == [1, 1, 1]  # the batch is the last one
    pipe.method = "lantern"  # is interrupted at once
    stats = call(pipe, settings={"k": 4}, callback_on_step_end=stop).stats[0]
    assert stats["promise"] is None and 0 < stats["tokens"] < 16
    assert 0 <= stats["total_variation"] <= stats["total_variation_max"] <= 1


def test_an_interrupt_is_not_lost_in_a_call_within_the_callback(pipe: LanternPipeline) -> None:
    def stop_at_once(given: LanternPipeline, *_: Any) -> None:
        given._interrupt = True

    def stop(given: LanternPipeline, step: int, timestep: int, tensors: dict[str, Any]) -> None:
        given._interrupt = step == 3
        if step in (1, 3):
            inner = call(given, method="plain", callback_on_step_end=stop_at_once if step == 1 else None)
            assert inner.stats[0]["tokens"] == (1 if step == 1 else 16)

    assert call(pipe, method="plain", callback_on_step_end=stop).stats[0]["tokens"] == 4


def test_half_precision_keeps_the_rotary_table(pipe: LanternPipeline) -> None:
    before = pipe.transformer.rotary.table.clone()
    assert pipe.to(torch.bfloat16).dtype == torch.bfloat16 and pipe.vqvae.dtype == torch.float32
    assert pipe.transformer.rotary.table.dtype == torch.float32 and torch.equal(pipe.transformer.rotary.table, before)
    assert pipe.transformer.output.weight.dtype == torch.bfloat16
    assert call(pipe, output_type="latent").tokens.shape == (1, 4, 4)


@pytest.mark.parametrize(
    ("option", "name"), [("dtype", "bfloat16"), ("torch_dtype", "bf16"), ("torch_dtype", torch.bfloat16)]
)
def test_a_dtype_can_be_given_at_loading(
    folder: Path, option: str, name: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pipe: Any = LanternPipeline.from_pretrained(folder, **{option: name})
    dtypes = {pipe.dtype, pipe.transformer.dtype, pipe.drafter.dtype, pipe.text_encoder.dtype}
    assert dtypes == {torch.bfloat16} and pipe.vqvae.dtype == torch.float32
    assert load_model(folder, dtype=name).dtype == torch.bfloat16 and caplog.records == []


def test_a_text_encoder_in_fp16_is_that_of_the_command_line(folder: Path) -> None:
    pipe, model = LanternPipeline.from_pretrained(folder, dtype="fp16"), load_model(folder, dtype="fp16")
    expected = {name: weight.dtype for name, weight in model.text.model.named_parameters()}  # type: ignore[union-attr]
    assert {name: weight.dtype for name, weight in pipe.text_encoder.named_parameters()} == expected
    assert set(expected.values()) == {torch.float16, torch.float32}  # transformers keeps a part of T5 in fp32


def test_a_class_model_takes_labels_and_refuses_words(tmp_path: Path) -> None:
    pipe = LanternPipeline.from_pretrained(save_tiny_model(tmp_path / "c", model_type="c2i", cls_token_num=1))
    assert pipe.text_encoder is None and call(pipe, None, class_labels=[3, 4]).tokens.shape == (2, 4, 4)
    words: list[Any] = [{"prompt_embeds": torch.ones(1, 1, 8)}, {"class_labels": 1, "negative_prompt": "blue"}]
    for prompt, options in (("a red apple", {}), *((None, given) for given in words)):
        refused(call, pipe, prompt, **options, match="model c takes class labels")


@pytest.mark.filterwarnings("ignore")
def test_diffusers_loads_what_was_assembled_and_what_was_saved(
    pipe: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned = list[str]()
    for module in ("configuration_utils", "pipelines.pipeline_utils"):
        monkeypatch.setattr(f"diffusers.{module}.logger.warning", warned.append)
    pipe.transformer.loaded = pipe.transformer.loaded | {"tokens_per_step": {2: 1.5}}
    pipe.save_pretrained(tmp_path / "saved")
    LanternPipeline.from_pretrained(tmp_path / "saved").save_pretrained(tmp_path / "saved")
    for place, known in ((folder, {}), (tmp_path / "saved", {2: 1.5})):
        found = DiffusionPipeline.from_pretrained(place, trust_remote_code=True)
        assert type(found).__name__ == "LanternPipeline" and found.model.tokens_per_step == known
        for how in ({}, {"method": "sam"}):
            assert torch.equal(call(found, **how).tokens, call(pipe, **how).tokens)
    found = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16, trust_remote_code=True)
    assert (found.transformer.dtype, found.vqvae.dtype) == (torch.bfloat16, torch.float32)
    assert not [line for line in warned if "ignored" in line]


def test_a_pushed_folder_is_whole(pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[set[str]] = []

    def upload(working_dir: str, repo_id: str, **how: Any) -> str:
        sent.append({path.relative_to(working_dir).as_posix() for path in Path(working_dir).rglob("*")})
        return f"https://hub/{repo_id}/commit/{how['token']}"

    of_hub = "diffusers.utils.hub_utils"
    monkeypatch.setattr(f"{of_hub}.create_repo", lambda name, **_: SimpleNamespace(repo_id=f"somebody/{name}"))
    monkeypatch.setattr(f"{of_hub}.load_or_create_model_card", lambda *_, **__: ModelCard("---\nlicense: mit\n---\n"))
    monkeypatch.setattr(pipe, "_upload_folder", upload)
    assert pipe.push_to_hub("apples", token="t") == "https://hub/somebody/apples/commit/t"
    pipe.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="apples", token="t")
    needed = {"README.md", "pipeline.py", INDEX_NAME, "transformer/model.safetensors", "parts/medusa/config.json"}
    assert len(sent) == 2 and all(needed <= files for files in sent)


def served(folder: Path, **fields: Any) -> list[Any]:
    """Load and call the pipeline as vLLM-Omni's adapter for diffusers does."""
    pipe: Any = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32, trust_remote_code=True)
    for name in ("_flash_3_hub", "flash"):
        with suppress(Exception):
            pipe.transformer.set_attention_backend(name)
            break
    else:
        pipe.transformer.set_attention_backend("native")
    offered = {"generator": torch.Generator().manual_seed(fields.pop("seed")), "num_inference_steps": 50} | fields
    known = inspect.signature(pipe.__call__).parameters
    return pipe(**{name: value for name, value in offered.items() if name in known}).images


# the adapter passes it under this name
@pytest.mark.filterwarnings("ignore:.torch_dtype. is deprecated:FutureWarning")
def test_pictures_are_those_of_the_seed_and_another_size_is_refused(folder: Path) -> None:
    images = served(folder, prompt="a red apple", seed=11, num_images_per_prompt=2, guidance_scale=2.0)
    model = load_model(folder, dtype="fp32")
    expected = list(generate(model, ["a red apple"] * 2, seed=11, sampling=model.sampling(guidance=2.0), batch=2))
    for image, picture in zip(images, expected, strict=True):
        assert picture.pixels is not None and numpy.array_equal(numpy.asarray(image), picture.pixels.numpy())
    assert served(folder, prompt="a red apple", seed=1, height=8, width=8)[0].size == (8, 8)
    refused(served, folder, prompt="a red apple", seed=1, height=9, width=8, match="height")
