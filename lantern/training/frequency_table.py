"""The table of frequent codes that FR-Spec drafts from, and how much of the target's distribution a subset covers.

`python -m lantern.training.frequency_table` samples images of some prompts and counts their codes (the add-on
"fr-spec"). Along other images of the same prompts it sums p(S) for three choices of a set S of codes: the most
frequent, those of the prompt's other image first, and half frequent ones with those near the left and upper
neighbours. At most p(S) of the drafts from S can be accepted.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.io import save_component, weights_digest, write_json
from lantern.core.sampling import Sampling
from lantern.core.types import Step
from lantern.drafters.eagle.fr_spec import FrequencyTable, nearest
from lantern.eval.speed.surroundings import about
from lantern.generation.requests import read_prompts
from lantern.models.folder import Model, load_model
from lantern.training.sampled_codes import sampled_codes
from lantern.verifiers.relaxations.neighbours import proximity_table

ROOT = Path(__file__).resolve().parents[2]
COUNTED, MEASURED = 1000, 2000  # seeds of the counted and of the measured pictures
WAYS = ("frequent", "prompt", "neighbours")


def sizes_for(vocab_size: int) -> list[int]:
    """Return powers of two from 16 on, and all codes."""
    return [2**n for n in range(4, max(vocab_size.bit_length(), 5)) if 2**n < vocab_size] + [vocab_size]


class Coverage:
    """Sums p(S) along images for every size and choice. `counts` are those of each prompt's other image."""

    def __init__(
        self,
        table: FrequencyTable,
        codebook: Float[Tensor, "v d"],
        *,
        sampling: Sampling,
        counts: Int[Tensor, "n v"],
        block_size: int,
    ) -> None:
        self.vocab_size = len(codebook)
        self.sizes, self.sampling, self.counts = sizes_for(self.vocab_size), sampling, counts
        # Codes that the other picture does not have are ordered by frequency.
        self.ranking, self.overall = table.ranking, table.counts.double() / (table.counts.sum() + 1)
        most = min(max(self.sizes[-2] // 4 if len(self.sizes) > 1 else 1, 1), self.vocab_size - 1)
        self.around = nearest(proximity_table(codebook, most), most)
        self.grid = math.isqrt(block_size)
        self.sums = torch.zeros(len(WAYS), len(self.sizes), dtype=torch.float64)
        self.held = torch.zeros(len(self.sizes), dtype=torch.float64)
        self.places = 0
        self._before: list[Tensor] = []

    def add(self, numbers: Sequence[int], step: Step) -> None:
        """Add the distribution that a step of plain decoding sampled its codes from."""
        assert step.scores is not None
        logits = step.scores.logits.unflatten(0, (len(numbers), self.sampling.rows))
        p = self.sampling.log_probs(logits, step.start[:, None])[:, 0].exp().cpu().double()
        place = int(step.start[0])
        self._before = [] if place == 0 else self._before
        own = self.counts[list(numbers)].double() + self.overall
        own = own.sort(dim=-1, descending=True, stable=True).indices
        for i, size in enumerate(self.sizes):
            near = self._union(place, size, len(p))
            self.held[i] += near.sum()
            found = (p[:, self.ranking[:size]].sum(1), p.gather(1, own[:, :size]).sum(1), (p * near).sum(1))
            self.sums[:, i] += torch.stack(found).sum(1)
        self.places += len(p)
        self._before.append(step.codes[:, 0].cpu())

    def _union(self, place: int, size: int, images: int) -> Bool[Tensor, "b v"]:
        """Return half frequent codes, a quarter near the left neighbour, a quarter near the upper one."""
        there = torch.zeros(images, self.vocab_size, dtype=torch.bool)
        if size == self.vocab_size:
            return ~there
        there[:, self.ranking[: size // 2]] = True
        neighbours = [place - 1] if place % self.grid else []
        neighbours += [place - self.grid] if place >= self.grid else []
        for neighbour in neighbours:
            there.scatter_(1, self.around[self._before[neighbour], : size // 4], True)
        return there

    def curve(self) -> dict[str, Any]:
        """Return the mean p(S) by size; `held_by_neighbours` is the mean number of codes of the union."""
        means = (self.sums / max(self.places, 1)).tolist()
        return {
            "sizes": self.sizes,
            "places": self.places,
            "coverage": {way: [round(value, 5) for value in row] for way, row in zip(WAYS, means, strict=True)},
            "held_by_neighbours": [round(value, 1) for value in (self.held / max(self.places, 1)).tolist()],
        }


def measure(model: Model, prompts: Sequence[str]) -> tuple[FrequencyTable, dict[str, Any]]:
    """Return the table of a model and its coverage on other images; ValueError for a model without a codebook."""
    codebook, config = model.codebook, model.target.config
    if codebook is None:
        raise ValueError(f"model {model.name} has no vqvae/ folder, without which codes have no neighbours")
    counted = sampled_codes(model, prompts, seed=COUNTED)
    table = FrequencyTable.of_codes(counted, config.vocab_size, weights_digest(model.target.state_dict()))
    counts = torch.stack([torch.bincount(codes, minlength=config.vocab_size) for codes in counted])
    coverage = Coverage(
        table, codebook.cpu().float(), sampling=model.sampling(), counts=counts, block_size=config.block_size
    )
    sampled_codes(model, prompts, seed=MEASURED, watch=coverage.add)
    return table, coverage.curve()


def main(argv: Sequence[str] | None = None) -> None:
    """Write the curve, and the table if a folder of parts is given."""
    parser = argparse.ArgumentParser(prog="python -m lantern.training.frequency_table", description=__doc__)
    parser.add_argument("--model", default="lantern-emoji")
    parser.add_argument("--prompts", default=str(ROOT / "assets" / "prompts" / "contact_sheet.txt"))
    parser.add_argument("--limit", type=int, default=32, help="the first so many prompts (32)")
    parser.add_argument("--parts", type=Path, metavar="DIR", help="folder to write the add-on fr-spec to")
    parser.add_argument("--out", type=Path, default=ROOT / "eval" / "results" / "frspec.json", metavar="FILE")
    args = parser.parse_args(argv)
    model = load_model(args.model, parts=("vq", "text"))
    prompts = read_prompts(args.prompts)[: args.limit]
    table, curve = measure(model, prompts)
    if args.parts is not None:
        save_component(table.state_dict(), table.config, args.parts / "fr-spec")
    write_json(args.out, about(model) | {"prompts": prompts, "sampling": dict(model.generation)} | curve)
    for i, size in enumerate(curve["sizes"]):
        print(f"{size:>6}  " + "  ".join(f"{way} {curve['coverage'][way][i]:.3f}" for way in WAYS))


if __name__ == "__main__":
    main()
