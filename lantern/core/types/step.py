"""One step, and the result of a generation."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.types.target import Scores
from lantern.core.types.tree import DraftTree
from lantern.core.types.verifier import Verdict


@dataclass(frozen=True)
class Step:
    """One pass of the target and its result, as callbacks, drafters and policies receive it.

    `codes[:, j]` is code number `start + j` of its image, of which the first `counts` are valid. A finished image
    idles with counts 0. Tensors of `scores` have a leading image axis, `(b r n ...)`: row i of a tree's scores is for
    what follows node i. Step 0 is the pass over the prompt, and given codes are steps too: without a tree and a
    verdict, as in plain decoding, and with one row of scores for each code, that which predicted it.
    """

    index: int
    start: Int[Tensor, " b"]
    counts: Int[Tensor, " b"]
    codes: Int[Tensor, "b m"]
    scores: Scores
    tree: DraftTree | None = None
    verdict: Verdict | None = None

    def of_codes(self, values: Float[Tensor, "b r n c"]) -> Float[Tensor, "b r m c"]:
        """Return for each code the row of `values`, such as the scores' features, that predicted it."""
        if self.verdict is None:
            return values
        visited = torch.nn.functional.pad(self.verdict.path, (1, 0))
        return values.gather(2, visited[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[-1]))


Callback = Callable[[Step], None]


@dataclass(frozen=True)
class Generation:
    """Finished code grids and their statistics.

    `passes` counts target passes of each image, the one over the prompt included. `reached[:, d]` counts steps that
    reached a node of depth d with children to test, `accepted[:, d]` those that accepted one. `relaxed` counts codes
    accepted only because of a relaxation. `total_variation` is the sum of its total variation over codes,
    `total_variation_max` the maximum over codes, and `latent_distance` the sum of moved mass times L2 distance (None
    without code vectors). `excess` is the sum over codes of what their total variation exceeds the rule's bound by,
    None for rules without one. `history` is filled only with `keep_history`, `seconds` by phase only if timed.
    `is_finite`: whether the logits that the codes were sampled from were finite.
    """

    codes: Int[Tensor, "b n"]
    passes: Int[Tensor, " b"]
    accepted: Int[Tensor, "b d"]
    reached: Int[Tensor, "b d"]
    relaxed: Float[Tensor, " b"]
    total_variation: Float[Tensor, " b"]
    total_variation_max: Float[Tensor, " b"]
    is_finite: Bool[Tensor, " b"]
    latent_distance: Float[Tensor, " b"] | None = None
    excess: Float[Tensor, " b"] | None = None
    history: list[Step] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def step_compression(self) -> Float[Tensor, " b"]:
        """Codes committed per target pass (tau), bonus codes and the pass over the prompt included."""
        return self.codes.shape[1] / self.passes.float()
