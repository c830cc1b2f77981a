"""Targets of transformers' classes against the classes themselves, at toy size and with random weights."""

import copy
import json
import re
import shutil
import unicodedata
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from lantern.cli import generate as command
from lantern.core.io import save_component
from lantern.core.sampling import Sampling
from lantern.core.types import Condition, DraftTree, TreeShape
from lantern.decoding.cache import PromptCache
from lantern.decoding.loop import ForcedTokens, State, begin
from lantern.drafters.eagle.networks import Eagle, EagleConfig
from lantern.drafters.trees import named
from lantern.engines.engine import engine as make_engine
from lantern.generation.generator import build_decoder, generate
from lantern.generation.pipeline import LanternPipeline
from lantern.models.folder import Model, load_model
from lantern.models.transformers import emu35
from lantern.models.transformers.chameleon import read_decoder
from lantern.models.transformers.components import Components
from lantern.models.transformers.target import causal_target
from lantern.models.transformers.tokens_only import fsq_vectors
from lantern.verifiers.gumbel import GumbelVerifier
from tests import tiny_transformers as tiny
from tests.cli.calls import Capture
from tests.refusals import refused
from tests.tiny_decoder import GivenTrees

PROMPTS = ["a red apple", "the sky"]


# how the library decodes with a family greedily, and the guidance
CASES: dict[str, tuple[Callable[[Any, Any, str], list[int]], float]] = {
    "janus": (tiny.janus_tokens, 5.0),
    "emu3": (tiny.emu3_tokens, 3.0),
    "emu3.5": (tiny.emu35_tokens, 5.0),
    "chameleon": (tiny.chameleon_tokens, 3.0),
    "lumina": (tiny.lumina_tokens, 4.0),
    "liquid": (tiny.liquid_tokens, 7.0),
    "simplear": (tiny.simplear_tokens, 6.0),
    "glm_image": (tiny.glm_image_tokens, 1.0),
}
PAINTED = [name for name in CASES if name not in ("simplear", "glm_image")]  # whose pixels are made here


@cache
def model(name: str) -> Any:
    torch.manual_seed(0)  # convolutions keep the weights that they are made with
    return tiny.make(name)


@cache
def processor(name: str) -> Any:
    return tiny.processor(name)


@cache
def parts(name: str) -> Components:
    return tiny.assemble(name, model(name), processor(name))


@cache
def plain_tokens(name: str, sampling: Sampling) -> torch.Tensor:
    decoder = build_decoder("plain", parts(name).target, sampling=sampling)
    return decoder.generate(condition_of(name), keys=[(3, 0), (3, 1)]).tokens


@cache
def folder(name: str, root: Path) -> Path:
    return tiny.save(name, root / name, model(name))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def condition_of(name: str, prompts: list[str] = PROMPTS) -> Condition:
    text = parts(name).text
    return text.condition(prompts)


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_the_library(name: str) -> None:
    library, guidance = CASES[name]
    together = plain_tokens(name, Sampling(guidance=guidance, temperature=0))
    for prompt, found in zip(PROMPTS, together, strict=True):
        assert found.tolist() == library(model(name), processor(name), prompt)
    assert parts(name).target.config.family == name
    assert len(set(together[0].tolist())) >= 3


def test_states_of_prompts_of_other_lengths_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts, read = parts("emu3").target, PromptCache(), list[int]()
    real = target.read
    monkeypatch.setattr(
        target, "read", lambda condition, *a, **k: read.append(condition.batch) or real(condition, *a, **k)
    )
    sampling, keys = Sampling(guidance=3.0), [(3, 0), (3, 1)]
    decoder = build_decoder("plain", target, sampling=sampling, prompts=prompts)
    decoder.generate(condition_of("emu3", PROMPTS[1:]), keys=keys[:1])
    found = decoder.generate(condition_of("emu3"), keys=keys).tokens
    assert read == [1, 1]  # one prompt a call
    assert torch.equal(found, plain_tokens("emu3", sampling))


