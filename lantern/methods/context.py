"""What a drafter is built from: the `DrafterContext` that every build(method, context) takes. Needs no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lantern.methods.spec import Method, resolved

if TYPE_CHECKING:
    from jaxtyping import Float, Int32
    from torch import Tensor, nn

    from lantern.core.sampling import Sampling
    from lantern.core.types import Drafter, DraftMode, Target
    from lantern.drafters.eagle.eagle1 import Eagle
    from lantern.drafters.policies.policy import StepCosts


def _unknown(name: str) -> Method:
    raise ValueError(f'method "{name}" is unknown: this context was made without `find`')


@dataclass(frozen=True)
class DrafterContext:
    """The components of a model that drafters read.

    `module` is the model's own drafter, `add_ons` its other trained networks by name, `neighbours` the proximity table
    and `codebook` the vectors of the codes. `costs` are seconds of a step where they were measured, for policies that
    weigh codes against time. `find` gives the method of a name, for drafters that contain another method's.
    """

    target: "Target"
    sampling: "Sampling"
    module: "Eagle | None" = None
    add_ons: "Mapping[str, nn.Module]" = field(default_factory=dict)
    neighbours: "Int32[Tensor, 'v k'] | None" = None
    codebook: "Float[Tensor, 'v d'] | None" = None
    costs: "StepCosts | None" = None
    find: Callable[[str], Method] = _unknown

    def drafter(self, method: Method) -> "Drafter":
        """Build the drafter of a method; ValueError for what it needs and the model lacks."""
        return resolved(method.spec.drafter)(method, self)

    def mode(self, method: Method) -> "DraftMode":
        """Return how children are sampled; at temperature 0 a sampled draft is the most likely code."""
        return "point" if self.sampling.is_greedy and method.spec.mode == "sampled" else method.spec.mode

    def records_log_q(self, method: Method) -> bool:
        """Return whether a relaxation reads log q of drafts that do not record it otherwise. Recording costs a copy."""
        return method.spec.relaxation is not None and self.mode(method) == "gumbel" and not self.sampling.is_greedy

    def eagle(self, method: Method) -> "Eagle":
        """Return the model's own drafter; ValueError if the model has none."""
        if self.module is None:
            raise ValueError(f'method "{method.name}" needs a drafter and this model has none: use "plain" or "auto"')
        return self.module

    def add_on(self, method: Method) -> "nn.Module":
        """Return the trained part that a method reads; ValueError if the model lacks it."""
        name = method.spec.add_on
        if name is None or name not in self.add_ons:
            raise ValueError(
                f'method "{method.name}" needs the trained part "{name}", which this model lacks: '
                f"train it, and put it into the model's folder as parts/{name}"
            )
        return self.add_ons[name]
