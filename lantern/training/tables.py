"""Add-ons that are tables of tokens which the target samples: FR-Spec's frequencies and SAM's corpus."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from lantern.core.config import check_least, embedded_model
from lantern.core.io import save_component, weights_digest
from lantern.drafters.eagle.drafter import FrequencyTable
from lantern.drafters.lookup import SamTables
from lantern.generation.generator import generate
from lantern.generation.requests import Request, read_prompts
from lantern.models.folder import load_model


@dataclass(frozen=True)
class TablesConfig:
    """Settings of a table: the first `limit` prompts are sampled once each. `groups` are SAM's super-tokens.

    ValueError for values out of range.
    """

    kind: Literal["fr-spec", "sam"] = "fr-spec"
    limit: int = 32
    groups: int = 64
    batch: int = 16
    seed: int = 1000

    def __post_init__(self) -> None:
        check_least(self, limit=1, groups=1, batch=1)


def make(config: TablesConfig, *, out: Path, prompts: Path, model: Path | None = None) -> None:
    """Sample images of prompts and write the add-on to `out/KIND`, which belongs into the model's folder `parts`.

    `prompts` is a file with one prompt a line, `model` by default the embedded one. ValueError for SAM's table of a
    model without a codebook.
    """
    loaded = load_model(model or embedded_model(), parts=("vq", "text"))
    if config.kind == "sam" and loaded.codebook is None:
        raise ValueError(f"model {loaded.name} has no vqvae/ folder, without which there are no super-tokens")
    chosen, digest = read_prompts(str(prompts))[: config.limit], weights_digest(loaded.target.state_dict())
    requested = [Request(prompt=prompt, seed=config.seed, number=number) for number, prompt in enumerate(chosen)]
    made = generate(loaded, requested, method="plain", batch=config.batch, with_pixels=False)
    tokens = torch.stack([picture.tokens for picture in tqdm(made, "images", len(chosen), disable=None)])
    if config.kind == "fr-spec":
        table = FrequencyTable.of_tokens(tokens, loaded.target.config.vocab_size, digest)
    else:
        assert loaded.codebook is not None
        table = SamTables.of_tokens(tokens, loaded.codebook.cpu().float(), groups=config.groups, target=digest)
    save_component(table.state_dict(), table.config, out / config.kind)
