"""Tokens that a seed gives on every processor: `test_build.py` runs these tests as if on older ones too."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lantern.engines.cpu.build import library
from lantern.generation.generator import generate
from lantern.models.folder import load_model
from lantern.models.llamagen.text import TextEncoder

ROOT = Path(__file__).parents[3]
PROMPTS = ("a red apple", "two green frogs", "a flat rocket", "a cat and a dog")
# the same with AVX2, AVX-512, its bf16 and AMX
EMBEDDINGS = "02573cb00a0d9cd63e2b8267815df954afc8295d81bf3fab4704b5af746dbc56"
TOKENS = "9091f6f181da29de1ee6060159f2c49224e86add304a70d22e35900c9e82625b"


def digest(numbers: Tensor, form: str) -> str:
    return hashlib.sha256(numbers.numpy().astype(form).tobytes()).hexdigest()


def check_tokens(method: str) -> None:
    library()  # built now, which `auto` does not wait for
    model = load_model()
    assert model.dtype == torch.bfloat16 and model.engine.resolve(model.target).name == "cpu"
    assert isinstance(model.text, TextEncoder)
    assert digest(model.text.encode(PROMPTS, slots=8)[0], "<f4") == EMBEDDINGS
    made = generate(model, PROMPTS, seed=7, method=method, with_pixels=False)
    assert digest(torch.stack([one.tokens for one in made]), "<i8") == TOKENS


@pytest.mark.parametrize("method", ["plain", "gumbel-jacobi:window=4"])
def test_the_default_dtype_is_bf16_with_these_tokens(method: str) -> None:
    check_tokens(method)


def test_torch_without_vectors_gives_these_tokens_too() -> None:
    library()
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    command = [sys.executable, "-c", f"from {__name__} import check_tokens; check_tokens('plain')"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
