"""Checkpoints in the layouts of LlamaGen and LANTERN: every tensor is kept; errors name what is damaged or misfits."""

import argparse
import collections
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lantern.core.io import load_component, save_component
from lantern.drafters.eagle.networks import Eagle, EagleConfig
from lantern.models.llamagen.transformer import SIZES, Transformer, TransformerConfig
from lantern.models.llamagen.vqvae import VQVAE, VQConfig
from lantern.models.releases.llamagen import Checkpoint, read_checkpoint
from tests.refusals import refused
from tests.tiny_transformers import DATA, renamed

RELEASED = {"VQ-16": VQConfig(), "VQ-8": VQConfig(encoder_ch_mult=(1, 2, 2, 4), decoder_ch_mult=(1, 2, 2, 4))}
HEADS = {"n_head": 4}
# names and shapes of the tensors of released files
TABLES = json.loads((DATA / "checkpoint_tables.json").read_text())


def table(name: str) -> dict[str, Tensor]:
    """Random weights under the names and in the shapes of a small released file."""
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randn(shape, generator=generator) for key, (shape, _) in TABLES["tables"][name].items()}


C2I = table("gpt_c2i")


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


@pytest.mark.parametrize("name", RELEASED)
def test_released_tokenizers_have_the_keys_and_shapes_of_the_table(name: str) -> None:
    with torch.device("meta"):
        state = VQVAE(RELEASED[name]).state_dict()
    assert {key: list(tensor.shape) for key, tensor in state.items()} == {
        key: shape for key, (shape, _) in TABLES["tables"][f"{name}_full"].items()
    }


@pytest.mark.parametrize("row", [row for row in TABLES["params"] if row.startswith("GPT-")])
def test_released_sizes_have_the_parameter_counts_of_the_table(row: str) -> None:
    name, _, kind = row.partition("|")
    text = {"model_type": "t2i", "cls_token_num": 120} if kind.startswith("t2i") else {}
    with torch.device("meta"):
        model = Transformer(TransformerConfig.named(name.removeprefix("GPT-"), **text))
    assert sum(parameter.numel() for parameter in model.parameters()) == TABLES["params"][row]["params"]


