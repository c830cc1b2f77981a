"""What is predicted from configs alone, against models that are loaded."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lantern.cli.main import main
from lantern.core.config import embedded_model
from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Raster
from lantern.decoding.loop import begin
from lantern.decoding.plain import Plain
from lantern.engines.cpu.build import missing
from lantern.engines.cpu.target import linear
from lantern.engines.engine import EAGER
from lantern.engines.pass_times import measure
from lantern.models.folder import load_model
from lantern.models.prediction import PROMPT, measure_device, predict
from tests import tiny_transformers as tiny
from tests.cli.calls import Capture, refused_by

# model -> its config, added tokens of its tokenizer by which it is known, and what is expected: billions of parameters,
# tokens of a row, tokens of the codebook, and GiB in bf16
RELEASED = json.loads((tiny.DATA / "released_configs.json").read_text())
LETTERS = str.maketrans("0123456789", "ABCDEFGHIJ")


def save(name: str, folder: Path) -> Path:
    """Write the config of a released model, with all image tokens in its vocabulary, and its added tokens."""
    config, added = RELEASED[name]["config"], RELEASED[name].get("added_tokens", {})
    if config["model_type"] == "emu3":
        config["vocabulary_map"] |= {f"<|visual token {token:06d}|>": 151_854 + token for token in range(32_768)}
    if config["model_type"] == "chameleon":
        config["vocabulary_map"] |= {f"IMGIMG{str(token).translate(LETTERS)}Z": 4 + token for token in range(8192)}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "added_tokens.json").write_text(json.dumps(added))
    return folder


@pytest.mark.parametrize("family", ["janus", "emu3", "emu3.5", "chameleon", "liquid", "simplear"])
def test_sizes_are_those_of_the_model_that_is_loaded(tmp_path: Path, family: str) -> None:
    size = tiny.SIZES.get(family)
    tiny.save(family, tmp_path)
    found = predict(tmp_path, torch.float32, size=size)
    loaded = ("text", "vq") if family in ("chameleon", "emu3.5", "liquid") else ("text",)
    parts: Any = load_model(tmp_path, parts=loaded, size=size)
    weights = sum(weight.nbytes for name, weight in parts.target.named_parameters() if "vqmodel" not in name)
    assert found.weights == 4 * found.parameters == weights
    assert found.pixels == sum(weight.nbytes for weight in parts.vq.parameters())
    assert found.target.config.raster == parts.target.config.raster
    tables = {id(table): table.nbytes for table in (parts.target.words.weight, parts.target.tok_embeddings.weight)}
    assert found.read == weights - sum(tables.values())
    tokens = torch.ones(1, 2, PROMPT, dtype=torch.long)
    begun = begin(Plain(parts.target, Sampling()), Condition(tokens=tokens, mask=tokens.bool()), keys=[(0, 0)])
    spare = (
        2 * 2 * 2 * 2 * 8 * 4 if family in ("emu3", "emu3.5") else 0
    )  # the slot of the last row's newline, never read
    assert found.cache == begun.cache.buffer.nbytes - spare
    assert found.noise == begun.noise.gumbel_table().nbytes  # type: ignore[union-attr]


def test_the_embedded_model_is_predicted() -> None:
    found, model = predict(embedded_model(), torch.float32), load_model(parts=())
    assert found.parameters == sum(weight.numel() for weight in model.target.parameters())
    assert found.target.config.raster == Raster(16, 16)
    memory = found.seconds(1, 1, bandwidth=1e9, rate=1e18)
    assert memory == pytest.approx((found.read + found.cache) / 1e9)
    assert found.seconds(8, 16, bandwidth=1e18, rate=1e9) == pytest.approx(128 * found.products / 1e9)


def test_a_shape_of_seven_billion_parameters_needs_its_config_only(tmp_path: Path, capsys: Capture) -> None:
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


@pytest.mark.parametrize("name", RELEASED)
def test_released_shapes_have_the_released_sizes(name: str, tmp_path: Path) -> None:
    found = predict(save(name, tmp_path), torch.bfloat16)
    config = found.target.config
    sizes = round(found.parameters / 1e9, 1), config.raster.rows, config.vocab_size
    assert (*sizes, round(found.memory() / 2**30, 1)) == tuple(RELEASED[name]["expected"])
    assert config.raster.columns in (config.raster.rows, 16**2 + 32**2)


def test_what_is_no_model_is_refused(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "janus", "text_config": 3}))
    assert "is no config of JanusForConditionalGeneration" in refused_by(capsys, "doctor", "--model", str(tmp_path))


def test_passes_with_newlines_are_timed() -> None:
    target = tiny.assemble("emu3").target
    times, _ = measure(EAGER.prepare(target))
    assert set(times) >= {1} and all(seconds > 0 for seconds in times.values())


def test_products_in_bf16_on_a_cpu_are_those_of_the_engine_that_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    if missing() is not None:
        pytest.skip("the C++ library is not built")
    counted = Mock(wraps=linear)
    monkeypatch.setattr("lantern.engines.cpu.target.linear", counted)
    for dtype, count in ((torch.float32, 0), (torch.bfloat16, 4)):
        bandwidth, rate = measure_device(torch.device("cpu"), dtype)
        assert counted.call_count == count and min(bandwidth, rate) > 0
