"""Released layouts of Janus and Chameleon: written by an inverse map of tiny models, converted, and compared."""

import json
import re
from pathlib import Path
from typing import Any

import torch

from lantern.cli.main import main
from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.generation.generator import generate
from lantern.models.folder import Model, load_model
from lantern.models.transformers import loading
from lantern.models.transformers.components import Components
from tests import tiny_transformers as tiny
from tests.cli.calls import Capture, refused_by
from tests.refusals import refused

# of tiny models: configs as they are released, and the words that have other names there
RELEASES = json.loads((tiny.DATA / "tiny_releases.json").read_text())


def janus() -> Any:
    """A tiny Janus with the sizes that a release leaves out: heads of 64 channels, an own output of words."""
    from transformers import JanusForConditionalGeneration

    made = tiny.make("janus")
    made.config.vision_config.hidden_size = 128
    made.config.vision_config.projection_dim = made.config.text_config.hidden_size
    made.config.tie_word_embeddings = False
    return tiny.randomise(JanusForConditionalGeneration(made.config), 1)


def released_janus(model: Any, folder: Path) -> Path:
    """Write the files of DeepSeek's release: two .bin files with an index, configs and the tokenizer."""
    state = model.state_dict()
    for name in [name for name in state if "vision_model" in name and ".q_proj." in name]:
        parts = [name.replace(".q_proj.", f".{letter}_proj.") for letter in "qkv"]
        state[name] = torch.cat([state.pop(part) for part in parts])
    old = tiny.renamed(state, "janus")
    old["vision_model.vision_tower.pos_embed"] = old["vision_model.vision_tower.pos_embed"][None]
    old["gen_vision_model.quantize.codebook_used"] = torch.zeros(8)
    old["vision_model.vision_tower.attn_pool.latent"] = torch.zeros(1, 1, 4)
    old["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    configs("janus", folder)
    names = sorted(old)
    parts = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
    for file, keys in parts.items():
        torch.save({key: old[key].clone() for key in keys}, folder / file)
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary("janus")))
    return folder


def configs(family: str, folder: Path) -> None:
    """Write the configs of a release; YAML of JSON is YAML too."""
    for name, value in RELEASES[family]["files"].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(value))


def chameleon() -> Any:
    """A tiny Chameleon whose norms are the same for all heads, as released."""
    model = tiny.make("chameleon")
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if re.search(r"\.[qk]_norm\.", name):
            row = torch.randn(1, parameter.shape[1], generator=generator)
            parameter.data.copy_((1 + row / 4 if name.endswith("weight") else row / 4).expand_as(parameter))
    return model


def released_chameleon(model: Any, decoder: Any, folder: Path) -> Path:
    """Write the files of Meta's release: interleaved queries and keys, a Lightning checkpoint of the VQ tokenizer."""
    config = model.config
    heads, width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    adjacent = [i // 2 + i % 2 * (width // 2) for i in range(width)]
    old: dict[str, Any] = {"rope.freqs": None}
    for name, tensor in model.state_dict().items():
        if re.search(r"self_attn\.[qk]_proj", name):
            tensor = tensor.view(heads, width, -1)[:, adjacent].flatten(0, 1)
        elif re.search(r"self_attn\.[qk]_norm", name):
            tensor = tensor[0, adjacent]
        if not name.startswith("model.vqmodel."):
            old[name] = tensor
    old = tiny.renamed(old, "chameleon")
    configs("chameleon", folder)
    torch.save(old, folder / "models" / "7b" / "consolidated.pth")
    (folder / "tokenizer" / "text_tokenizer.json").write_text(json.dumps(vocabulary("chameleon")))
    torch.save(vqgan(model, decoder), folder / "tokenizer" / "vqgan.ckpt")
    return folder


def vqgan(model: Any, decoder: Any) -> dict[str, Any]:
    state = model.model.vqmodel.state_dict()
    return {"epoch": 3, "state_dict": state | tiny.released(decoder) | {"loss.logvar": torch.zeros(1)}}


def vocabulary(family: str) -> dict[str, Any]:
    made = tiny.tokenizer([RELEASES[family]["words"].get(word, word) for word in tiny.word_ids(family)])
    return json.loads(made.backend_tokenizer.to_str())


def convert(source: Path, out: Path, *options: str) -> Path:
    assert main(["convert", str(source), str(out), *options]) == 0
    return out


def tokens_and_pixels(model: Model) -> tuple[Any, Any]:
    (picture,) = generate(model, ["a red apple"], method="plain", sampling=Sampling(guidance=3.0, temperature=0))
    return picture.tokens, picture.pixels


def assert_same(family: str, model: Any, out: Path) -> Components:
    """Load what was converted, of which tensors and logits are those of the model."""
    from transformers import AutoModelForImageTextToText

    state = model.state_dict()
    for name, tensor in AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32).state_dict().items():
        assert torch.equal(tensor, state.pop(name)), name
    assert not state
    made = loading.load(out, torch.device("cpu"), torch.float32, parts=("vq", "text"))
    tokens = torch.tensor([[[1, 9, 10, 12, 4]]])
    condition = Condition(tokens=tokens, mask=tokens > 0)
    found, expected = (one.target.read(condition, 1).logits for one in (made, tiny.assemble(family, model)))
    assert torch.equal(found, expected)
    assert len(tokens_and_pixels(load_model(out))[0]) == 16
    return made