def test_large_states_of_prompts_are_dropped() -> None:
    target, prompts = parts("emu3").target, PromptCache(limit_bytes=1)
    for prompt in ("a red apple", "the sky", "a blue ring"):
        prompts.read(target, condition_of("emu3", [prompt]), 2)
        assert len(prompts) == 1


def test_a_profile_does_not_change_the_fingerprint(root: Path) -> None:
    before = load_model(folder("janus", root), parts=()).fingerprint
    (folder("janus", root) / "profile.json").write_text("{}")
    assert load_model(folder("janus", root), parts=()).fingerprint == before
    (folder("janus", root) / "profile.json").unlink()
    (folder("janus", root) / "other.txt").write_text("another file")
    assert load_model(folder("janus", root), parts=()).fingerprint != before


def sequential(name: str, condition: Condition, image: int, row: int, tokens: list[int]) -> torch.Tensor:
    """Logits of what follows each of these tokens, by the decoder without a cache, mask or tree."""
    target, positions = parts(name).target, {}
    prompt = condition.tokens[image, row][condition.mask[image, row]]
    if name == "glm_image":  # by the library's own table
        own, _ = model(name).model.get_rope_index(prompt[None], torch.tensor([[1, 2, 3], [1, 13, 19]]))
        ahead = model(name).model._cached_decode_position_ids[0, :, None, : len(tokens)]
        positions["position_ids"] = torch.cat([own, ahead], 2)
    found, ends = tiny.sequential(target, prompt, tokens, **positions)
    return target.head(found.last_hidden_state[0, ends])