@pytest.mark.parametrize("size", SIZES)
def test_a_released_size_is_recognised_from_its_shapes(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TransformerConfig.named(size, block_size=576)
    with torch.device("meta"):
        state = Transformer(config).state_dict()
    monkeypatch.setattr("lantern.models.releases.llamagen.read_weights", lambda path: state)
    monkeypatch.setattr("lantern.models.releases.llamagen.check_finite", lambda state, source: None)
    assert TransformerConfig(**read_checkpoint("full.pt", block_size=576).config) == config


CACHE = {"freqs_cis": torch.zeros(1), "layers.0.attention.kv_cache.k_cache": torch.zeros(1)}
SHARDED = "_fsdp_wrapped_module."
WRAPPINGS: dict[str, Any] = {
    "model": {"model": C2I, "optimizer": {"lr": 1}, "steps": 3},
    "module": {"module": C2I},
    "state_dict": {"state_dict": C2I},
    "ema only": {"ema": C2I},
    "nested": {"model": {"state_dict": C2I}},
    "sharded": {SHARDED + name.replace(".", f".{SHARDED}", 1): tensor for name, tensor in C2I.items()},
    "bare": C2I,
    "ordered": collections.OrderedDict(C2I),
    "compiled": {"model": {f"_orig_mod.{name}": tensor for name, tensor in C2I.items()}},
    "parallel": {f"module.{name}": tensor for name, tensor in C2I.items()},
    "both": {f"module._orig_mod.{name}": tensor for name, tensor in C2I.items()},
    "decoded with": C2I | CACHE,
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_all_wrappings_load_the_same_state(tmp_path: Path, wrapping: str) -> None:
    for is_zip in (True, False):  # files of old torch are no archives
        torch.save(WRAPPINGS[wrapping], tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
        assert _convert(tmp_path / "x.pt").state.keys() == C2I.keys()


def test_moving_averages_are_loaded_on_request(tmp_path: Path) -> None:
    state = table("vq_tiny")
    average = {name: tensor + 1 for name, tensor in state.items()}
    path = _saved({"model": state, "ema": average}, tmp_path / "x.pt")
    name = "quantize.embedding.weight"
    assert torch.equal(read_checkpoint(path).state[name], state[name])
    assert torch.equal(read_checkpoint(path, prefers_ema=True).state[name], average[name])


def test_grid_is_read_from_recorded_arguments(tmp_path: Path) -> None:
    arguments = argparse.Namespace(image_size=64, downsample_size=16, gpt_model="GPT-B")
    path = _saved({"model": C2I, "args": arguments}, tmp_path / "x.pt")
    assert read_checkpoint(path, config=HEADS).config["block_size"] == 16
    assert read_checkpoint(path, config=HEADS, block_size=64).config["block_size"] == 64


class _Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


def test_pickle_with_code_is_refused(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    value = {"model": C2I, "args": _Bomb(canary)}
    torch.save(value, tmp_path / "x.pt")
    torch.save(value, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.bin").write_bytes(pickle.dumps(_Bomb(canary)))
    for name in ("x.pt", "old.pt", "plain.bin"):
        assert "weights_only" not in refused(_convert, tmp_path / name, match="no whole checkpoint of plain tensors")
    assert not canary.exists()


def test_a_file_with_wrong_bytes_is_refused(tmp_path: Path) -> None:
    path = _saved({"model": table("gpt_c2i")}, tmp_path / "x.pt")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # torch loads it
    path.write_bytes(data)
    refused(_convert, path, match="no whole checkpoint of plain tensors: the checksum of .* is wrong")


def _without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in C2I.items() if key != name}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (_without("tok_embeddings.weight"), "'tok_embeddings.weight' is missing"),
        (_without("layers.1.attention.wo.weight"), "'layers.1.attention.wo.weight' is missing"),
        (C2I | {"surplus": torch.ones(1)}, "'surplus' is not expected"),
        (C2I | {"norm.weight": torch.full((64,), torch.nan)}, "'norm.weight' holds NaN"),
        (C2I | {"tok_embeddings.weight": torch.ones(3)}, "'tok_embeddings.weight' has shape"),
        ({"w": torch.ones(1)}, "is no LlamaGen transformer"),
        ({"model": [1, 2]}, "'model' is a list, wanted a tensor"),
        ([1, 2], "holds a list"),
        ({3: torch.ones(1)}, "'3' is a Tensor"),
        (C2I | {"norm.weight": torch.ones(64).to_sparse()}, "'norm.weight' is sparse or quantised"),
        (C2I | {"norm.weight": torch.ones(64, device="meta")}, "no values .meta device"),
        (C2I | {"norm.weight": torch.ones(64).to(torch.uint16)}, "'norm.weight' is uint16, wanted one of"),
        (C2I | {"layers.0.attention.wqkv.weight": torch.ones(7)}, r"wqkv.weight' has shape \[7\], wanted"),
    ],
)
def test_error_names_what_does_not_fit(tmp_path: Path, state: object, message: str) -> None:
    assert "x.pt" in refused(_convert, _saved(state, tmp_path / "x.pt"), match=message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block_size": None}, "give --image-size"),
        ({"config": {}}, "number of heads; give --config, a JSON file with"),
        ({"block_size": 15}, "perfect square"),
        ({"config": {"n_head": 4, "n_layer": 200}}, "config has n_layer 200, the file 3 layers"),
        ({"config": {"n_head": 4, "vocab_size": 10**6}}, "'tok_embeddings.weight' has shape"),
        ({"config": {"n_heads": 4}}, "number of heads"),
        ({"config": {"n_head": 4, "vocab_sise": 4}}, "did you mean 'vocab_size'"),
        ({"kind": "vq"}, "holds a c2i checkpoint, not vq"),
    ],
)
def test_impossible_options_are_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    path = _saved(C2I, tmp_path / "x.pt")
    refused(_convert, path, **given, match=message)


def _layer(prefix: str, dim: int, hidden: int) -> dict[str, Tensor]:
    state = {f"{prefix}self_attn.{letter}_proj.weight": torch.randn(dim, dim) for letter in "qkvo"}
    state |= {f"{prefix}mlp.{name}_proj.weight": torch.randn(hidden, dim) for name in ("gate", "up")}
    return state | {f"{prefix}mlp.down_proj.weight": torch.randn(dim, hidden)}


def _target() -> dict[str, Tensor]:
    state = table("gpt_t2i")
    for name in [name for name in state if "wqkv" in name]:
        parts = state.pop(name).chunk(3)
        state |= {name.replace("wqkv", f"w{letter}"): part for letter, part in zip("qkv", parts, strict=True)}
    return renamed(state, "lantern")


def released_drafter(dim: int = 64, hidden: int = 192, tokens: int = 64) -> dict[str, Tensor]:
    """The tensors of a drafter under the names of LANTERN's releases."""
    return {
        "embed_tokens.weight": torch.randn(tokens, dim),
        "fc.weight": torch.randn(dim, 2 * dim),
        "fc.bias": torch.randn(dim),
        "layers.0.post_attention_layernorm.weight": torch.randn(dim),
    } | _layer("layers.0.", dim, hidden)


CONFIG = {"hidden_size": 64, "num_attention_heads": 4, "rms_norm_eps": 1e-6, "model_type": "llamagen"}


def _folder(folder: Path, state: dict[str, Tensor], *, form: str, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if form == "safetensors":
        save_file(state, folder / "model.safetensors")
    else:
        torch.save(state, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("form", ["bin", "safetensors"])
def test_lanterns_target_is_converted_to_llamagen(tmp_path: Path, form: str) -> None:
    extra = {"num_hidden_layers": 3, "block_size": 16, "rope_base": 10000, "input_type": "t2i"}
    found, expected = read_checkpoint(_folder(tmp_path / "x", _target(), form=form, **extra)), table("gpt_t2i")
    assert found.kind == "t2i" and found.config["block_size"] == 16 and found.config["norm_eps"] == 1e-6
    assert found.state.keys() == expected.keys()
    assert all(torch.equal(found.state[name], tensor) for name, tensor in expected.items())
    Transformer(TransformerConfig(**found.config)).load_state_dict(found.state)


@pytest.mark.parametrize("form", ["bin", "safetensors"])
def test_lanterns_drafter_is_converted_to_a_component(tmp_path: Path, form: str) -> None:
    state = released_drafter()
    found = read_checkpoint(_folder(tmp_path / "x", state, form=form, input_type="t2i2"))
    assert found.kind == "drafter"
    save_component(found.state, found.config, tmp_path / "out")
    drafter = load_component(Eagle, EagleConfig, tmp_path / "out")
    assert drafter.state_dict().keys() == found.state.keys()
    assert torch.equal(found.state["embed_tokens.weight"], state["embed_tokens.weight"])
    config = found.config
    assert (config["kind"], config["form"], config["dim"], config["n_head"]) == ("eagle1", "rows", 64, 4)
    assert (config["block_size"], config["cls_token_num"], config["norm_eps"]) == (1024, 119, 1e-6)
    assert config["has_fc_bias"] and not config["has_input_norm"]
    del state["fc.bias"]
    config = read_checkpoint(_folder(tmp_path / "y", state, form=form, input_type="t2i", bias=False)).config
    assert not config["has_fc_bias"] and config["block_size"] == 256


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("fc.bias", None, "'fc.bias' is missing"),
        ("layers.0.self_attn.k_proj.weight", None, "'layers.0.self_attn.k_proj.weight' is missing"),
        ("layers.0.input_layernorm.weight", torch.ones(64), "'layers.0.attention_norm.weight' is not expected"),
        ("layers.0.self_attn.q_norm.weight", torch.ones(64), "drafter for Chameleon"),
        ("lm_head.weight", torch.ones(64), "'output.weight' is not expected"),
    ],
)
def test_drafters_of_other_tensors_are_refused(tmp_path: Path, name: str, tensor: Tensor | None, message: str) -> None:
    state = {key: value for key, value in (released_drafter() | {name: tensor}).items() if value is not None}
    refused(read_checkpoint, _folder(tmp_path / "x", state, form="bin", input_type="t2i"), match=message)


def test_error_names_what_a_folder_lacks(tmp_path: Path) -> None:
    refused(read_checkpoint, tmp_path, match="config.json")
    (tmp_path / "config.json").write_text("{}")
    refused(read_checkpoint, tmp_path, match="neither model.safetensors nor pytorch_model.bin")
    for listed in ([], ["model.bin"], {}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
        refused(read_checkpoint, tmp_path, match=r"index\.json has no weight_map")
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "config.json").unlink()
    save_file(released_drafter(), tmp_path / "model.safetensors")  # as accelerate saves a training's state
    assert read_checkpoint(tmp_path, config=CONFIG | {"input_type": "t2i"}).config["n_head"] == 4
