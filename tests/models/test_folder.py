"""Loading of a model folder: its parts, dtypes, index and defaults, and the memory that it takes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.core.io import save_component
from lantern.engines.cpu.engine import CpuEngine
from lantern.engines.pass_times import NODES
from lantern.generation.choice import choose_method
from lantern.generation.generator import generate
from lantern.methods import METHODS
from lantern.models.folder import load_model, pick_device, record_tokens_per_step, write_index
from lantern.models.llamagen.transformer import Transformer, TransformerConfig
from tests.refusals import refused
from tests.tiny import tiny_target


def test_only_requested_parts_are_loaded_and_a_cpu_computes_in_fp32_by_default(folder: Path) -> None:
    bare, whole, half = load_model(folder, parts=()), load_model(folder, device="cpu"), load_model(folder, dtype="bf16")
    assert (bare.vq, bare.text, bare.drafter) == (None, None, None)
    assert load_model(folder, parts=("vq",)).vq is not None
    assert choose_method(bare, "auto") == choose_method(whole, "auto")
    assert whole.dtype == torch.float32
    assert half.dtype == torch.bfloat16 and half.target.get_buffer("rotary.table").dtype == torch.float32
    assert half.vq is not None and next(half.vq.parameters()).dtype == torch.float32
    [picture] = generate(half, ["a red apple"], method="eagle1")
    assert picture.pixels is not None


@pytest.mark.parametrize(("slope", "suits"), [(0.0, 16), (0.1, 3), (1.0, 2)])
def test_default_windows_suit_the_engine(
    folder: Path, slope: float, suits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {n: 1.0 + slope * (n - 1) for n in NODES}
    monkeypatch.setattr("lantern.generation.choice.pass_times", lambda engine, target: times)
    eager = replace(load_model(folder), generation={"method": "gumbel-jacobi"})
    fused = replace(eager, engine=CpuEngine())
    usual, reported = METHODS["gumbel-jacobi"].settings["window"], list[str]()
    assert choose_method(eager).settings["window"] == usual
    assert choose_method(fused, report=reported.append).settings["window"] == suits
    assert (suits == usual) == (not reported)
    assert choose_method(fused, settings={"window": 5}).settings["window"] == 5
    assert choose_method(fused, "gumbel-jacobi").settings["window"] == suits
    assert choose_method(fused, METHODS["gumbel-jacobi"]).settings["window"] == usual
    known = replace(fused, tokens_per_step={2: 1.2, 8: 8.0})
    assert choose_method(known, "gumbel-jacobi").settings["window"] == 8
    assert choose_method(replace(fused, generation={"method": "eagle1"})) == METHODS["eagle1"]
    relaxed = METHODS["bounded-window"]  # its tokens depend on the window, so that no measurement may choose it
    assert choose_method(fused, "bounded-window") == relaxed


@pytest.mark.parametrize(
    ("entry", "printed"),
    [
        ({"generation": {"guidanse": 3}}, "did you mean 'guidance'"),
        ({"generation": {"guidance": -1}}, "guidance is -1"),
        ({"generation": {"method": "eagle"}}, "did you mean"),
        ({"generation": [1]}, "wanted an object"),
        *(
            ({"tokens_per_step": found}, '"tokens_per_step".* wanted')
            for found in ([2], {"x": 1.5}, {"1": 1.0}, {"2": "1.5"}, {"2": 0.5})
        ),
    ],
    ids=str,
)
def test_unfit_entries_of_the_index_are_refused_by_file(copied: Path, entry: dict[str, object], printed: str) -> None:
    index = json.loads((copied / "model_index.json").read_text())
    (copied / "model_index.json").write_text(json.dumps(index | entry))
    assert "model_index.json" in refused(load_model, copied, match=printed)


def test_tokens_per_pass_of_windows_are_kept_in_the_index(copied: Path) -> None:
    path = copied / "model_index.json"
    assert load_model(copied).tokens_per_step == {}
    before = json.loads(path.read_text())
    record_tokens_per_step(copied, {8: 3.66149, 2: 1.55})
    assert load_model(copied).tokens_per_step == {2: 1.55, 8: 3.661}
    assert json.loads(path.read_text()) == before | {"tokens_per_step": {"2": 1.55, "8": 3.661}}
    write_index(copied)  # other components may commit other numbers of tokens
    assert load_model(copied).tokens_per_step == {}
    with pytest.raises(ValueError, match=r'model_index.json: "tokens_per_step" holds \'4\': 4.5, wanted a window'):
        record_tokens_per_step(copied, {4: 4.5})


def test_a_tokenizer_of_another_model_is_refused(copied: Path) -> None:
    other = tiny_target(vocab_size=25)
    save_component(other.state_dict(), other.config, copied / "transformer")
    assert "vqvae has 24 tokens, the transformer 25" in refused(load_model, copied, parts=("vq",))


@pytest.mark.parametrize(
    "name", ["gpu", "cuda:512", "cpu:1", "", "CPU", "mps", None, torch.device("cuda:511"), torch.device("mps")]
)
def test_a_missing_device_is_refused(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)  # it has no fp64, which noise needs
    assert "device" in refused(pick_device, name)
    assert pick_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn, torch.bool, None, 16])
def test_what_is_no_dtype_of_weights_is_refused(dtype: Any) -> None:
    refused(load_model, dtype=dtype, device="cpu", match="dtype is .*, wanted auto, fp32, bf16, fp16")


MIB = 1 << 20
# Memory that loading takes. (A child's ru_maxrss would begin at its parent's.)
IMPORTS = 560  # MiB of what imports load (514), and of a part while it is loaded and quantized
LOAD = r"""
import re, sys
from pathlib import Path
from lantern.engines.engine import engine
from lantern.models.folder import load_model

model = load_model(sys.argv[1], dtype=sys.argv[2], device="cpu", parts=(), engine=engine("eager", weights=sys.argv[3]))
values = [*model.target.parameters(), *model.target.buffers()]
peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
inner = [part for value in values for part in (getattr(value, "qdata", value), getattr(value, "scale", None))]
print(sum(part.nbytes for part in inner if part is not None), peak << 10)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of LlamaGen-L's shape."""
    made = tmp_path_factory.mktemp("large")
    target = Transformer(TransformerConfig.named("L", model_type="t2i", cls_token_num=120))
    save_component(target.state_dict(), target.config, made / "transformer")
    write_index(made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "weights"), [("fp32", "full"), ("bf16", "full"), ("bf16", "int8"), ("fp32", "int8")])
def test_peak_is_little_more_than_the_model(large: Path, dtype: str, weights: str) -> None:
    how = {"capture_output": True, "text": True, "check": True, "env": {"OMP_NUM_THREADS": "1", "PYTHONPATH": "."}}
    found = subprocess.run([sys.executable, "-c", LOAD, str(large), dtype, weights], **how)  # type: ignore[call-overload]
    held, peak = map(int, found.stdout.split())
    bits = 8 if weights == "int8" else torch.finfo(torch.float32 if dtype == "fp32" else torch.bfloat16).bits
    assert held > 340e6 * bits / 8
    most = 1.05 * (held + IMPORTS * MIB)
    assert peak < most, f"{peak / MIB:.0f} MiB for a model of {held / MIB:.0f} MiB"
