"""Checkpoints in LlamaGen's layout: every tensor is kept; errors name damaged files and tensors that do not fit."""

import argparse
import collections
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern.models.llamagen.checkpoint import Checkpoint, read_checkpoint
from lantern.models.llamagen.transformer import SIZES, Transformer, TransformerConfig
from lantern.models.llamagen.vqvae import VQVAE, VQConfig
from tests.models.tables import TABLES, table

HEADS = {"n_head": 4}


def _saved(value: object, path: Path) -> Path:
    torch.save(value, path)
    return path


def _convert(path: Path, **given: Any) -> Checkpoint:
    return read_checkpoint(path, **({"block_size": 16, "config": HEADS} | given))


@pytest.mark.parametrize("name", ["gpt_c2i", "gpt_t2i", "vq_tiny", "vq16ch32"])
def test_every_tensor_is_kept(tmp_path: Path, name: str) -> None:
    state, is_vq = table(name), name.startswith("vq")
    path = _saved({"model": state}, tmp_path / "x.pt")
    found = read_checkpoint(path) if is_vq else _convert(path)
    expected = {"ch": 32} if is_vq else {"dim": 64, "n_layer": 3, "block_size": 16}
    assert found.kind == ("vq" if is_vq else name.removeprefix("gpt_")) and found.config.items() >= expected.items()
    assert all(torch.equal(found.state[key], tensor) for key, tensor in state.items())
    module: Any = VQVAE(VQConfig(**found.config)) if is_vq else Transformer(TransformerConfig(**found.config))
    module.load_state_dict(found.state)


@pytest.mark.parametrize("name", ["VQ-16", "VQ-8"])
def test_released_tokenizers_have_the_keys_and_shapes_of_the_table(name: str) -> None:
    with torch.device("meta"):
        state = VQVAE(VQConfig.named(name)).state_dict()
    assert {key: list(tensor.shape) for key, tensor in state.items()} == {
        key: shape for key, (shape, _) in TABLES["tables"][f"{name}_full"].items()
    }


@pytest.mark.parametrize("row", TABLES["params"])
def test_released_sizes_have_the_parameter_counts_of_the_table(row: str) -> None:
    name, _, kind = row.partition("|")
    if name.startswith("VQ"):
        with torch.device("meta"):
            model: torch.nn.Module = VQVAE(VQConfig.named(name))
    else:
        text = {"model_type": "t2i", "cls_token_num": 120} if kind.startswith("t2i") else {}
        with torch.device("meta"):
            model = Transformer(TransformerConfig.named(name.removeprefix("GPT-"), **text))
    assert sum(parameter.numel() for parameter in model.parameters()) == TABLES["params"][row]["params"]


