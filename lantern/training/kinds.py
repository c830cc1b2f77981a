"""Drafters and policies that can be trained. A kind is the name of an add-on that a method declares."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lantern.core.config import build_config, hint_for
from lantern.core.io import CONFIG_NAME, load_component, read_config, weights_digest
from lantern.drafters.examples import Trainee
from lantern.methods.parts import ADD_ONS, AddOn
from lantern.models.llamagen.checkpoint import read_checkpoint


def kinds(stage: str = "drafter") -> dict[str, AddOn]:
    """Return the add-ons that a stage of `lantern train` trains, "drafter" or "policy", by name."""
    return {name: entry for name, entry in ADD_ONS.items() if entry.training == stage}


def find_kind(name: str, stage: str = "drafter") -> AddOn:
    """Return the add-on of a kind; ValueError gives the nearest name."""
    known = kinds(stage)
    if name not in known:
        raise ValueError(f"{stage} kind is {name[:40]!r}; {hint_for(name, known)}")
    return known[name]


def digest_of(target: Any) -> str | None:
    """Return the digest of a target's weights; None for one of transformers, whose weights are read in any dtype."""
    return weights_digest(target.state_dict()) if target.config.family == "llamagen" else None


def new_module(kind: str, target: Any, fields: dict[str, Any], *, seed: int) -> Trainee:
    """Return a new module for a target; `fields` change its config."""
    entry = find_kind(kind)
    module: Trainee = entry.module(entry.config.for_target(target.config, target=digest_of(target), **fields))
    module.init_for(target, torch.Generator().manual_seed(seed))
    return module


def load_kind(kind: str, folder: Path, target: Any) -> Trainee:
    """Load a trained module to continue from and record this target in its config; LANTERN's folders load too.

    ValueError for a module of another kind or for another target.
    """
    entry = find_kind(kind)
    build, config = entry.module, entry.config
    raw = read_config(folder)
    if "hidden_size" in raw:  # in the layout of LANTERN
        checkpoint = read_checkpoint(folder, kind="drafter")
        module = build(build_config(config, checkpoint.config, source=folder / CONFIG_NAME))
        module.load_state_dict(checkpoint.state)
    else:
        if raw.get("kind", kind) != kind:
            raise ValueError(f"{folder} holds a drafter of kind {raw['kind']}, wanted {kind}: give its own --kind")
        module = load_component(build, config, folder)
    for name in ("dim", "vocab_size", "block_size"):
        got, expected = getattr(module.config, name), getattr(target.config, name)
        if got != expected:
            raise ValueError(f"{folder}: {name} is {got}, the target has {expected}: it was made for another one")
    module.config = replace(module.config, target=digest_of(target))
    return module.train()