@torch.no_grad()
@pytest.mark.parametrize("known", [[1, 1], [3, 4], [5, 7]])
@pytest.mark.parametrize("name", CASES)
def test_logits_of_a_tree_are_those_of_its_paths(name: str, known: list[int]) -> None:
    """Two images with different numbers of known tokens, so that rows end at different nodes."""
    target, condition = parts(name).target, condition_of(name)
    shape = named("narrow_10").shape("cpu")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.config.vocab_size, (2, 8), generator=generator)
    drafted = torch.randint(target.config.vocab_size, (2, shape.num_nodes), generator=generator)
    drafter = GivenTrees(shape.num_nodes, shape.depth)
    state = begin(State(target, Sampling(), drafter, GumbelVerifier()), condition, keys=[(0, 0), (0, 1)])

    def score(counts: list[int], nodes: torch.Tensor, shape: TreeShape) -> torch.Tensor:
        state.held.known = torch.tensor(counts)
        drafter.tree = DraftTree(nodes, shape, "point")
        return state.draft().scores(target).logits.unflatten(0, (2, 2))

    for place in range(1, max(known)):  # an image that has enough tokens repeats its last step
        counts = [max(min(place, count - 1), 1) for count in known]
        score(counts, tokens.gather(1, torch.tensor(counts)[:, None] - 1), TreeShape.chain(0, torch.device("cpu")))
        state.cache.commit(torch.zeros(2, 1, dtype=torch.long), state.known - 1)
    drafted[:, 0] = tokens.gather(1, torch.tensor(known)[:, None] - 1)[:, 0]
    found = score(known, drafted, shape)
    leaves = (shape.ancestors.sum(0) == 1).nonzero()[:, 0]
    assert shape.ancestors[leaves].any(0).all()
    for image in range(2):
        ahead = target.config.block_size - known[image]  # nothing follows the last token
        for leaf in leaves:
            nodes = shape.ancestors[leaf].nonzero()[:ahead, 0]
            path = tokens[image, : known[image]].tolist() + drafted[image, nodes[1:]].tolist()
            for row in range(2):
                expected = sequential(name, condition, image, row, path)[known[image] - 1 :]
                torch.testing.assert_close(found[image, row, nodes], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_relaxed_method_runs_on_the_own_codebook(name: str) -> None:
    made = Model(**vars(parts(name)), name=name)
    settings = {"delta": 0.2, "window": 6}
    for picture in generate(made, PROMPTS[:1], method="bounded-window", settings=settings, with_pixels=False):
        assert 0 < picture.statistics.total_variation <= 0.2


@torch.no_grad()
@pytest.mark.parametrize("name", ["janus", "emu3"])
def test_pixels_undo_the_normalisation_of_the_processor(name: str) -> None:
    vq, images = parts(name).vq, processor(name).image_processor
    tokens = torch.arange(vq.raster.tokens)[None]
    painted = vq.paint(tokens.unflatten(1, (vq.raster.rows, -1)))[0]
    expected = [channel * images.image_std[i] + images.image_mean[i] for i, channel in enumerate(painted)]
    torch.testing.assert_close(vq.decode(tokens)[0], 2 * torch.stack(expected) - 1)
    refused(vq.decode, tokens[:, :3], match=f"got 3 tokens an image, wanted {vq.raster.rows} rows")
    assert "tokens are from 1 to 1000, wanted 0 to" in refused(vq.decode, torch.where(tokens == 0, 1000, tokens))


@pytest.mark.parametrize("name", PAINTED)
def test_a_folder_in_the_released_layout_makes_pictures(name: str, root: Path, tmp_path: Path, capsys: Capture) -> None:
    size = tiny.SIZES.get(name)
    arguments = ["--model", str(folder(name, root)), "--prompt", PROMPTS[0], "--method", "gumbel-jacobi"]
    arguments += ["--out", str(tmp_path / "a.png"), "--json", "--quiet"]
    arguments += [] if size is None else ["--size", f"{size[1]}x{size[0]}"]
    assert command.main(arguments) == 0
    reported = json.loads(capsys.readouterr().out)
    loaded = load_model(folder(name, root), size=size)
    (expected,) = generate(loaded, PROMPTS[:1], method="plain")
    assert reported["tokens_sha256"] == [expected.tokens_sha256]
    raster, side = loaded.target.config.raster, loaded.vq.config.downsample  # type: ignore[union-attr]
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size == (raster.columns * side, raster.rows * side)
        assert np.array_equal(np.asarray(picture), expected.pixels.numpy())
    pipe = LanternPipeline.from_pretrained(folder(name, root), size=size)
    found: Any = pipe(PROMPTS[0], generator=0, method="sjd-pac", output_type="np")
    assert found.tokens[0].tolist() == expected.grid and found.stats[0]["steps"] <= len(expected.tokens)


def test_a_pipeline_moves_with_its_parts_which_make_another(root: Path, tmp_path: Path) -> None:
    made = shutil.copytree(folder("janus", root), tmp_path / "janus")
    drafter = Eagle(EagleConfig.for_target(parts("janus").target.config))
    save_component(drafter.state_dict(), drafter.config, made / "drafter")
    pipe, half = [LanternPipeline.from_pretrained(made, dtype=dtype) for dtype in ("fp32", "bf16")]
    copies = [LanternPipeline.from_pipe(pipe), LanternPipeline(**pipe.components)]
    how: dict[str, Any] = {"generator": 0, "method": "eagle1"}

    def tokens(made: Any) -> list[int]:
        return made(PROMPTS[0], **how).tokens.flatten().tolist()

    for other in copies:
        other.engine = "eager"
        assert tokens(other) == tokens(pipe)
        assert other.model.sampling() == pipe.model.sampling()
    assert pipe.to("cpu").device.type == "cpu" and pipe.to(torch.bfloat16).dtype == torch.bfloat16
    assert (pipe.drafter.dtype, pipe.vqvae.dtype) == (torch.bfloat16, torch.float32)
    assert tokens(pipe) == tokens(half)  # rotary factors stay in fp32
    assert copy.deepcopy(pipe.transformer).loaded is None  # with its add-ons
    given: dict[str, Any] = {"vqvae": None, "drafter": None, "generation": {"guidance": 2.0}}
    bare = LanternPipeline.from_pretrained(made, dtype={"transformer": torch.bfloat16}, **given)
    assert (bare.vqvae, bare.drafter, bare.transformer.dtype) == (None, None, torch.bfloat16)
    assert bare.model.sampling().guidance == 2.0 and bare.text_encoder is not None
    with pytest.raises(ValueError, match="vqvae is given, but .* is a whole model"):
        LanternPipeline.from_pretrained(made, vqvae=pipe.vqvae)
    everything = [pipe.transformer, pipe.drafter, pipe.vqvae]
    assert all(x.is_meta for part in pipe.to("meta") and everything for x in (*part.parameters(), *part.buffers()))


def assembled(name: str, size: Any) -> Components:
    return tiny.assemble(name, model(name), processor(name), size)


def windowed() -> Components:
    changed = tiny.make("simplear")
    changed.config.layer_types = ["full_attention", "sliding_attention"]
    return tiny.assemble("simplear", changed)


TOKENS = torch.ones(2, 2, 3, dtype=torch.long)
SLOT_BY_SLOT = "reads the prompt slot by slot, but here each guidance row has a prompt"
TOO_LONG = "128 rows of 128 tokens are a sequence of 16511, the model has 9216 positions"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parts("emu3").target.read(condition_of("emu3"), 2, whole=True), SLOT_BY_SLOT),
        (lambda: parts("emu3").target.read(Condition(labels=torch.tensor([1])), 2), "takes token prompts"),
        (lambda: parts("janus").target(torch.zeros(1, 1, 32), TOKENS[0, :1]), "need a cache with its mask and slots"),
        (lambda: Condition(tokens=TOKENS, mask=TOKENS[0].bool()), r"the token mask is \[2, 3\], wanted \[2, 2, 3\]"),
        (lambda: Condition(tokens=TOKENS, mask=TOKENS.bool(), labels=TOKENS[:, 0, 0]), "give one of them"),
        (lambda: assembled("janus", (24, 24)), "24x24"),
        (lambda: assembled("emu3", (24, 30)), "the size is 30x24, wanted multiples of 8"),
        (lambda: assembled("emu3", (1024, 1024)), TOO_LONG),
        (lambda: assembled("lumina", (40, 40)), "has no tokens for images of 40x40"),
        (windowed, "qwen2 has windows of attention or capped logits"),
        (lambda: make_engine("eager", weights="int8").prepare(parts("janus").target), "are for LlamaGen's layers"),
    ],
)
def test_what_a_target_cannot_do_is_refused(call: Callable[[], Any], message: str) -> None:
    refused(call, match=message)


