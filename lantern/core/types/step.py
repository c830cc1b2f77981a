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

    `tokens[:, j]` is token number `start + j` of its image, of which the first `counts` are valid. A finished image
    idles with counts 0. Tensors of `scores` have a leading image axis, `(b r n ...)`: row i of a tree's scores is for
    what follows node i. Step 0 is the pass over the prompt, and given tokens are steps too: without a tree and a
    verdict, as in plain decoding, and with one row of scores for each token, that which predicted it.
    """

    index: int
    start: Int[Tensor, " b"]
    counts: Int[Tensor, " b"]
    tokens: Int[Tensor, "b m"]
    scores: Scores
    tree: DraftTree | None = None
    verdict: Verdict | None = None

    def of_tokens(self, values: Float[Tensor, "b r n c"]) -> Float[Tensor, "b r m c"]:
        """Return for each token the row of `values`, such as the scores' features, that predicted it."""
        if self.verdict is None:
            return values
        visited = torch.nn.functional.pad(self.verdict.path, (1, 0))
        return values.gather(2, visited[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[-1]))


Callback = Callable[[Step], bool | None]  # of each step; True ends the generation


@dataclass(frozen=True)
class Generation:
    """Finished token grids and their statistics.

    `steps` counts target passes of each image, the one over the prompt included. `reached[:, d]` counts steps that
    reached a node of depth d with children to test, `accepted[:, d]` those that accepted one. `relaxed` counts tokens
    accepted only because of a relaxation. `total_variation` is the sum of its total variation over tokens,
    `total_variation_max` the maximum over tokens, and `latent_distance` the sum of moved mass times L2 distance (None
    without codebook vectors). `excess` is the sum over tokens of what their total variation exceeds the rule's bound
    by, None for rules without one. `history` is filled only with `keep_history`, `seconds` by phase only if timed.
    `is_finite`: whether the logits that the tokens were sampled from were finite. `known` is the number of tokens of
    each image where a callback ended the generation, and the others are 0.
    """

    tokens: Int[Tensor, "b n"]
    steps: Int[Tensor, " b"]
    accepted: Int[Tensor, "b d"]
    reached: Int[Tensor, "b d"]
    relaxed: Float[Tensor, " b"]
    total_variation: Float[Tensor, " b"]
    total_variation_max: Float[Tensor, " b"]
    is_finite: Bool[Tensor, " b"]
    latent_distance: Float[Tensor, " b"] | None = None
    excess: Float[Tensor, " b"] | None = None
    known: Int[Tensor, " b"] | None = None
    history: list[Step] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> Float[Tensor, " b"]:
        """Tokens committed per target pass (tau), bonus tokens and the pass over the prompt included."""
        return self.tokens.shape[1] / self.steps.float()
