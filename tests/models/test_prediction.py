"""What is predicted from configs alone, against models that are loaded."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.cli.main import main
from lantern.core.places import embedded_model
from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Raster
from lantern.decoding.loop import begin
from lantern.decoding.plain import Plain
from lantern.engines.engine import EAGER
from lantern.engines.pass_times import measure
from lantern.models.folder import load_model
from lantern.models.prediction import PROMPT, predict
from tests import tiny_transformers as tiny
from tests.models.released_shapes import SHAPES, save


def test_a_body_that_holds_the_tokenizer_is_counted_once(tmp_path: Path) -> None:
    tiny.tiny_chameleon().config.save_pretrained(tmp_path)
    found = predict(tmp_path, torch.float32)
    parts: Any = tiny.assemble("chameleon", tiny.tiny_chameleon(), None)
    body = sum(weight.numel() for name, weight in parts.target.body.named_parameters() if "vqmodel" not in name)
    assert found.parameters == body + parts.target.output.weight.numel()
    decoder = sum(weight.nbytes for weight in tiny.vq_decoder(tiny.tiny_chameleon()).parameters())
    assert found.pixels == sum(weight.nbytes for weight in parts.vq.vq.parameters()) + decoder


@pytest.mark.parametrize(
    ("family", "size"), [("janus", None), ("emu3", (24, 32)), ("liquid", None), ("simplear", (48, 64))]
)
def test_sizes_are_those_of_the_model_that_is_loaded(tmp_path: Path, family: str, size: tuple[int, int] | None) -> None:
    make, words = tiny.FAMILY[family]
    tiny.save(family, make(), words(), tmp_path)
    found = predict(tmp_path, torch.float32, size=size)
    parts: Any = load_model(tmp_path, parts=("text", "vq") if family == "liquid" else ("text",), size=size)
    weights = sum(weight.nbytes for weight in parts.target.parameters())
    assert found.weights == 4 * found.parameters == weights
    assert found.pixels == sum(weight.nbytes for weight in parts.vq.parameters())
    assert found.target.config.raster == parts.target.config.raster
    tables = {id(table): table.nbytes for table in (parts.target.words.weight, parts.target.tok_embeddings.weight)}
    assert found.read == weights - sum(tables.values())
    tokens = torch.ones(1, 2, PROMPT, dtype=torch.long)
    begun = begin(Plain(parts.target, Sampling()), Condition(tokens=tokens, mask=tokens.bool()), keys=[(0, 0)])
    spare = 2 * 2 * 2 * 2 * 8 * 4 if family == "emu3" else 0  # the slot of the last row's newline, never read
    assert found.cache == begun.cache.buffer.nbytes - spare
    assert found.noise == begun.noise.gumbel_table().nbytes  # type: ignore[union-attr]


def test_the_embedded_model_is_predicted() -> None:
    found, model = predict(embedded_model(), torch.float32), load_model(parts=())
    assert found.parameters == sum(weight.numel() for weight in model.target.parameters())
    assert found.target.config.raster == Raster(16, 16)
    memory = found.seconds(1, 1, bandwidth=1e9, rate=1e18)
    assert memory == pytest.approx((found.read + found.cache) / 1e9)
    assert found.seconds(8, 16, bandwidth=1e18, rate=1e9) == pytest.approx(128 * found.products / 1e9)


def test_a_shape_of_seven_billion_parameters_needs_its_config_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(save("Janus-Pro-7B", tmp_path))
    assert main(["doctor", "--model", folder, "--dtype", "bf16", "--batch", "2"]) == 0
    out = capsys.readouterr().out
    assert "janus: 6.59 billion parameters, 24 rows of 24 tokens" in out and "12.3 GiB for the target" in out
    assert "ok      engine auto: eager (cpu is not available: the cpu engine runs LlamaGen's layers, not this" in out
    is_emulated = find_spec("triton") is not None
    for state, name, words in (
        ("ok", "graph", "available, but the kernels") if is_emulated else ("absent", "graph", "need a CUDA device"),
        ("absent", "cpu", "runs LlamaGen's"),
    ):
        (line,) = (line for line in out.splitlines() if line.startswith(f"{state:<8}engine {name}: "))
        assert words in line
    assert "plain decoding" in out and "a step over 16 of each image's tokens: at least" in out


# billions of parameters, tokens of a row, of the codebook, and GiB in bf16
RELEASED = {
    "Janus-Pro-1B": (1.5, 24, 16_384, 3.3),
    "Janus-Pro-7B": (6.6, 24, 16_384, 13.2),
    "Emu3-Gen": (7.9, 90, 32_768, 18.7),
    "Anole": (6.8, 32, 8192, 14.0),
    "Lumina-mGPT": (6.8, 48, 8192, 15.3),
    "Liquid 7B": (8.6, 32, 8192, 17.2),
    "SimpleAR 0.5B": (0.6, 64, 64_000, 2.2),
    "SimpleAR 1.5B": (1.7, 64, 64_000, 4.4),
    "GLM-Image": (8.9, 1, 16_384, 16.8),
}


@pytest.mark.parametrize("name", SHAPES)
def test_released_shapes_have_the_released_sizes(name: str, tmp_path: Path) -> None:
    """Predicted from the configs alone."""
    found = predict(save(name, tmp_path), torch.bfloat16)
    config = found.target.config
    sizes = round(found.parameters / 1e9, 1), config.raster.rows, config.vocab_size
    assert (*sizes, round(found.memory() / 2**30, 1)) == RELEASED[name]
    assert config.raster.columns in (config.raster.rows, 16**2 + 32**2)


def test_what_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    assert "is not a model: it has neither config.json nor transformer/config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "janus", "text_config": 3}))
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    assert "is no config of JanusForConditionalGeneration" in capsys.readouterr().err
    assert main(["doctor", "--size", "7by7"]) == 2
    assert "wanted width and height in pixels" in capsys.readouterr().err


def test_a_large_vocabulary_in_a_config_is_read(tmp_path: Path) -> None:
    tiny.tiny_emu3().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vocabulary_map"] |= {f"word-{i}" * 8: 70 + i for i in range(20_000)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (tmp_path / "config.json").stat().st_size > 1 << 20
    assert predict(tmp_path, torch.float32, size=(24, 32)).target.config.raster.tokens == 12


def test_passes_with_newlines_are_timed() -> None:
    target = tiny.assemble("emu3", tiny.tiny_emu3(), None, (24, 32)).target
    times = measure(EAGER.prepare(target))
    assert set(times) >= {1} and all(seconds > 0 for seconds in times.values())