@pytest.mark.parametrize("size", [512, (512,), "512x512", (64.0, 64.0), (64, 64, 3)])
def test_what_is_no_size_is_refused_before_weights_are_read(size: Any) -> None:
    refused(load_model, size=size, match=r"size is .*, wanted \(height, width\) in pixels")
    assert assembled("janus", [8, 8]).target.config.raster.tokens == 16  # a list is one


def without(*names: str) -> Callable[[Path], object]:
    return lambda made: [(made / name).unlink() for name in names]


def holding(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda made: (made / name).write_bytes(content)


def without_newline(made: Path) -> None:
    config = json.loads((made / "config.json").read_text())
    del config["vocabulary_map"]["<|extra_200|>"]
    (made / "config.json").write_text(json.dumps(config))


def without_head(made: Path) -> None:
    state = load_file(made / "model.safetensors")
    del state["model.generation_head.vision_head.weight"]
    save_file(state, made / "model.safetensors", metadata={"format": "pt"})


def of_type(kind: Any) -> Callable[[Path], object]:
    def damage(made: Path) -> None:
        shutil.rmtree(made)
        made.mkdir()
        (made / "config.json").write_text(json.dumps({"model_type": kind}))

    return damage


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("janus", of_type("bert"), "model_type is 'bert', wanted one of janus, .*; lantern convert reads LlamaGen's"),
        ("janus", of_type(["janus"]), r"model_type is \"\['janus'\]\", wanted one of"),
        ("janus", of_type("Emu3"), "model_type is 'Emu3', wanted one of"),  # of Emu3's own release, not Emu3.5's
        ("janus", of_type("multi_modality"), "has the released layout 'multi_modality': convert it first"),
        ("janus", without("model.safetensors"), "no JanusForConditionalGeneration that loads"),
        ("janus", without_head, "tensor 'model.generation_head.vision_head.weight' is missing"),
        ("janus", without("chat_template.jinja"), "the processor has no chat template"),
        ("emu3", without_newline, r"emu3 lacks a part of Emu3ForConditionalGeneration .*extra_200"),
        ("emu3.5", without("model.ckpt"), "holds no VQ tokenizer: put model.ckpt of Emu3.5-VisionTokenizer"),
        ("emu3.5", without("emu3.tiktoken"), "holds no emu3.tiktoken: copy it from src/tokenizer_emu3_ibq of Emu3.5's"),
        ("emu3.5", holding("emu3.tiktoken", b"no words"), "emu3.tiktoken is no file of words and ranks"),
        ("emu3.5", holding("emu3.tiktoken", b"IQ== 0\nIg== 1\n"), "has 213 words .*, the model 473 before images"),
        ("liquid", without("vqgan.ckpt"), "holds no VQ tokenizer: put vqgan.ckpt of Chameleon's release into it"),
        ("liquid", holding("config.json", b'{"model_type": "bert"}'), "model_type is 'bert', wanted one of janus"),
        ("liquid", without("tokenizer.json", "tokenizer_config.json"), "model_type is 'gemma', wanted one of janus"),
    ],
)
def test_damaged_folders_are_refused(
    name: str, damage: Callable[[Path], object], message: str, root: Path, tmp_path: Path
) -> None:
    made = shutil.copytree(folder(name, root), tmp_path / name)
    damage(made)
    refused(load_model, made, size=tiny.SIZES.get(name), match=message)


