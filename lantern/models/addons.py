"""Trained networks of a model beside its target and its own drafter: other drafters and policies, by name.

An add-on lies in the model's folder as parts/<name>/config.json and model.safetensors. It is read at its first use, so
that a model with twenty of them loads as fast as one with none.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import nn

from lantern.core.io import load_component
from lantern.methods.registry import find_add_on
from lantern.models.compatibility import check_weights
from lantern.models.llamagen.transformer import Transformer

FOLDER = "parts"


class AddOns(Mapping[str, nn.Module]):
    """The add-ons of a model's folder, on the device of its target; none if there is no folder.

    An add-on with a buffer `rope` keeps it in fp32, as targets and drafters do. ValueError at the first use of one
    whose config names another target.
    """

    def __init__(self, folder: Path | None, target: Transformer, *, model_name: str, verify: bool = True) -> None:
        self.folder, self.target, self.model_name, self.verify = folder, target, model_name, verify
        self._loaded: dict[str, nn.Module] = {}

    def __iter__(self) -> Iterator[str]:
        found = [] if self.folder is None else sorted((self.folder / FOLDER).glob("*"))
        return (path.name for path in found if find_add_on(path.name) is not None)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        """Whether the folder has an entry of this name in parts/; reading a damaged one raises ValueError."""
        return isinstance(name, str) and self.folder is not None and os.path.lexists(self.folder / FOLDER / name)

    def __getitem__(self, name: str) -> nn.Module:
        """The add-on of this name, read at its first use; KeyError if the model has none."""
        if name not in self:
            raise KeyError(name)
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._placed(self._loaded[name])

    def _load(self, name: str) -> nn.Module:
        kind = find_add_on(name)
        if kind is None or self.folder is None:
            raise KeyError(name)
        folder = self.folder / FOLDER / name
        module: nn.Module = load_component(kind.module, kind.config, folder, verify=self.verify)
        check_weights(module.config, self.target, drafter_name=f"add-on {folder}", model_name=self.model_name)
        return module.requires_grad_(False)

    def _placed(self, module: nn.Module) -> nn.Module:
        """Return the add-on on the device and in the dtype that its target has now."""
        weight = self.target.tok_embeddings.weight
        rope = dict(module.named_buffers(recurse=False)).get("rope")
        module.to(device=weight.device, dtype=weight.dtype)
        if rope is not None:
            module.register_buffer("rope", rope.to(weight.device), persistent=False)
        return module
