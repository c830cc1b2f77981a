"""Two processes that share a model of transformers against one process.

Run by `torchrun`: each process decodes with its share of the models of FOLDER, and writes what it found there.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern.cli.main import main
from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.generation.generator import generate
from lantern.models.folder import load_model
from lantern.models.transformers import loading
from tests import tiny_transformers as tiny
from tests.cli.calls import Capture
from tests.refusals import refused

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("plain", "gumbel-jacobi")
PROMPTS = ["a red apple", "the sky"]


def chameleon() -> Any:
    """A tiny Chameleon whose heads have norms of their own."""
    model = tiny.make("chameleon")
    generator = torch.Generator().manual_seed(6)
    for name, parameter in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            parameter.data += torch.randn(parameter.shape, generator=generator) / 2
    return model


MODELS: dict[str, Any] = {name: None for name in tiny.MODELS if name != "glm_image"}
MODELS |= {"chameleon": chameleon, "liquid": lambda: tiny.make("liquid", num_key_value_heads=2)}


def found_by(folder: Path, name: str, processes: int) -> dict[str, Any]:
    """Logits behind a prompt, greedy and sampled tokens of each method, and what the images promise."""
    how: Any = {"device": "cpu", "engine": "eager", "parts": ("text",)}
    model = load_model(folder, size=tiny.SIZES.get(name), processes=processes, **how)
    target: Any = model.target
    tokens = torch.tensor([[0, 1, 9, 10, 4], [1, 9, 12, 11, 4]])
    condition = Condition(tokens=tokens[:, None], mask=tokens[:, None] > 0)
    with torch.inference_mode():
        found: dict[str, Any] = {"logits": target.read(condition, 1).logits}
    found["heads"] = target.config.n_head
    for method in METHODS:
        for temperature in (0.0, 1.0):
            sampling = Sampling(guidance=3.0, temperature=temperature)
            made = list(generate(model, PROMPTS, method=method, sampling=sampling, with_pixels=False, seed=3))
            found[f"{method} {temperature}"] = torch.stack([picture.tokens for picture in made])
            found[f"{method} promise"] = made[0].statistics.promise
    return found


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables, timeout=600)


@pytest.mark.slow
def test_two_processes_give_the_logits_and_tokens_of_one(tmp_path: Path) -> None:
    for name, model in MODELS.items():
        tiny.save(name, tmp_path / "models" / name, model and model())
    done = torchrun("-m", "tests.models.test_parallel", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for name in MODELS:
        alone = found_by(tmp_path / "models" / name, name, 1)
        shared, other = found[0][name], found[1][name]
        torch.testing.assert_close(shared["logits"], alone["logits"], atol=1e-5, rtol=0)
        for key, value in shared.items():
            if key.endswith("promise"):
                assert value == other[key] == "distribution", key
            elif key == "heads":
                assert 2 * value == alone[key]
            elif key != "logits":
                assert torch.equal(value, other[key]) and torch.equal(value, alone[key]), (name, key)
        for temperature in (0.0, 1.0):
            one, another = (shared[f"{method} {temperature}"] for method in METHODS)
            assert torch.equal(one, another), name
        assert alone["plain promise"] == "tokens"


@pytest.mark.slow
def test_rank_0_alone_writes_and_prints(tmp_path: Path, capsys: Capture) -> None:
    folder = tiny.save("janus", tmp_path / "janus")
    what = ["--model", str(folder), "--prompt", "a red apple", "--method", "gumbel-jacobi", "--device", "cpu", "--json"]
    done = torchrun("-m", "lantern.cli.main", "generate", *what, "--out", str(tmp_path / "two.png"))
    assert done.returncode == 0, done.stderr[-3000:]
    shared = json.loads(done.stdout)
    assert main(["generate", *what, "--out", str(tmp_path / "one.png")]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert shared["tokens_sha256"] == alone["tokens_sha256"]
    assert shared["pictures"][0]["promise"] == "distribution"
    assert {path.name for path in tmp_path.iterdir()} == {"janus", "one.png", "two.png"}


def test_some_models_are_not_shared(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    refused(load_model, folder, processes=2, match="runs in one process, not by torchrun")
    refused(loading.plan_of, "LlamaForCausalLM", 2, match="LlamaForCausalLM has no plan for tensor parallelism")
    with pytest.raises(ValueError, match="3 processes do not divide 2 heads of keys and values"):
        loading.divide_heads(tiny.assemble("janus").target, 3)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["generate", "--prompt", "a red apple", "--out", str(tmp_path / "a.png")]) == 2
    assert "2 processes share a model and need one method: give --method" in capsys.readouterr().err


if __name__ == "__main__":
    import torch.distributed as processes

    root = Path(sys.argv[1])
    made = {path.name: found_by(path, path.name, 2) for path in sorted((root / "models").iterdir())}
    torch.save(made, root / f"rank{processes.get_rank()}.pt")
    processes.destroy_process_group()
