"""The contenders of a measurement: methods as written on the command line, each in its engine variants."""

import copy
import dataclasses
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.config import one_line
from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Generation
from lantern.decoding.cache import CacheKind, prefill, read_tokens
from lantern.engines.engine import EAGER, OTHER_VARIANTS, VARIANTS, AutoEngine, Engine, Weights
from lantern.engines.engine import engine as make_engine
from lantern.generation.choice import choose_method
from lantern.generation.generator import Decoder, Generator
from lantern.methods import METHODS
from lantern.models.folder import DTYPES, AddOns, Model

PLAIN, AUTO = "plain", "auto"


def kinds_of(device: torch.device) -> tuple[str, ...]:
    """Return the kinds of VARIANTS that run on a device."""
    return tuple(kind for kind in VARIANTS if ("cpu" if device.type == "cuda" else "graph") not in kind)


@dataclass(frozen=True)
class Variant:
    """A kind of engine, of VARIANTS or OTHER_VARIANTS, in a dtype of `lantern.models.folder.DTYPES`."""

    kind: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype}"

    @property
    def is_fp32(self) -> bool:
        """Whether numbers are in fp32, keys and values too: rounding then changes no token."""
        return self.dtype == "fp32" and not self.kind.endswith("fp8")

    @classmethod
    def of(cls, engine: Engine, dtype: str) -> "Variant":
        """Return the variant of an engine; ValueError for 4-bit weights."""
        if engine.weights == "int4":
            raise ValueError("methods are not measured with 4-bit weights: give another engine")
        return cls(engine.name + ("+int8" if engine.weights == "int8" else "+fp8" if engine.is_fp8 else ""), dtype)

    def resolved(self, stable: "Stable") -> "Variant":
        """Return the variant with the engine that "auto" stands for on this machine."""
        if not self.kind.startswith(AUTO):
            return self
        weights: Weights = "int8" if "int8" in self.kind else "full"
        target = stable.model(dataclasses.replace(self, kind="eager")).target
        return self.of(AutoEngine(weights=weights).resolve(target), self.dtype)

    def engine(self) -> Engine:
        """The engine of this variant."""
        name, _, rounded = self.kind.partition("+")
        setting = "kv_cache" if rounded == "fp8" else "weights"
        return make_engine(name, **({setting: rounded} if rounded else {}))


class Stable:
    """A model in several variants. Each variant is built on first use."""

    def __init__(self, model: Model) -> None:
        self._made: dict[Variant, Model] = {}
        self._model, self.device = dataclasses.replace(model, engine=EAGER), model.device

    def model(self, variant: Variant) -> Model:
        """Return the model in a variant. Components other than target and drafter are shared."""
        if variant not in self._made:
            self._made[variant] = self._copy(DTYPES[variant.dtype]) if variant.kind == "eager" else self._in(variant)
        return self._made[variant]

    def _in(self, variant: Variant) -> Model:
        base, engine = self.model(dataclasses.replace(variant, kind="eager")), variant.engine()
        with warnings.catch_warnings(action="ignore"):  # compilers and quantisers warn of parts of torch
            engine.prepare(base.target)  # cached per target; raises here if this machine cannot run the variant
        return dataclasses.replace(base, engine=engine)

    def _copy(self, dtype: torch.dtype) -> Model:
        """Return the model with networks in a dtype."""
        model = self._model
        if dtype == model.dtype:
            return model

        def copied(module: Any) -> Any:
            return copy.deepcopy(module).to(device=self.device, dtype=dtype)

        target, add_ons = copied(model.target), model.add_ons
        if isinstance(add_ons, AddOns):
            add_ons = dataclasses.replace(add_ons, target=target, loaded={})
        else:
            add_ons = {name: copied(module) for name, module in add_ons.items()}
        return dataclasses.replace(model, target=target, add_ons=add_ons)


def name_of(label: str, variant: Variant) -> str:
    """Return the name of a contender in records."""
    return f"{label} | {variant}"