@torch.no_grad()
def test_the_decoder_of_chameleon_is_that_of_vqgan() -> None:
    """Against diffusers' decoder of the same family, weight by weight."""
    from diffusers.models.autoencoders.vae import Decoder

    made = tiny.vq_decoder(model("chameleon")).decoder
    blocks = ("UpDecoderBlock2D", "UpDecoderBlock2D")
    reference = Decoder(32, 3, up_block_types=blocks, block_out_channels=(32, 64), layers_per_block=1)
    state = tiny.renamed(made.state_dict(), "diffusers")
    for name in [name for name in state if "attentions" in name and state[name].ndim == 4]:
        state[name] = state[name][:, :, 0, 0]
    reference.load_state_dict(state)
    latents = torch.randn(1, 32, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(made(latents), reference.eval()(latents), atol=1e-5, rtol=1e-5)


def test_decoders_of_chameleon_are_found_and_checked(tmp_path: Path) -> None:
    config, decoder = model("chameleon").config.vq_config, tiny.vq_decoder(model("chameleon"))
    own, state = decoder.state_dict(), tiny.released(decoder)
    with pytest.raises(ValueError, match=r"holds no VQ decoder: put vqgan\.ckpt of Chameleon's release into it"):
        read_decoder(tmp_path, config)
    swapped = {
        name.replace("up.0.", "up.x.").replace("up.1.", "up.0.").replace("up.x.", "up.1."): state[name]
        for name in state
    }
    for levels in (state, swapped):
        torch.save({"state_dict": levels}, tmp_path / "vqgan.ckpt")
        found = read_decoder(tmp_path, config).state_dict()
        assert all(torch.equal(found[name], own[name]) for name in own)
    torch.save({"state_dict": state | {"decoder.conv_in.bias": torch.zeros(3)}}, tmp_path / "vqgan.ckpt")
    assert "'decoder.conv_in.bias' has shape [3], wanted [64]" in refused(read_decoder, tmp_path, config)
    for other in ({1: torch.zeros(1)}, {"state_dict": [1]}, [1]):
        torch.save(other, tmp_path / "vqgan.ckpt")
        assert "vqgan.ckpt holds no VQGAN" in refused(read_decoder, tmp_path, config)
    (tmp_path / "vqgan.ckpt").write_bytes(b"no checkpoint")
    assert "vqgan.ckpt is no whole checkpoint of plain tensors" in refused(read_decoder, tmp_path, config)


@torch.no_grad()
@pytest.mark.parametrize("name", PAINTED)
def test_pictures_are_encoded_as_the_model_does(name: str) -> None:
    vq: Any = parts(name).vq
    library, raster = vq.vq, vq.raster
    side = vq.config.downsample
    pixels = 9 * torch.randn(
        2, 3, raster.rows * side, raster.columns * side, generator=torch.Generator().manual_seed(0)
    )
    normal = pixels if name in ("chameleon", "lumina", "liquid") else (pixels - vq.shift) / vq.scale
    if name == "janus":  # LlamaGen's rule: the largest cosine
        found = library.quant_conv(library.encoder(normal)).movedim(1, -1).flatten(0, 2)
        expected = torch.cosine_similarity(found[:, None], library.quantize.embedding.weight[None], dim=-1).argmax(1)
    elif name == "emu3.5":  # the largest product
        found = library.latents(normal).movedim(1, -1).flatten(0, 2)
        expected = (found[:, None] * library.quantize.embedding.weight).sum(-1).argmax(1)
    elif name == "emu3":
        expected = torch.stack(list(library.encode(normal, torch.tensor([normal.shape[2:]] * 2)).image_tokens))
    else:
        expected = library.encode(normal).image_tokens
    assert vq.encode(pixels).tolist() == expected.view(2, -1).tolist()
    assert vq.encode(pixels).unique().numel() > 1


@pytest.mark.parametrize("name", PAINTED)
def test_pictures_are_continued_from_their_first_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Model(**vars(parts(name)), name=name)
    raster, side = made.target.config.raster, made.vq.config.downsample  # type: ignore[union-attr]
    size = (raster.rows * side, raster.columns * side, 3)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8))
    how: dict[str, Any] = {"init_image": picture, "keep_rows": 1, "with_pixels": False}
    found = [
        next(generate(made, PROMPTS[:1], method=method, **how)) for method in ("plain", "gumbel-jacobi", "sjd-pac")
    ]
    assert all(torch.equal(one.tokens, found[0].tokens) for one in found)
    assert found[0].statistics.forced == raster.columns
    # read in one pass, the newline of an inner row included, and step by step
    how["keep_rows"] = kept = min(2, raster.rows - 1)
    read = [next(generate(made, PROMPTS[:1], method=method, **how)) for method in ("plain", "gumbel-jacobi")]
    with monkeypatch.context() as patch:
        patch.setattr(ForcedTokens, "common_prefix", 1)
        (stepped,) = generate(made, PROMPTS[:1], method="plain", **how)
    assert all(torch.equal(one.tokens, stepped.tokens) for one in read)
    steps = [stepped.statistics.steps - one.statistics.steps for one in read]
    assert steps[0] == kept * raster.columns - 2 and steps[1] >= steps[0]