@torch.no_grad()
def test_janus_becomes_the_same_model(tmp_path: Path, capsys: Capture) -> None:
    model = janus()
    out = convert(released_janus(model, tmp_path / "released"), tmp_path / "out", "--kind", "janus")
    assert "janus, " in capsys.readouterr().out
    made = assert_same("janus", model, out)
    tokens = torch.arange(16)[None]
    assert torch.equal(made.vq.decode(tokens), tiny.assemble("janus", model).vq.decode(tokens))
    prompt = [tiny.word_ids("janus")[word] for word in ("<bos>", "User:", "a", "red", "apple", "Assistant:", "<boi>")]
    assert made.text.rows("a red apple") == (prompt, [1, *[2] * 5, 4])


@torch.no_grad()
def test_chameleon_becomes_the_same_model(tmp_path: Path) -> None:
    model = chameleon()
    decoder = tiny.vq_decoder(model)
    model.model.vqmodel.post_quant_conv.load_state_dict(decoder.post_quant_conv.state_dict())
    out = convert(released_chameleon(model, decoder, tmp_path / "released"), tmp_path / "out")
    made = assert_same("chameleon", model, out)
    tokens = torch.arange(16)[None]
    grid = made.vq.codebook[tokens].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    assert torch.equal(made.vq.decode(tokens), decoder(grid))
    assert made.text.rows("a red apple") == ([1, 9, 10, 12, 19, 17], [1, 17])


def test_a_vqgan_becomes_the_decoder_of_lumina(tmp_path: Path, capsys: Capture) -> None:
    folder = tiny.save("lumina", tmp_path / "lumina")
    expected = tokens_and_pixels(load_model(folder, size=(4, 8)))
    (folder / "vqgan.ckpt").rename(tmp_path / "vqgan.ckpt")
    refused(load_model, folder, size=(4, 8), match="holds no VQ decoder")
    convert(tmp_path / "vqgan.ckpt", folder)
    found = tokens_and_pixels(load_model(folder, size=(4, 8)))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    for arguments, message in (
        ([str(folder)], "already holds a component"),
        ([str(folder), "--overwrite", "--kind", "t2i"], "holds a vqgan checkpoint, not t2i"),
        ([str(folder), "--overwrite", "--grid", "4"], "are for LlamaGen's checkpoints"),
        ([str(tmp_path)], "holds no Chameleon or Lumina-mGPT"),
    ):
        assert message in refused_by(capsys, "convert", str(tmp_path / "vqgan.ckpt"), *arguments)


def test_unknown_and_missing_tensors_are_named_with_their_file(tmp_path: Path, capsys: Capture) -> None:
    model = chameleon()
    source = released_chameleon(model, tiny.vq_decoder(model), tmp_path / "released")
    path = source / "models" / "7b" / "consolidated.pth"
    whole = torch.load(path)
    less = {key: tensor for key, tensor in whole.items() if key != "layers.1.feed_forward.w3.weight"}
    for state, message in (
        (whole | {"layers.0.lora.weight": torch.zeros(1)}, "tensor 'layers.0.lora.weight' is not expected"),
        (less, "tensor 'model.layers.1.mlp.up_proj.weight' is missing"),
        (whole | {"norm.weight": torch.zeros(3)}, "'model.norm.weight' has shape [3], wanted [32]"),
        (whole | {"norm.weight": torch.full((32,), torch.nan)}, "holds NaN or infinity"),
    ):
        torch.save(state, path)
        line = refused_by(capsys, "convert", str(source), str(tmp_path / "out"))
        assert "consolidated.pth" in line and message in line
        assert not (tmp_path / "out").exists()
    torch.save(whole, path)
    params = source / "models" / "7b" / "params.json"
    sizes = json.loads(params.read_text())
    params.write_text(json.dumps(sizes | {"model": sizes.get("model", {}) | {"n_heads": 0}}))
    assert "lacks what its layout has (ZeroDivisionError" in refused_by(
        capsys, "convert", str(source), str(tmp_path / "out")
    )
    params.write_text(json.dumps(sizes))
    torch.save(whole | {"layers.0.attention.wq.weight": torch.zeros(())}, path)
    assert "has (IndexError" in refused_by(capsys, "convert", str(source), str(tmp_path / "out"))
    torch.save(whole, path)
    (source / "tokenizer" / "vqgan.yaml").write_text("model: 3")
    assert "vqgan.yaml is no config of a VQGAN" in refused_by(capsys, "convert", str(source), str(tmp_path / "out"))


def test_an_incomplete_janus_is_refused(tmp_path: Path, capsys: Capture) -> None:
    source = released_janus(janus(), tmp_path / "released")
    path = source / "pytorch_model-00002-of-00002.bin"
    state = torch.load(path)
    call = ("convert", str(source), str(tmp_path / "out"))
    torch.save(state | {"gen_extra.weight": torch.zeros(1)}, path)
    assert "00002-of-00002.bin: tensor 'gen_extra.weight' is not expected" in refused_by(capsys, *call)
    path.unlink()
    assert "pytorch_model-00002-of-00002.bin is missing" in refused_by(capsys, *call)
    torch.save(state, path)
    (source / "tokenizer.json").write_text((source / "tokenizer.json").read_text().replace("begin_of_image", "begin"))
    assert "the vocabulary has no" in refused_by(capsys, *call)
