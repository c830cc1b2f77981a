"""The engine protocol, and the engines `eager` and `auto`.

An engine runs the passes of a target and the steps around them. Importing this module does not import torch.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, get_args

if TYPE_CHECKING:
    from torch import nn

    from lantern.core.sampling import Sampling
    from lantern.core.types import Drafter, Generation, Step, Target, Verifier
    from lantern.decoding.joint import RowStepper
    from lantern.decoding.loop import Programs


Weights = Literal["full", "int8", "int4"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
# name -> module:class
ENGINES = {
    "auto": "lantern.engines.engine:AutoEngine",
    "eager": "lantern.engines.engine:EagerEngine",
    "compile": "lantern.engines.compiled:CompiledEngine",
    "graph": "lantern.engines.cuda.engine:GraphEngine",
    "cpu": "lantern.engines.cpu.engine:CpuEngine",
}
# How measurements name engines: an engine, whether drafting and verification are compiled too, and its weights.
VARIANTS = (
    *("eager", "compile", "cpu", "cpu+compile", "cpu+int8", "cpu+compile+int8"),
    *("graph", "graph+compile", "graph+int8", "eager+int8", "compile+int8"),
)
# Most codes per pass of reproducible decoding: linears were measured to round in the same way up to it.
MAX_REPRODUCIBLE = 16
OTHER_LAYERS = "quantized weights and reproducible passes are for LlamaGen's layers, this model has others: omit them"
Module = TypeVar("Module", bound="nn.Module")


@dataclass(frozen=True)
class FusedDecoder:
    """A decoder whose whole steps an engine runs itself.

    `generate` is called as `decoding.plain.generate` is, without target and sampling. `begin` takes the same, and
    returns a generation whose steps `decoding.joint` takes, with the step of code 0.
    """

    generate: "Callable[..., Generation]"
    begin: "Callable[..., tuple[RowStepper, Step]]"


@dataclass(frozen=True)
class Engine(ABC):
    """How passes are run. Only `weights` changes the distribution of the codes.

    `weights`: "full" are the target's own; "int8" quantizes the linears of its layers and its head, "int4" those of its
    layers. The result is another target: exact methods are exact with respect to it.
    `reproducible`: the bits of a code's logits do not depend on the number of codes scored with it, in fp32 and bf16,
    so exact drafted methods give the codes of plain decoding. On CPUs only, at most MAX_REPRODUCIBLE codes per pass.
    `compiles_steps`: drafting and verification are compiled by torch.compile too.
    `reason` is why `auto` chose this engine; empty if it was given. ValueError for an unknown kind of weights.
    """

    weights: Weights = "full"
    reproducible: bool = False
    compiles_steps: bool = False
    reason: str = field(default="", compare=False)
    name: ClassVar[str]
    has_free_rows: ClassVar[bool] = False  # whether the number of rows may change between passes at no cost

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights is {self.weights!r}, expected one of {', '.join(WEIGHTS)}")

    def resolve(self, target: "Target") -> "Engine":
        """Return the engine that runs this target: itself, unless it is `auto`."""
        return self

    def available(self, target: "Target", *, can_wait: bool = True) -> str | None:
        """Return why this engine cannot run a target, or None if it can.

        With `can_wait` False a wait of more than two seconds (a build) is a reason.
        """
        if target.config.family != "llamagen":
            if (reason := self.refuses_layers(target)) is not None:
                return reason
            if target.config.processes > 1 and self.name != "eager":
                return f"the {self.name} engine runs models in one process, this one is shared: use --engine eager"
            if self.weights != "full" or self.rounds_wide:
                return OTHER_LAYERS
        if self.rounds_wide and target.tok_embeddings.weight.device.type == "cuda":
            return "reproducible decoding is supported on CPUs only: omit reproducible, or use fp32"
        return None

    def refuses_layers(self, target: "Target") -> str | None:
        """Return why this engine cannot run a target whose layers are not LlamaGen's, or None if it can."""
        return f"the {self.name} engine runs LlamaGen's layers, not this model's: use --engine eager"

    def remark(self, target: "Target") -> str | None:
        """Return what this engine does not do for a target that it can run, or None."""
        return None

    def prepare(self, target: "Target") -> "Target":
        """Return an object with the target's protocol whose passes this engine runs. The target is not changed.

        What is made from the weights is cached per target and made again when they have changed. ValueError gives the
        reason why the engine cannot run the target.
        """
        from lantern.engines.prepared import original

        target = self.quantized(original(target))  # type: ignore[assignment]
        reason = self.available(target)
        if reason is not None:
            raise ValueError(reason)
        return self._prepare(target)

    def quantized(self, target: "nn.Module") -> "nn.Module":
        """Return the target with the engine's kind of weights. ValueError for layers that have no such form."""
        if self.weights == "full":
            return target
        config: Any = target.config
        if config.family != "llamagen":
            raise ValueError(OTHER_LAYERS)
        from lantern.engines.prepared import quantized

        return quantized(target, self.weights)

    @abstractmethod
    def _prepare(self, target: Any) -> "Target":
        """Return the prepared target, given one with the right weights that the engine can run."""

    def prepare_drafter(self, module: Module) -> Module:
        """Return a drafter's module as this engine runs it: by default, as it is."""
        return module

    def prepare_vq(self, vq: Module) -> Module:
        """Return a VQ tokenizer whose decoder this engine runs: by default, the given one."""
        return vq

    def refuses(self, drafter: "Drafter") -> str | None:
        """Return why this engine cannot decode with a drafter, or None if it can."""
        if self.rounds_wide and drafter.max_nodes > MAX_REPRODUCIBLE:
            return (
                f"the drafter scores {drafter.max_nodes} codes in a pass, reproducible decoding at most "
                f"{MAX_REPRODUCIBLE}: choose a smaller tree or window, or omit reproducible"
            )
        return None

    def keeps_codes(self, target: "Target", *, nodes: int, lines: int) -> bool:
        """Return whether exact methods give plain decoding's codes, which must be true of every code.

        True if the bits of a code's logits are the same in a pass over `nodes` nodes as alone. `target` is prepared;
        `lines` are the guidance rows of all images. Otherwise codes may differ where two are equal within rounding.
        """
        return self.rounds_wide and target.tok_embeddings.weight.device.type == "cpu" and nodes <= MAX_REPRODUCIBLE

    def needs_waves(self, target: "Target") -> str | None:
        """Return why an image cannot join a batch that is under way, or None if it can."""
        if not self.has_free_rows or self.compiles_steps:
            return f"the {self.name} engine prepares steps for a fixed number of images"
        if target.tok_embeddings.weight.device.type != "cpu":
            return "on a GPU one step of a whole batch has less overhead than a step of each image"
        return None

    def most_nodes(self, lines: int) -> int | None:
        """Return how many nodes per line a pass scores at no cost; None: not known, measure it.

        `lines` are the guidance rows of all images of a batch.
        """
        return None

    def programs(self) -> "Programs":
        """Return how the parts of a step are run."""
        from lantern.decoding.loop import Programs

        if not self.compiles_steps:
            return Programs()
        from lantern.engines.compiled_steps import compiled_programs

        return compiled_programs()

    def fused_decoder(
        self, target: "Target", sampling: "Sampling", drafter: "Drafter | None", verifier: "Verifier | None"
    ) -> "FusedDecoder | None":
        """Return a decoder whose whole steps this engine runs itself, or None if it has none for these parts.

        `target` is prepared.
        """
        return None

    @property
    def rounds_wide(self) -> bool:
        """Whether decoding must round reproducibly by itself: with an fp64 cache, and prompts read one by one."""
        return self.reproducible

    def window(self, target: "Target", codes_per_pass: Mapping[int, float] | None = None) -> int | None:
        """Return the fastest Jacobi window of sample match for a target; None: the method's own.

        `codes_per_pass` are those of the model by window, if they are known.
        """
        return None

    def layer_by_layer(self) -> "Engine":
        """Return an eager engine with the same promises, in which every layer can be observed."""
        return engine("eager", weights=self.weights, reproducible=self.rounds_wide)

    def changed(self, **changes: Any) -> Self:
        """Return the engine with some of its settings changed."""
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return name and settings for reports."""
        return {"name": self.name} | dataclasses.asdict(self)


def engine(choice: "str | Engine", **settings: Any) -> Engine:
    """Return the engine of a name, with settings; an Engine is returned as it is. ValueError for an unknown name."""
    if isinstance(choice, Engine):
        return choice
    if choice not in ENGINES:
        raise ValueError(f"engine is {str(choice)[:40]!r}, expected one of {', '.join(ENGINES)}")
    module, name = ENGINES[choice].split(":")
    return getattr(import_module(module), name)(**settings)


def engine_of_variant(variant: str, *, reproducible: bool = False) -> Engine:
    """Return the engine of a name in VARIANTS."""
    name, *rest = variant.split("+")
    compiles = name == "compile" or "compile" in rest
    weights = "int8" if "int8" in rest else "full"
    return engine(name, weights=weights, reproducible=reproducible, compiles_steps=compiles)


def engine_from_dict(values: Mapping[str, Any]) -> Engine:
    """Return the engine that `Engine.as_dict` described; ValueError for an unknown name."""
    return engine(values.get("name", ""), **{name: value for name, value in values.items() if name != "name"})


@dataclass(frozen=True)
class EagerEngine(Engine):
    """Passes as torch runs them."""

    name: ClassVar[str] = "eager"
    has_free_rows: ClassVar[bool] = True

    def refuses_layers(self, target: "Target") -> str | None:
        """Return None: torch runs all layers."""
        return None

    def _prepare(self, target: Any) -> "Target":
        return target


EAGER = EagerEngine()


@dataclass(frozen=True)
class AutoEngine(Engine):
    """The engine that suits a target: `graph` on CUDA, `cpu` on a CPU if its library is built, else `eager`.

    `graph` is taken only if its passes agreed with torch's on the target's device (`engines.cuda.trial`).
    """

    name: ClassVar[str] = "auto"

    def resolve(self, target: "Target") -> Engine:
        """Return the chosen engine, with the reason of the choice."""
        settings = {name: getattr(self, name) for name in ("weights", "reproducible", "compiles_steps")}
        device = target.tok_embeddings.weight.device.type
        for name, reason in PREFERRED.get(device, ()):
            found = engine(name, **settings, reason=reason)
            why_not = found.available(target, can_wait=False)
            if why_not is None and device == "cuda":
                from lantern.engines.cuda.trial import trial_of

                trial = trial_of(found.changed(compiles_steps=False).prepare(target))
                why_not, found = trial.fault, found.changed(reason=f"{reason}; {trial.found}")
            if why_not is None:
                return found
            return engine("eager", **settings, reason=f"{name} is not available: {why_not}")
        return engine("eager", **settings, reason=f"no other engine runs on {device}")

    def _prepare(self, target: Any) -> "Target":
        return self.resolve(target).prepare(target)


# device -> engine and the reason to choose it
PREFERRED: dict[str, tuple[tuple[str, str], ...]] = {
    "cuda": (("graph", "one CUDA graph per step is the fastest on a GPU"),),
    "cpu": (("cpu", "the C++ library is built and runs this model"),),
}