@dataclass(frozen=True)
class Contender:
    """A method in a variant, ready to decode. `label` is the method as written on the command line."""

    label: str
    variant: Variant
    parts: Decoder

    @property
    def name(self) -> str:
        """Its name in records."""
        return name_of(self.label, self.variant)

    @property
    def key(self) -> tuple[str, float]:
        """Its name and its temperature, which only one contender of a race has."""
        return self.name, self.parts.sampling.temperature

    @property
    def described(self) -> dict[str, str]:
        """Method, with the settings that differ from its defaults, engine and dtype, for JSON."""
        spec, variant = self.parts.method.spec, self.variant
        return {"method": self.label, "spec": spec, "variant": variant.kind, "dtype": variant.dtype}

    @property
    def device(self) -> torch.device:
        """The device that it decodes on."""
        return self.parts.target.tok_embeddings.weight.device

    @property
    def is_plain(self) -> bool:
        """Whether it is plain decoding, and thus a possible baseline."""
        return self.parts.method.is_plain

    def decode(self, job: "RoundImages", **watching: Any) -> Generation:
        """Decode the images of a job, prefill included; `watching` is passed to `Decoder.generate`."""
        return self.parts.generate(job.condition, keys=job.keys, prompts=None, **watching)

    def log_probs(self, job: "RoundImages", tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b m v"]:
        """Return the target's fp64 log-probabilities of each token but the first of the images of a job."""
        parts, target, engine = self.parts, self.parts.target, self.parts.engine
        kind = CacheKind(engine.is_wide, engine.is_fp8)
        _, cache = prefill(target, job.condition.to(self.device), parts.sampling.rows, stage=0, kind=kind)
        logits = target.head(read_tokens(target, cache, tokens[:, :-1])[0].features)
        places = torch.arange(1, tokens.shape[1], device=self.device).expand(len(tokens), -1)
        return parts.sampling.log_probs(logits.float(), places).double()


@dataclass(frozen=True)
class RoundImages:
    """The images of one round: their condition and their noise keys (seed, number)."""

    condition: Condition
    keys: list[tuple[int, int]]


Build = Callable[[str, Model], Decoder]  # of a label and a model in its variant


def built(sampling: Sampling, batch: int = 1) -> Build:
    """Return the function that builds the method of a spec for `entered`."""

    def build(spec: str, model: Model) -> Decoder:
        method = METHODS[PLAIN] if spec == PLAIN else choose_method(model, spec, sampling=sampling, batch=batch)
        return Generator(model, method, sampling).parts

    return build


def entries_of(labels: Sequence[str], kinds: Collection[str], dtypes: Sequence[str]) -> list[tuple[str, Variant]]:
    """Return methods in these kinds, in the order of VARIANTS, for each dtype; of "eager+int8" only plain decoding.

    Its kernels compute one row at a time: their cost grows with the number of nodes. So do those of int4.
    """
    variants = [Variant(kind, dtype) for dtype in dtypes for kind in (*VARIANTS, *OTHER_VARIANTS) if kind in kinds]
    return [(label, one) for label in labels for one in variants if label == PLAIN or "eager+int" not in one.kind]


def entered(
    stable: Stable, label: str, variant: Variant, build: Build, run: Callable[[Contender], object]
) -> Contender:
    """Build a contender and run it once, which triggers compilation; the errors are those of either."""
    with warnings.catch_warnings(action="ignore"), redirect_stderr(StringIO()):  # compilers report their attempts
        contender = Contender(label, variant, build(label, stable.model(variant)))
        run(contender)
    return contender


def line_up(
    stable: Stable,
    entries: Sequence[tuple[str, Variant]],
    build: Build,
    run: Callable[[Contender], object],
    failed: list[dict[str, str]],
    *,
    report: Callable[[str], object] = lambda text: None,
) -> list[Contender]:
    """Build the contenders and run each once; return those that this machine can run, and add the others to `failed`.

    An error of an eager contender is raised: it is not the machine's. RuntimeError if all plain decoding fails.
    """
    found = list[Contender]()
    for number, (label, variant) in enumerate(entries):
        report(f"warming up {number + 1} of {len(entries)}: {label} as {variant}")
        try:
            found.append(entered(stable, label, variant, build, run))
        except Exception as error:  # compilers and quantisers raise errors of any kind, some only when called
            if variant.kind == "eager":
                raise
            reason = f"{type(error).__name__}: {one_line(error)}"[:300]
            failed.append({"method": label, "variant": str(variant), "reason": reason})
    if any(label == PLAIN for label, _ in entries) and not any(one.is_plain for one in found):
        reasons = {failure["reason"] for failure in failed}
        raise RuntimeError(f"no variant of plain decoding runs on this machine: {'; '.join(sorted(reasons))[:300]}")
    return found


def condition_of(model: Model, prompts: Sequence[str], numbers: Sequence[int]) -> Condition:
    """Return the condition of images by number, of prompts or classes in order; ValueError without a text encoder."""
    if not model.takes_prompts:
        classes = model.target.config.num_classes
        return Condition(labels=torch.tensor([number % classes for number in numbers], device=model.device))
    if model.text is None:
        raise ValueError(f"model {model.name} has no text_encoder/ folder, which prompts need")
    texts = [prompts[number % len(prompts)] for number in numbers]
    return model.text.condition(texts, slots=model.target.config.cls_token_num)


def jobs_of(model: Model, prompts: Sequence[str], *, rounds: int, batch: int, seed: int) -> list[RoundImages]:
    """Return the jobs of rounds, with different images. ValueError for a model without a text encoder."""
    numbers = [range(first * batch, (first + 1) * batch) for first in range(rounds)]
    return [RoundImages(condition_of(model, prompts, some), [(seed, number) for number in some]) for some in numbers]
