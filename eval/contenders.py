"""Who takes part: methods as they are written on the command line, each in its variants, put together."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import torch

from lantern.catalog import METHODS, Method, Parts
from lantern.config import one_line
from lantern.eval.variants import METHOD_KINDS, PLAIN_KINDS, Stable, Variant
from lantern.generate import Decoder, choose_method
from lantern.model_folder import Model
from lantern.sampling import Sampling
from lantern.types import Condition, Generation, Step

PLAIN = "plain"
PROMPTS = (
    "a red apple",
    "a banana",
    "a cat",
    "a house",
    "a blue car",
    "a smiling face",
    "a tree",
    "a birthday cake",
    "a sunflower",
    "a rocket",
)


@dataclass(frozen=True)
class Contender:
    """A method in a variant, ready to decode. `label` is the method as it was asked for."""

    label: str
    method: Method
    variant: Variant
    parts: Parts

    @property
    def is_plain(self) -> bool:
        """Whether it can be the baseline."""
        return self.parts.drafter is None

    @property
    def is_identical(self) -> bool:
        """Whether it promises plain decoding's picture, code for code."""
        return self.method.exact and self.method.verifier == "gumbel"

    @property
    def is_reproducible(self) -> bool:
        """Whether it promises that in every dtype."""
        return self.parts.engine.reproducible or self.parts.engine.fused

    def decode(self, job: "Job", **watching: Any) -> Generation:
        """Makes the pictures of a job, its prompts read anew; `watching` is as for `Parts.generate`."""
        return self.parts.generate(job.condition, keys=job.keys, prompts=None, **watching)


@dataclass(frozen=True)
class Job:
    """The pictures of one round: what they show, and the key of each one's noise."""

    condition: Condition
    keys: list[tuple[int, int]]


@dataclass
class Lineup:
    """All contenders that this machine can run, and for the others the reason why it cannot."""

    contenders: list[Contender] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)

    def drop(self, contender: Contender, error: Exception) -> None:
        """Moves a contender to those that failed."""
        self.contenders.remove(contender)
        self.note(contender.label, contender.variant, error)

    def note(self, label: str, variant: Variant, error: Exception) -> None:
        """Books a failure."""
        reason = f"{type(error).__name__}: {one_line(error)}"[:300]
        self.failed.append({"method": label, "variant": str(variant), "reason": reason})


def method_of(model: Model, spec: str) -> Method:
    """The method that a spec means for this model: NAME or NAME:SETTING=VALUE,..., as in "lantern++:k=5,lambda_=1.5".

    ValueError for an unknown method or setting, and for a value that is no number where one is wanted.
    """
    name, _, rest = spec.partition(":")
    method = choose_method(model, name)
    settings: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, sign, text = pair.partition("=")
        if not sign:
            raise ValueError(f"--methods {spec[:60]!r}: {pair[:40]!r} is no setting, wanted NAME=VALUE")
        settings[key] = _value(text, method.settings.get(key, ""), spec)
    return method.with_options(**settings)


def _value(text: str, default: object, spec: str) -> object:
    kind = type(default) if isinstance(default, int | float) and not isinstance(default, bool) else str
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"--methods {spec[:60]!r}: {text[:20]!r} is no number") from None


def assemble(model: Model, method: Method, sampling: Sampling) -> Parts:
    """A method put together for a model, as every command does it."""
    return Decoder(model, method, sampling).parts


def line_up(
    stable: Stable, specs: Sequence[str], variants: Mapping[str, Sequence[Variant]], sampling: Sampling
) -> Lineup:
    """Puts together every method in each of its variants; `variants` are those of "plain" and of the others.

    What the user asked wrongly is a ValueError; what this machine cannot do is noted.
    """
    lineup = Lineup()
    for spec in (PLAIN, *specs):
        for variant in variants[PLAIN if spec == PLAIN else "others"]:
            try:
                model = stable.model(variant)
            except Exception as error:  # whatever a compiler or quantiser raises is the reason that is told
                lineup.note(spec, variant, error)
                continue
            method = METHODS[PLAIN] if spec == PLAIN else method_of(model, spec)
            lineup.contenders.append(Contender(spec, method, variant, assemble(model, method, sampling)))
    return lineup


def variants(kinds: Sequence[str], dtypes: Sequence[str]) -> dict[str, list[Variant]]:
    """The variants of plain decoding and of methods, of these kinds and dtypes."""
    return {
        name: [Variant(kind, dtype) for dtype in dtypes for kind in known if kind in kinds]
        for name, known in ((PLAIN, PLAIN_KINDS), ("others", METHOD_KINDS))
    }


def warm_up(lineup: Lineup, run: Callable[[Contender], object]) -> None:
    """Runs every contender once, which compiles what is to be compiled; those that fail are moved out.

    What fails as it is, neither compiled nor quantised, is no matter of the machine and goes on as an error.
    RuntimeError if nothing that could be the baseline is left.
    """
    for contender in list(lineup.contenders):
        try:
            # compilers tell of what they try and would rather have compiled
            with warnings.catch_warnings(), redirect_stderr(StringIO()):
                warnings.simplefilter("ignore")
                run(contender)
        except Exception as error:  # as above: a kernel may be missing only once it is called
            if contender.variant.kind == "eager":
                raise
            lineup.drop(contender, error)
    if not any(contender.is_plain for contender in lineup.contenders):
        reasons = {failure["reason"] for failure in lineup.failed}
        raise RuntimeError(f"plain decoding runs in no variant on this machine: {'; '.join(sorted(reasons))[:300]}")


def condition_of(model: Model, prompts: Sequence[str], numbers: Sequence[int]) -> Condition:
    """What the target is told of pictures with these numbers: prompts in turn, or classes in turn."""
    if not model.takes_prompts:
        classes = model.target.config.num_classes
        return Condition(labels=torch.tensor([number % classes for number in numbers], device=model.device))
    if model.text is None:
        raise ValueError(f"model {model.name} has no text_encoder/ folder, without which it understands no prompt")
    texts = [prompts[number % len(prompts)] for number in numbers]
    found = model.text.encode(texts, slots=model.target.config.cls_token_num)
    return Condition(embeddings=found.embeddings, mask=found.mask)


class DoneError(Exception):
    """Leaves a generation that has gone far enough; carries the seconds that were measured."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


def until_done(contender: Contender, job: Job, watch: Callable[[Step], None]) -> float:
    """Decodes until `watch` leaves with DoneError; gives the seconds it carries."""
    try:
        contender.decode(job, callback=watch)
    except DoneError as done:
        return done.seconds
    raise RuntimeError("the picture was finished before the measurement: ask for fewer codes")
