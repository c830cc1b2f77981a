"""Engines: who runs the passes of a target and the rounds around them. Importing this module does not import torch."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from lantern.core.config import KV_CACHES, WEIGHTS, KvCache, Weights

if TYPE_CHECKING:
    from lantern.core.sampling import Sampling
    from lantern.core.types import Drafter, Target
    from lantern.decoding.loop import State
    from lantern.decoding.rounds import Rounds

# name -> module:class
ENGINES = {
    "auto": "lantern.engines.engine:AutoEngine",
    "eager": "lantern.engines.engine:EagerEngine",
    "wide": "lantern.engines.engine:WideEngine",
    "graph": "lantern.engines.cuda.engine:GraphEngine",
    "cpu": "lantern.engines.cpu.engine:CpuEngine",
}
# in which a measurement runs methods: engines, also with int8 weights
VARIANTS = ("eager", "cpu", "cpu+int8", "graph", "graph+int8", "eager+int8")
# only where they are asked for: with keys and values in fp8, or int4 weights
OTHER_VARIANTS = ("eager+fp8", "graph+fp8", "eager+int4")
# Most tokens of a pass of the engine `wide`: linears were measured to round in the same way up to it.
MOST_WIDE = 16


@dataclass(frozen=True)
class Engine(ABC):
    """Runs passes and rounds: `why_not`, `prepare`, `drive` and `keeps_bits`. It changes no distribution.

    Only `why_not` must be written. Beside the four, an engine says otherwise than the defaults below if it packs
    drafters and tokenizers too (`prepare_part`), if its rounds are joined by other sizes than those of passes (`group`,
    `fuses_plain`), or if passes of some size are known to cost the same (`free_nodes`). `is_wide`: prompts are read one
    by one, and the cache is in fp64 (`decoding.cache.prefill`). `captures`: a round is captured once and replayed, so
    that the host looks at no values within it, and later generations use the memory of the first. `fits_windows`:
    rounds have so little overhead that the best window follows from the times of passes.

    `weights`: "full" are the target's own; "int8" quantizes the linears of its layers and its head, "int4" those of its
    layers. `kv_cache`: "full" keeps keys and values in the dtype of passes, "fp8" in a byte each: of a large batch they
    are most of what a step reads. The result is another target: exact methods are exact with respect to it. `reason` is
    why `auto` chose this engine; empty if it was given.
    """

    weights: Weights = "full"
    kv_cache: KvCache = "full"
    reason: str = field(default="", compare=False)
    name: ClassVar[str]
    is_wide: ClassVar[bool] = False
    captures: ClassVar[bool] = False
    fits_windows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights is {self.weights!r}, expected one of {', '.join(WEIGHTS)}")
        if self.kv_cache not in KV_CACHES:
            raise ValueError(f"kv_cache is {self.kv_cache!r}, expected one of {', '.join(KV_CACHES)}")

    @property
    def is_fp8(self) -> bool:
        """Whether keys and values are in fp8."""
        return self.kv_cache == "fp8"

    def resolve(self, target: "Target") -> "Engine":
        """Return the engine that runs this target: itself, unless it is `auto`, or was chosen by it before a change."""
        why_not = self.why_not(target, can_wait=False) if self.reason else None
        return self if why_not is None else self.as_eager(why_not)

    @abstractmethod
    def why_not(self, target: "Target", drafter: "Drafter | None" = None, *, can_wait: bool = True) -> str | None:
        """Return why this engine cannot run a target, or decode it with a drafter, or None if it can.

        With `can_wait` False a wait of more than two seconds (a build) is a reason.
        """

    def prepare(self, target: "Target") -> "Target":
        """Return an object with the target's protocol whose passes this engine runs.

        The target is not changed. What is made from its weights is cached, and made again when they have changed.
        ValueError gives the reason why the engine cannot run it.
        """
        from lantern.core.weights import original, quantized

        target = original(target)
        if (reason := self.why_not(target)) is not None:
            raise ValueError(reason)
        return self._prepare(target if self.weights == "full" else quantized(target, self.weights))  # type: ignore[arg-type]

    def _prepare(self, target: Any) -> "Target":
        """Return the prepared target, given one that the engine can run."""
        return target

    def prepare_part(self, module: Any) -> Any:
        """Return a drafter's module or a tokenizer as this engine runs it; others as they are."""
        return module

    def drive(self, states: "Sequence[State]", earlier: "Rounds | None" = None) -> "Rounds":
        """Return what takes the rounds of generations of one `group`; `earlier` took those of some of them."""
        from lantern.decoding.rounds import TorchRounds

        return TorchRounds(states, earlier)

    def keeps_bits(self, target: "Target", nodes: int, lines: int) -> bool:
        """Return whether the bits of a token's logits are the same in a pass over `nodes` nodes as alone.

        Exact methods then give plain decoding's tokens. `target` is prepared; `lines` are the guidance rows of all
        images. Otherwise tokens may differ where two are equal within rounding.
        """
        return False

    def group(self, state: "State") -> Hashable:
        """Return what generations have in common whose rounds `drive` takes together."""
        return state.group

    def fuses_plain(self, sampling: "Sampling") -> bool:
        """Return whether plain decoding of several generations can be joined as it is."""
        return False

    def free_nodes(self, lines: int) -> int | None:
        """Return how many nodes per line a pass scores at no cost; None: not known, measure it."""
        return None

    def narrows(self, config: Any, *, can_wait: bool = True) -> bool:
        """Return whether `--dtype auto` is bf16 on a CPU for LlamaGen's target of a config."""
        return False

    def as_dict(self) -> dict[str, Any]:
        """Return name and settings for reports, which `engine(**settings)` takes."""
        return {"name": self.name} | asdict(self)

    def as_eager(self, reason: str) -> "EagerEngine":
        """Return the engine that runs every target, with the same weights and KV cache."""
        return EagerEngine(self.weights, self.kv_cache, reason)


