"""Add-ons that are tables of tokens which the target samples: FR-Spec's frequencies and SAM's corpus."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from lantern.core.io import save_component, weights_digest
from lantern.core.places import embedded_model
from lantern.decoding.plain import generate
from lantern.drafters.eagle.fr_spec import FrequencyTable
from lantern.drafters.lookup.tables import SamTables
from lantern.eval.speed.contenders import condition_of
from lantern.generation.requests import read_prompts
from lantern.models.folder import Model, load_model


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
        if min(self.limit, self.groups, self.batch) < 1:
            raise ValueError(f"limit {self.limit}, groups {self.groups}, batch {self.batch}: wanted at least 1")


def sampled_tokens(model: Model, prompts: list[str], *, seed: int, batch: int) -> Int[Tensor, "n tokens"]:
    """Sample one image per prompt by plain decoding."""
    from tqdm import tqdm

    found = []
    for numbers in tqdm(torch.arange(len(prompts)).split(batch), desc="images", disable=None):
        condition, keys = condition_of(model, prompts, numbers.tolist()), [(seed, n) for n in numbers.tolist()]
        found.append(generate(model.target, condition, sampling=model.sampling(), keys=keys).tokens.cpu())
    return torch.cat(found)


def make(config: TablesConfig, *, out: Path, prompts: Path, model: Path | None = None, kind: str | None = None) -> None:
    """Sample images of prompts and write the add-on to `out/KIND`, which belongs into the model's folder `parts`.

    `prompts` is a file with one prompt a line, `model` by default the embedded one. ValueError for another `kind` than
    the config's, and for SAM's table of a model without a codebook.
    """
    if kind is not None and kind != config.kind:
        raise ValueError(f"the config makes kind {config.kind}, got --kind {kind}: give a config of that kind")
    loaded = load_model(model or embedded_model(), parts=("vq", "text"))
    if config.kind == "sam" and loaded.codebook is None:
        raise ValueError(f"model {loaded.name} has no vqvae/ folder, without which there are no super-tokens")
    chosen, digest = read_prompts(str(prompts))[: config.limit], weights_digest(loaded.target.state_dict())
    tokens = sampled_tokens(loaded, chosen, seed=config.seed, batch=config.batch)
    if config.kind == "fr-spec":
        table = FrequencyTable.of_tokens(tokens, loaded.target.config.vocab_size, digest)
    else:
        assert loaded.codebook is not None
        table = SamTables.of_tokens(tokens, loaded.codebook.cpu().float(), groups=config.groups, target=digest)
    save_component(table.state_dict(), table.config, out / config.kind)
