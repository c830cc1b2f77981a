"""Conversion of folders in the layout of LANTERN's releases into components."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lantern.core.io import load_component, save_component
from lantern.drafters.eagle.eagle1 import Eagle, EagleConfig
from lantern.models.llamagen.checkpoint import read_checkpoint
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from tests.models.tables import table


def _layer(prefix: str, dim: int, hidden: int) -> dict[str, Tensor]:
    state = {f"{prefix}self_attn.{letter}_proj.weight": torch.randn(dim, dim) for letter in "qkvo"}
    state |= {f"{prefix}mlp.{name}_proj.weight": torch.randn(hidden, dim) for name in ("gate", "up")}
    return state | {f"{prefix}mlp.down_proj.weight": torch.randn(dim, hidden)}


def _target() -> dict[str, Tensor]:
    state = {
        "model.embed_tokens.weight": torch.randn(64, 64),
        "model.cls_embedding.uncond_embedding": torch.randn(120, 32),
        "model.cls_embedding.cap_proj.fc1.weight": torch.randn(64, 32),
        "model.cls_embedding.cap_proj.fc2.weight": torch.randn(64, 64),
        "model.norm.weight": torch.randn(64),
        "lm_head.weight": torch.randn(64, 64),
    }
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        state |= _layer(prefix, 64, 192)
        state |= {f"{prefix}{name}_layernorm.weight": torch.randn(64) for name in ("input", "post_attention")}
    return state


def _drafter() -> dict[str, Tensor]:
    return {
        "embed_tokens.weight": torch.randn(64, 64),
        "fc.weight": torch.randn(64, 128),
        "fc.bias": torch.randn(64),
        "layers.0.post_attention_layernorm.weight": torch.randn(64),
    } | _layer("layers.0.", 64, 192)


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
def test_target_is_converted_to_llamagen(tmp_path: Path, form: str) -> None:
    state = _target()
    extra = {"num_hidden_layers": 3, "block_size": 16, "rope_base": 10000, "input_type": "t2i"}
    found = read_checkpoint(_folder(tmp_path / "x", state, form=form, **extra))
    assert found.kind == "t2i" and found.config["block_size"] == 16 and found.config["norm_eps"] == 1e-6
    assert found.state.keys() == table("gpt_t2i").keys()
    query_key_value = torch.cat([state[f"model.layers.1.self_attn.{letter}_proj.weight"] for letter in "qkv"])
    assert torch.equal(found.state["layers.1.attention.wqkv.weight"], query_key_value)
    assert torch.equal(found.state["layers.2.ffn_norm.weight"], state["model.layers.2.post_attention_layernorm.weight"])
    assert torch.equal(found.state["layers.0.feed_forward.w3.weight"], state["model.layers.0.mlp.up_proj.weight"])
    Transformer(TransformerConfig(**found.config)).load_state_dict(found.state)


@pytest.mark.parametrize("form", ["bin", "safetensors"])
def test_released_drafter_is_converted_to_a_component(tmp_path: Path, form: str) -> None:
    state = _drafter()
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


def test_config_records_a_drafter_without_bias(tmp_path: Path) -> None:
    state = _drafter()
    del state["fc.bias"]
    with pytest.raises(ValueError, match=r"'fc.bias' is missing"):
        read_checkpoint(_folder(tmp_path / "a", state, form="bin", input_type="t2i"))
    found = read_checkpoint(_folder(tmp_path / "b", state, form="bin", input_type="t2i", bias=False))
    assert not found.config["has_fc_bias"] and found.config["block_size"] == 256


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.0.input_layernorm.weight", "'layers.0.attention_norm.weight' is not expected"),
        ("layers.0.self_attn.q_norm.weight", "drafter for Chameleon"),
        ("lm_head.weight", "'output.weight' is not expected"),
    ],
)
def test_foreign_drafters_are_refused(tmp_path: Path, name: str, message: str) -> None:
    state = _drafter() | {name: torch.ones(64)}
    with pytest.raises(ValueError, match=message):
        read_checkpoint(_folder(tmp_path / "x", state, form="bin", input_type="t2i"))


def test_error_names_an_incomplete_projection(tmp_path: Path) -> None:
    state = _drafter()
    del state["layers.0.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match=r"'layers.0.self_attn.k_proj.weight' is missing"):
        read_checkpoint(_folder(tmp_path / "x", state, form="bin", input_type="t2i"))


def test_error_names_what_a_folder_lacks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="neither model.safetensors nor pytorch_model.bin"):
        read_checkpoint(tmp_path)