@pytest.mark.parametrize("size", SIZES)
def test_a_released_size_is_recognised_from_its_shapes(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TransformerConfig.named(size, block_size=576)
    with torch.device("meta"):
        state = Transformer(config).state_dict()
    monkeypatch.setattr("lantern.models.llamagen.checkpoint._load", lambda path: (state, {}))
    monkeypatch.setattr("lantern.models.llamagen.checkpoint.check_finite", lambda state, source: None)
    assert TransformerConfig(**read_checkpoint("full.pt", block_size=576).config) == config


def _wrappings() -> dict[str, Any]:
    state = table("gpt_c2i")
    cache = {"freqs_cis": torch.zeros(1), "layers.0.attention.kv_cache.k_cache": torch.zeros(1)}
    arguments = argparse.Namespace(image_size=64, downsample_size=16, gpt_model="GPT-B", lr=1e-4)
    return {
        "model": {"model": state, "optimizer": {"lr": 1}, "steps": 3},
        "module": {"module": state},
        "state_dict": {"state_dict": state},
        "ema only": {"ema": state},
        "bare": state,
        "ordered": collections.OrderedDict(state),
        "compiled": {"model": {f"_orig_mod.{name}": tensor for name, tensor in state.items()}},
        "parallel": {f"module.{name}": tensor for name, tensor in state.items()},
        "both": {f"module._orig_mod.{name}": tensor for name, tensor in state.items()},
        "decoded with": state | cache,
        "arguments": {"model": state, "args": arguments},
    }


@pytest.mark.parametrize("wrapping", _wrappings())
def test_all_wrappings_load_the_same_state(tmp_path: Path, wrapping: str) -> None:
    found = _convert(_saved(_wrappings()[wrapping], tmp_path / "x.pt"))
    assert found.state.keys() == table("gpt_c2i").keys()


def test_pickles_of_old_torch_load(tmp_path: Path) -> None:
    torch.save({"model": table("gpt_c2i")}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert _convert(tmp_path / "x.pt").kind == "c2i"


def test_moving_averages_are_loaded_on_request(tmp_path: Path) -> None:
    state = table("vq_tiny")
    average = {name: tensor + 1 for name, tensor in state.items()}
    path = _saved({"model": state, "ema": average}, tmp_path / "x.pt")
    name = "quantize.embedding.weight"
    assert torch.equal(read_checkpoint(path).state[name], state[name])
    assert torch.equal(read_checkpoint(path, prefers_ema=True).state[name], average[name])


def test_grid_is_read_from_recorded_arguments(tmp_path: Path) -> None:
    arguments = argparse.Namespace(image_size=64, downsample_size=16, gpt_model="GPT-B")
    path = _saved({"model": table("gpt_c2i"), "args": arguments}, tmp_path / "x.pt")
    assert read_checkpoint(path, config=HEADS).config["block_size"] == 16
    assert read_checkpoint(path, config=HEADS, block_size=64).config["block_size"] == 64


class _Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


@pytest.mark.parametrize("is_zip", [True, False])
def test_pickle_with_token_is_refused(tmp_path: Path, is_zip: bool) -> None:
    canary = tmp_path / "canary"
    value = {"model": table("gpt_c2i"), "args": _Bomb(canary)}
    torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    (tmp_path / "plain.bin").write_bytes(pickle.dumps(_Bomb(canary)))
    for name in ("x.pt", "plain.bin"):
        with pytest.raises(ValueError, match="no whole checkpoint of plain tensors"):
            _convert(tmp_path / name)
    assert not canary.exists()


@pytest.mark.parametrize("keep", [0, 1, 100, 5000, -1, "a cat\n"])
def test_truncated_file_and_text_are_refused_in_one_line(tmp_path: Path, keep: int | str) -> None:
    path = _saved({"model": table("gpt_c2i")}, tmp_path / "x.pt")
    path.write_bytes(keep.encode() if isinstance(keep, str) else path.read_bytes()[:keep])
    reason = "its pickle is damaged" if isinstance(keep, str) else ""
    with pytest.raises(ValueError, match=rf"x\.pt .*{reason}") as caught:
        _convert(path)
    assert "\n" not in str(caught.value)


def _without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in table("gpt_c2i").items() if key != name}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (_without("norm.weight"), "'norm.weight' is missing"),
        (_without("tok_embeddings.weight"), "'tok_embeddings.weight' is missing"),
        (_without("layers.1.attention.wo.weight"), "'layers.1.attention.wo.weight' is missing"),
        (table("gpt_c2i") | {"surplus": torch.ones(1)}, "'surplus' is not expected"),
        (table("gpt_c2i") | {"norm.weight": torch.ones(3)}, r"'norm.weight' has shape \[3\], wanted \[64\]"),
        (table("gpt_c2i") | {"norm.weight": torch.full((64,), torch.nan)}, "'norm.weight' holds NaN"),
        (table("gpt_c2i") | {"tok_embeddings.weight": torch.ones(3)}, "'tok_embeddings.weight' has shape"),
        ({"w": torch.ones(1)}, "is no LlamaGen transformer"),
        ({"model": [1, 2]}, "'model' is a list, wanted a tensor"),
        ([1, 2], "holds a list"),
        ({3: torch.ones(1)}, "'3' is a Tensor"),
        (table("gpt_c2i") | {"norm.weight": torch.ones(64).to_sparse()}, "'norm.weight' is sparse or quantised"),
        (table("gpt_c2i") | {"norm.weight": torch.ones(64, device="meta")}, "no values .meta device"),
        (table("gpt_c2i") | {"norm.weight": torch.ones(64).to(torch.uint16)}, "'norm.weight' is uint16, wanted one of"),
        (
            table("gpt_c2i") | {"norm.weight": torch.ones(64).to(torch.complex128)},
            "'norm.weight' is complex128, wanted",
        ),
        (table("gpt_c2i") | {"layers.0.attention.wqkv.weight": torch.ones(7)}, r"wqkv.weight' has shape \[7\], wanted"),
    ],
)
def test_error_names_what_does_not_fit(tmp_path: Path, state: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        _convert(_saved(state, tmp_path / "x.pt"))
    assert "x.pt" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block_size": None}, "give --image-size"),
        ({"config": {}}, "number of heads"),
        ({"block_size": 15}, "perfect square"),
        ({"config": {"n_head": 4, "n_layer": 200}}, "config has n_layer 200, the file 3 layers"),
        ({"config": {"n_head": 4, "n_layer": 10**9}}, "n_layer is 1000000000, wanted from 1 to 256"),
        ({"config": {"n_head": 4, "vocab_size": 10**6}}, "'tok_embeddings.weight' has shape"),
        ({"config": {"n_head": 4, "vocab_size": 10**12}}, "vocab_size is '1000000000000', wanted int"),
        ({"config": {"n_head": "four"}}, "n_head is 'four', wanted int"),
        ({"config": {"n_heads": 4}}, "number of heads"),
        ({"config": {"n_head": 4, "vocab_sise": 4}}, "did you mean 'vocab_size'"),
        ({"config": {"n_head": 4, "norm_eps": float("nan")}}, "norm_eps is 'nan'"),
        ({"kind": "vq"}, "holds a c2i checkpoint, not vq"),
    ],
)
def test_impossible_options_are_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    path = _saved(table("gpt_c2i"), tmp_path / "x.pt")
    with pytest.raises(ValueError, match=message):
        _convert(path, **given)


def test_reading_imports_no_library_of_models() -> None:
    code = (
        "import sys, lantern.models.llamagen.checkpoint; "
        "print([m for m in ('transformers', 'diffusers', 'torchvision', 'PIL') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