@pytest.mark.parametrize(
    ("name", "shape", "why"), [("simplear", (3, 4), "TorchScript"), ("glm_image", (1, 253), "diffu")]
)
def test_tokens_of_a_model_without_pixels_are_written(
    name: str, shape: tuple[int, int], why: str, root: Path, tmp_path: Path, capsys: Capture
) -> None:
    source, (height, width) = folder(name, root), tiny.SIZES[name]
    call = ["--model", str(source), "--prompt", PROMPTS[0], "--size", f"{width}x{height}", "--quiet"]
    assert command.main([*call, "--out", str(tmp_path / "a.png")]) == 2
    line = capsys.readouterr().err
    assert why in line and "write the tokens only: --tokens FILE without --out" in line
    written = [*call, "--tokens", str(tmp_path / "grid.json"), "--temperature", "0"]
    assert command.main([*written, "--method", "sjd-pac"]) == 0
    text: Any = load_model(source, parts=("text",), size=tiny.SIZES[name]).text
    words, (library, _) = text.processor if name == "glm_image" else text.tokenizer, CASES[name]
    expected = torch.tensor(library(model(name), words, PROMPTS[0])).view(shape).tolist()
    assert json.loads((tmp_path / "grid.json").read_text()) == expected
    pipe = LanternPipeline.from_pretrained(source, size=tiny.SIZES[name])
    found: Any = pipe(PROMPTS[0], temperature=0, output_type="latent")
    assert pipe.vqvae is None and found.tokens[0].tolist() == expected
    refused(pipe, PROMPTS[0], match="it can make tokens but no images")
    made = Model(**vars(parts(name)), name=name)
    side = made.vq.config.downsample  # type: ignore[union-attr]
    how: dict[str, Any] = {"init_image": Image.new("RGB", (side * shape[1], side * shape[0])), "keep_rows": 1}
    refused(generate, made, PROMPTS[:1], **how, match="write the tokens only|rows to keep is 1")


