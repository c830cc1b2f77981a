"""How one target can be run: eager or compiled, in full or with int8 weights, in several dtypes."""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import torch

from lantern.catalog import Engine
from lantern.decoding.compiled import compile_target
from lantern.decoding.quantized import quantized
from lantern.kernels.fused import fuse_target
from lantern.model_folder import DTYPES, Model, place_module
from lantern.models.llamagen.transformer import Transformer
from lantern.trained import TrainedParts

PLAIN_KINDS = (
    *("eager", "compile", "fused", "fused+compile", "fused+int8", "fused+int8+compile"),
    *("graph", "graph+compile", "int8", "int8+compile"),
)
# eager int8 kernels are for passes over one code: they cost as many times more as there are rows
METHOD_KINDS = tuple(kind for kind in PLAIN_KINDS if kind != "int8")


def kinds_of(device: torch.device) -> tuple[str, ...]:
    """All kinds that make sense on a device."""
    absent = "fused" if device.type == "cuda" else "graph"
    return tuple(k for k in dict.fromkeys((*PLAIN_KINDS, *METHOD_KINDS)) if absent not in k)


@dataclass(frozen=True)
class Variant:
    """A kind of `PLAIN_KINDS` or `METHOD_KINDS` in a dtype of `lantern.model_folder.DTYPES`."""

    kind: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype}"

    @property
    def is_compiled(self) -> bool:
        """Whether passes and programs are compiled."""
        return "compile" in self.kind

    @property
    def is_graphed(self) -> bool:
        """Whether steps are replays of a CUDA graph, into which nobody sees."""
        return "graph" in self.kind

    def engine(self, *, reproducible: bool = False) -> Engine:
        """How steps are run."""
        is_fused, has_int8 = "fused" in self.kind, "int8" in self.kind
        how = {"compile": self.is_compiled, "graphs": self.is_graphed, "fused": is_fused, "int8": has_int8}
        return Engine(**how, reproducible=reproducible)


def compiled(target: Transformer) -> Transformer:
    """A copy of the target whose passes are compiled."""
    twin = copy.deepcopy(target)
    compile_target(twin)
    return twin


def fused(target: Transformer) -> Transformer:
    """A copy of the target whose passes are fused."""
    twin = copy.deepcopy(target)
    fuse_target(twin)
    return twin


def prepared(target: Transformer, variant: Variant) -> Transformer:
    """A copy of the target that runs in a variant; where weights are full and passes eager the target itself."""
    engine = variant.engine()
    if engine.int8:
        target = cast(Transformer, quantized(target, 8))
    if engine.fused:
        return fused(target)
    return compiled(target) if engine.compile else target


class Stable:
    """A model in all variants that were asked for; each is made once."""

    def __init__(self, model: Model, *, reproducible: bool = False) -> None:
        self._made: dict[Variant, Model] = {}
        self._model = dataclasses.replace(model, engine=Engine(reproducible=reproducible))

    def model(self, variant: Variant) -> Model:
        """The model as it runs in a variant; its parts other than target and drafter are shared."""
        if variant not in self._made:
            self._made[variant] = self._make(variant)
        return self._made[variant]

    def _make(self, variant: Variant) -> Model:
        if variant.kind != "eager":
            base = self.model(dataclasses.replace(variant, kind="eager"))
            engine = variant.engine(reproducible=self._model.engine.reproducible)
            return dataclasses.replace(base, target=prepared(base.target, variant), engine=engine)
        dtype = DTYPES[variant.dtype]
        if dtype == self._model.dtype:
            return self._model
        modules: dict[str, Any] = {"target": copy.deepcopy(self._model.target)}
        if self._model.drafter is not None:
            modules["drafter"] = copy.deepcopy(self._model.drafter)
        for module in modules.values():
            place_module(module, self._model.device, dtype)
        if isinstance(self._model.trained, TrainedParts):
            folder, name = self._model.trained.folder, self._model.name
            modules["trained"] = TrainedParts(folder, modules["target"], model_name=name)
        return dataclasses.replace(self._model, **modules)
