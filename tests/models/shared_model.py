"""Run by `torchrun`: every process decodes with its share of tiny models, and writes what it found to FOLDER."""

import sys
from pathlib import Path
from typing import Any

import torch

from lantern.core.sampling import Sampling
from lantern.core.types import Condition
from lantern.generation.generator import generate
from lantern.models.folder import load_model

SIZES = {"emu3": (24, 32), "lumina": (4, 8), "simplear": (48, 64)}
METHODS = ("plain", "gumbel-jacobi")
PROMPTS = ["a red apple", "the sky"]


def found_by(folder: Path, name: str, processes: int) -> dict[str, Any]:
    """Logits behind a prompt, greedy and sampled tokens of each method, and what the images promise."""
    how: Any = {"device": "cpu", "engine": "eager", "parts": ("text",)}
    model = load_model(folder, size=SIZES.get(name), processes=processes, **how)
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


if __name__ == "__main__":
    import torch.distributed as processes

    root = Path(sys.argv[1])
    made = {path.name: found_by(path, path.name, 2) for path in sorted((root / "models").iterdir())}
    torch.save(made, root / f"rank{processes.get_rank()}.pt")
    processes.destroy_process_group()