def test_vectors_of_finite_scalar_quantisation_are_the_digits() -> None:
    found = fsq_vectors((8, 8, 8, 5, 5, 5))
    assert found.shape == (64000, 6) and len(found.unique(dim=0)) == 64000
    assert found[0].tolist() == [-1] * 6 and found[-1].tolist() == [0.75] * 3 + [1] * 3
    assert found[1 + 8 * 2 + 64 * 3 + 512 * 4].tolist() == [-0.75, -0.5, -0.25, 1, -1, -1]


def test_a_causal_model_is_known_by_its_tokenizer_and_checked(root: Path) -> None:
    made = load_model(folder("liquid", root), parts=("text",))
    raster = made.target.config.raster
    assert made.target.config.family == "liquid"
    assert "loaded without its VQ" in refused(next, generate(made, PROMPTS[:1], method="plain"))
    message = "the vocabulary has 53 tokens, wanted 40 of the tokenizer and 24 tokens"
    refused(causal_target, model("liquid"), range(40), 24, family="liquid", raster=raster, match=message)


@pytest.mark.parametrize("named", [["SimpARForCausalLM"], None, 5])
def test_a_causal_model_may_name_a_class_of_its_own(named: Any, root: Path, tmp_path: Path) -> None:
    made = shutil.copytree(folder("simplear", root), tmp_path / "made")
    config = json.loads((made / "config.json").read_text()) | {"architectures": named}
    (made / "config.json").write_text(json.dumps(config))
    assert load_model(made, parts=(), size=tiny.SIZES["simplear"]).target.config.family == "simplear"


@pytest.mark.parametrize("text", ["a red  apple", "redapple apples", "été\u0301 42!", "<|image start|>a"])
def test_words_of_emu35_are_joined_in_the_order_of_their_ranks(text: str) -> None:
    words = [word.encode() for word in tiny.MODELS["emu3.5"]["words"]]
    ids: list[int] = []
    for part in re.split(r"(<\|image start\|>)", unicodedata.normalize("NFC", text)):
        found = [] if part.startswith("<|") else [bytes([one]) for one in part.encode()]
        while pairs := [words.index(one + two) for one, two in pairwise(found) if one + two in words]:
            joined = words[min(pairs)]
            at = next(i for i, (one, two) in enumerate(pairwise(found)) if one + two == joined)
            found[at : at + 2] = [joined]
        ids += [256 + words.index(word) if word in words else word[0] for word in found]
        ids += [262 + emu35.SPECIAL.index(part)] if part.startswith("<|") else []
    assert processor("emu3.5")(text)["input_ids"] == ids


def test_another_causal_model_takes_the_place_of_a_familys_own(tmp_path: Path) -> None:
    """Liquid was trained on several language models."""
    other = tiny.make("simplear")
    other.config.vq_config = model("liquid").config.vq_config
    other.resize_token_embeddings(len(tiny.word_ids("liquid")) + 24, mean_resizing=False)
    tiny.save("liquid", tmp_path, tiny.randomise(other))
    made: Any = load_model(tmp_path)
    assert made.target.config.family == "liquid" and type(made.target.body).__name__ == "Qwen2Model"
    greedy = Sampling(guidance=7.0, temperature=0)
    (found,) = generate(made, PROMPTS[:1], method="gumbel-jacobi", sampling=greedy, with_pixels=False)
    assert found.tokens.tolist() == tiny.liquid_tokens(other, made.text.tokenizer, PROMPTS[0])
