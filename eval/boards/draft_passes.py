"""Tokens per step at equal draft passes: methods that choose how deep they draft, against constant depths.

`python -m lantern.eval.boards.draft_passes FILE 64` measures 64 images of the embedded model at temperature 1.
"""

import sys
from unittest.mock import patch

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.core.io import write_json
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.eval.intervals import mean_estimate
from lantern.generation.choice import choose_method
from lantern.generation.generator import Generator
from lantern.generation.requests import as_requests, shuffled_prompts
from lantern.models.folder import Model, load_model

CHAIN, TREE = "eagle1:tree=chain_", "eagle2-paper:tree=eagle2_"
PAIRS = {"svip": (f"{CHAIN}1", f"{CHAIN}2"), "c2t": (f"{TREE}4_4_1", f"{TREE}4_4_2")}
PAIRS |= {"radar": (f"{TREE}59_10_2", f"{TREE}59_10_3"), "ddd": (f"{TREE}59_10_3", f"{TREE}59_10_4")}


def counts(model: Model, spec: str, images: int) -> Float[Tensor, "i 2"]:
    """Return the steps of the target and the passes of the drafter for each image, decoded alone."""
    sampling = model.sampling(temperature=1.0)
    generator, found = Generator(model, choose_method(model, spec, sampling=sampling), sampling), list[list[int]]()
    for prompt in shuffled_prompts(None, 7)[:images]:
        request = as_requests([prompt], 11)
        with patch.object(EagleDrafter, "_run", autospec=True, side_effect=EagleDrafter._run) as run:
            steps = int(generator.decode(generator.condition(request), request).steps)
        # chains are drafted in C++, a token by each pass
        found.append([steps, steps * int(spec[-1]) if spec.startswith(CHAIN) else run.call_count])
    return torch.tensor(found, dtype=torch.float64)


def against(method: Tensor, below: Tensor, above: Tensor) -> dict[str, object]:
    """Return the ratio of tokens per step to depths with as many passes, interpolated between two in the logarithm."""
    own, low, high = (float(one[:, 1].sum() / one[:, 0].sum()) for one in (method, below, above))
    logs = torch.lerp(below[:, 0].log(), above[:, 0].log(), (own - low) / (high - low)) - method[:, 0].log()
    return {"passes_per_step": own, "log_of_tokens_ratio": vars(mean_estimate(logs, seed=0))}


if __name__ == "__main__":
    of, number = load_model(device="cpu", dtype="bf16", engine="cpu"), int(sys.argv[2])
    made = {spec: counts(of, spec, number) for name, two in PAIRS.items() for spec in (f"{name}-paper", *two)}
    ratios = {name: against(made[f"{name}-paper"], *(made[spec] for spec in two)) for name, two in PAIRS.items()}
    rows = {spec: {"steps": one[:, 0].tolist(), "passes": one[:, 1].tolist()} for spec, one in made.items()}
    write_json(sys.argv[1], {"weights": of.fingerprint, "against": ratios, "images": rows})
