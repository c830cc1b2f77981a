"""One step, and the result of a generation."""

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.types.target import Scores
from lantern.core.types.tree import DraftTree
from lantern.core.types.verifier import Verdict


@dataclass(frozen=True)
class Step:
    """One pass of the target and its result, as callbacks, drafters and adaptive policies receive it.

    `codes[:, j]` is code number `start + j` of its image, of which the first `counts` are valid. A finished image
    idles with counts 0. `verdict` and `tree` are None in the first pass (over the prompt) and in plain decoding.
    """

    index: int
    start: Int[Tensor, " b"]
    counts: Int[Tensor, " b"]
    codes: Int[Tensor, "b m"]
    scores: Scores | None = None
    tree: DraftTree | None = None
    verdict: Verdict | None = None


Callback = Callable[[Step], None]


@dataclass(frozen=True)
class Generation:
    """Finished code grids and their statistics.

    `passes` counts target passes of each image, the one over the prompt included. `reached[:, d]` counts steps that
    reached a node of depth d with children to test, `accepted[:, d]` those that accepted one. `relaxed` counts codes
    accepted only because of a relaxation. `total_variation` is the sum of its total variation over codes,
    `total_variation_max` the maximum over codes, and `latent_distance` the sum of moved mass times L2 distance. The
    last two are None if nothing was relaxed, or without code vectors. `excess` is the sum over codes of what their
    total variation exceeds the rule's bound by, None for rules without one. `steps` is filled only with `keep_steps`,
    `seconds` by phase only if timed. `is_finite`: whether the logits that the codes were sampled from were finite; None
    if that was not checked.
    """

    codes: Int[Tensor, "b n"]
    passes: Int[Tensor, " b"]
    accepted: Int[Tensor, "b d"]
    reached: Int[Tensor, "b d"]
    relaxed: Float[Tensor, " b"]
    total_variation: Float[Tensor, " b"]
    steps: list[Step] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    total_variation_max: Float[Tensor, " b"] | None = None
    latent_distance: Float[Tensor, " b"] | None = None
    excess: Float[Tensor, " b"] | None = None
    is_finite: Bool[Tensor, " b"] | None = None

    @property
    def step_compression(self) -> Float[Tensor, " b"]:
        """Codes committed per target pass (tau), bonus codes and the pass over the prompt included."""
        return self.codes.shape[1] / self.passes.float()
