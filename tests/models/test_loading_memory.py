"""The memory that loading takes, at LlamaGen-L's shape. (A child's ru_maxrss would begin at its parent's.)"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lantern.core.io import save_component
from lantern.models.folder import write_index
from lantern.models.llamagen.transformer import Transformer, TransformerConfig

MIB = 1 << 20
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("large")
    target = Transformer(TransformerConfig.named("L", model_type="t2i", cls_token_num=120))
    save_component(target.state_dict(), target.config, made / "transformer")
    write_index(made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "weights"), [("fp32", "full"), ("bf16", "full"), ("bf16", "int8"), ("fp32", "int8")])
def test_peak_is_little_more_than_the_model(folder: Path, dtype: str, weights: str) -> None:
    how = {"capture_output": True, "text": True, "check": True, "env": {"OMP_NUM_THREADS": "1", "PYTHONPATH": "."}}
    found = subprocess.run([sys.executable, "-c", LOAD, str(folder), dtype, weights], **how)  # type: ignore[call-overload]
    held, peak = map(int, found.stdout.split())
    bits = 8 if weights == "int8" else torch.finfo(torch.float32 if dtype == "fp32" else torch.bfloat16).bits
    assert held > 340e6 * bits / 8
    most = 1.05 * (held + IMPORTS * MIB)
    assert peak < most, f"{peak / MIB:.0f} MiB for a model of {held / MIB:.0f} MiB"
