"""Trained parts of random weights for a tiny target, one for each add-on that a method declares."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lantern.drafters.eagle.drafter import FrequencyTable
from lantern.drafters.lookup import SamTables
from lantern.methods.method import ADD_ONS
from lantern.models.llamagen.transformer import Transformer

DEPTHS = 12  # as deep as the deepest tree of the tests


def randomised(module: nn.Module) -> nn.Module:
    """Return the module with weights whose distributions are neither flat nor peaked."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        scale = 0.7 / parameter.shape[1] ** 0.5 if parameter.ndim == 2 else 0.3
        parameter.data.normal_(0.0, scale, generator=generator)
    return module.eval()


def tiny_part(name: str, target: Transformer, **changes: Any) -> Any:
    """Return the add-on of a name for a target, at the toy size that it declares."""
    if name in MAKERS:
        return MAKERS[name](target)
    add_on = ADD_ONS.get(name)
    assert add_on is not None, f"no method declares the add-on {name}"
    fields = {**add_on.toy, **changes}
    make = getattr(add_on.config, "for_target", None)
    config = add_on.config(**fields) if make is None else make(target.config, **fields)
    return randomised(add_on.module(config))


def tiny_tokens(target: Transformer, pictures: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    size = (pictures, target.config.block_size)
    return torch.randint(0, target.config.vocab_size, size, generator=generator)


def tiny_sam(target: Transformer) -> SamTables:
    """Return super-tokens of a random codebook, and a corpus of three images."""
    tokens = target.config.vocab_size
    codebook = torch.randn(tokens, 4, generator=torch.Generator().manual_seed(2))
    return SamTables.of_tokens(tiny_tokens(target), codebook, groups=max(tokens // 4, 1))


def tiny_table(target: Transformer) -> FrequencyTable:
    return FrequencyTable.of_tokens(tiny_tokens(target), target.config.vocab_size)


def tiny_small(target: Transformer) -> Transformer:
    """Return a model of one layer, otherwise the target's size and with its own weights there."""
    small = Transformer(dataclasses.replace(target.config, n_layer=1))
    small.load_state_dict({n: w.cpu() for n, w in target.state_dict().items()}, strict=False)
    return small.eval()


# add-ons that are made of tokens or of the target instead of random weights
MAKERS: dict[str, Callable[[Transformer], nn.Module]] = {"sam": tiny_sam, "fr-spec": tiny_table, "small": tiny_small}


def tiny_parts(target: Transformer) -> Mapping[str, nn.Module]:
    return {name: tiny_part(name, target) for name in ADD_ONS if name != "eagle1"}