def engine(name: "str | Engine", **settings: Any) -> Engine:
    """Return the engine of a name, with settings; an Engine is returned as it is. ValueError for an unknown name."""
    if isinstance(name, Engine):
        return name
    if name not in ENGINES:
        raise ValueError(f"engine is {str(name)[:40]!r}, expected one of {', '.join(ENGINES)}")
    module, kind = ENGINES[name].split(":")
    return getattr(import_module(module), kind)(**settings)


@dataclass(frozen=True)
class EagerEngine(Engine):
    """Passes as torch runs them."""

    name: ClassVar[str] = "eager"

    def why_not(self, target: "Target", drafter: "Drafter | None" = None, *, can_wait: bool = True) -> str | None:
        """Return a reason for layers that have no quantized form."""
        return refuses_weights(target, self.weights)


@dataclass(frozen=True)
class WideEngine(Engine):
    """Passes as torch runs them on a CPU, with keys and values in fp64, so that they do not round by their size.

    The bits of a token's logits do not depend on the number of tokens scored with it, in fp32 and bf16, at most
    MOST_WIDE. It is for LlamaGen's layers.
    """

    name: ClassVar[str] = "wide"
    is_wide: ClassVar[bool] = True

    def why_not(self, target: "Target", drafter: "Drafter | None" = None, *, can_wait: bool = True) -> str | None:
        """Return a reason for other layers, devices, and larger trees."""
        if target.config.family != "llamagen":
            return "the wide engine runs LlamaGen's layers, not this model's: use --engine eager"
        if target.tok_embeddings.weight.device.type != "cpu":
            return "the wide engine runs on CPUs only: use --engine eager, or move the model"
        if self.is_fp8:
            return "the wide engine keeps keys and values in fp64, a KV cache in fp8 was given: use --engine eager"
        if drafter is not None and drafter.max_nodes > MOST_WIDE:
            return (
                f"the drafter scores {drafter.max_nodes} tokens in a pass, the wide engine at most {MOST_WIDE}: "
                "choose a smaller tree or window, or another engine"
            )
        return None

    def keeps_bits(self, target: "Target", nodes: int, lines: int) -> bool:
        """Return whether a pass has at most MOST_WIDE nodes."""
        return nodes <= MOST_WIDE


EAGER = EagerEngine()


def refuses_weights(target: "Target", weights: Weights) -> str | None:
    """Return why a target has no such weights, or None if it has."""
    if weights != "full" and target.config.family != "llamagen":
        return "quantized weights are for LlamaGen's layers, this model has others: omit them"
    return None


@dataclass(frozen=True)
class AutoEngine(Engine):
    """The engine that suits a target: `graph` on CUDA, `cpu` on a CPU if its library is built, else `eager`.

    `graph` is taken only if its passes agreed with torch's on the target's device (`engines.cuda.trial`), `cpu` without
    AMX in bf16, so that a seed gives the same tokens on all processors.
    """

    name: ClassVar[str] = "auto"

    def why_not(self, target: "Target", drafter: "Drafter | None" = None, *, can_wait: bool = True) -> str | None:
        """Return None: some engine runs it."""
        return None

    def resolve(self, target: "Target") -> Engine:
        """Return the chosen engine, with the reason of the choice."""
        device = target.tok_embeddings.weight.device.type
        if device not in PREFERRED:
            return self.as_eager(f"no other engine runs on {device}")
        name, reason, settings = PREFERRED[device]
        found = engine(name, weights=self.weights, kv_cache=self.kv_cache, reason=reason, **settings)
        why_not = found.why_not(target, can_wait=False)
        if why_not is None and device == "cuda":
            from lantern.engines.cuda.trial import trial_of

            trial = trial_of(found.prepare(target), is_fp8=self.is_fp8)
            why_not, found = trial.fault, replace(found, reason=f"{reason}; {trial.found}")
        return found if why_not is None else self.as_eager(f"{name} is not available: {why_not}")

    def prepare(self, target: "Target") -> "Target":
        """Prepare by the engine that suits the target."""
        return self.resolve(target).prepare(target)

    def narrows(self, config: Any, *, can_wait: bool = False) -> bool:
        """Return whether the C++ engine runs such a target without waiting."""
        return engine("cpu", weights=self.weights, kv_cache=self.kv_cache).narrows(config, can_wait=can_wait)


# device -> engine, the reason to choose it, and its settings
PREFERRED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "cuda": ("graph", "one CUDA graph per step is the fastest on a GPU", {}),
    "cpu": ("cpu", "the C++ library is built and runs this model", {"amx": False}),
}
