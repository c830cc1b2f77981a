"""Shared by several families of drafters: how children are chosen, and how networks are trained.

`Examples` and `Prediction` are the interface between a drafter's module and its training.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lantern.core.sampling import Noise, Purpose, Sampling
from lantern.core.types import Buffers, DraftMode, Prompt, Target
from lantern.core.weights import left_out
from lantern.drafters.policies import match_chances
from lantern.drafters.trees import StaticTree, TreeDrafter

# whose noise ranks the children of a node; none in mode "point"
PURPOSE_OF_MODE = {"gumbel": Purpose.TARGET, "sampled": Purpose.DRAFT}


def check_width(tree: StaticTree, tokens: int) -> None:
    """Raise ValueError for a tree wider than a codebook of so many tokens."""
    if tree.width > tokens:
        raise ValueError(f"the tree has {tree.width} children at a node, wanted at most {tokens}: use a narrower one")


def ranking(sampling: Sampling) -> Sampling:
    """Return the sampling whose log q ranks children: at temperature 0 they are ranked by their logits."""
    return sampling.untruncated() if sampling.is_greedy else sampling


def token_embeddings(target: Any, tokens: int) -> Float[Tensor, "v c"]:
    """Return the fp32 inputs that a target has for its tokens, from which drafters start."""
    numbers = torch.arange(tokens, device=target.tok_embeddings.weight.device)
    return target.tok_embeddings(numbers).detach().float()


def target_logits(target: Target, features: Float[Tensor, "*b c"]) -> Float[Tensor, "*b v"]:
    """Return the fp32 logits of the next token from features, by the target's head."""
    return target.head(features.to(target.tok_embeddings.weight.dtype))


class NetworkDrafter(TreeDrafter):
    """Drafts static trees by a network, most often with the target's head.

    Mode "gumbel" takes the top of log q + g with the target's noise; "sampled" samples without replacement with the
    drafter's own noise (the same top-K trick); "point" takes the most likely tokens. q uses the same `sampling` as the
    target's p; at temperature 0 tokens are ranked by their logits. Trees carry log q in mode "sampled", whose verifiers
    read it, and with `records_log_q`, for relaxations that read it.

    The config of `module` has `dim`, `vocab_size` and `block_size`. ValueError for an unknown mode, for a module of
    other sizes than the target's, and for a tree that is wider than the codebook.
    """

    def __init__(
        self,
        module: Any,
        target: Target,
        *,
        tree: StaticTree,
        mode: DraftMode,
        sampling: Sampling,
        records_log_q: bool = False,
    ) -> None:
        if mode not in ("gumbel", "sampled", "point"):
            raise ValueError(f'draft mode is "{mode}", wanted gumbel, sampled or point')
        got, wanted = ((c.dim, c.vocab_size, c.block_size) for c in (module.config, target.config))
        if got != wanted:
            raise ValueError(
                f"the drafter has (dim, tokens, block_size) {got}, its target {wanted}: use a drafter trained for it"
            )
        check_width(tree, target.config.vocab_size)
        self.module, self.target, self.tree, self.count = module, target, tree, target.config.block_size
        self.mode, self.records_log_q = mode, records_log_q or mode == "sampled"
        self.sampling, self.draft_sampling, self.held = sampling, ranking(sampling), Buffers()

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Keep the noise and what an engine has to choose children with."""
        super().begin(prompt, noise)
        is_direct = not self.records_log_q and self.mode != "point"
        self._sampler = self.target.sampler(self.draft_sampling, noise) if is_direct else None
        self._ranker = self.target.ranker(self.draft_sampling, noise)
        self.held.scale = self.sampling.scales(torch.zeros(1, 1, dtype=torch.long, device=prompt.mask.device))

    def may_be_run(self, drafter: type, module: type) -> bool:
        """Return whether an engine may draft the trees itself: only those of exactly these classes, without hooks, in
        mode "sampled", or "gumbel" without log q.
        """
        is_own = (type(self), type(self.module)) == (drafter, module)
        is_plain = self.mode == "sampled" or (self.mode == "gumbel" and not self.records_log_q)
        return is_own and is_plain and left_out(self.module) is None

    def scales(self, places: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """Return the guidance scale at tokens of these numbers."""
        if self.sampling.guidance_interval < 0:
            return self.held.scale.expand_as(places)
        return self.sampling.scales(places)

    def children(
        self, logits: Float[Tensor, "b r n v"], places: Int[Tensor, "*b #n"], width: int
    ) -> tuple[Int[Tensor, "b n k"], Float[Tensor, "b n v"] | None]:
        """Return the children of nodes in sampling order, and log q below the nodes where it was computed.

        `places` are the children's token numbers; `logits` are of all guidance rows, or of the guided one.
        """
        if self._sampler is not None:
            every, purpose = places.expand(-1, logits.shape[2]), PURPOSE_OF_MODE.get(self.mode)
            return self._sampler(logits, every, width=width, purpose=purpose), None
        return self.ranked(logits, places, width)[:2]

    def ranked(
        self, logits: Float[Tensor, "b r n v"], places: Int[Tensor, "*b #n"], width: int, spread: float = 1.0
    ) -> tuple[Int[Tensor, "b n k"], Float[Tensor, "b n v"], Callable[[], Float[Tensor, "b n k"]]]:
        """Return `children`, always with log q, and what gives their `match_chances` by a spread."""
        if self._ranker is not None:
            every, purpose = places.expand(-1, logits.shape[2]), PURPOSE_OF_MODE.get(self.mode)
            tokens, log_q, chances = self._ranker(logits, every, width=width, purpose=purpose, spread=spread)
            return tokens, log_q, lambda: chances
        log_q = self.log_q(logits, places)
        scores = self.scores(log_q, places)
        tokens = scores.topk(width, dim=-1).indices
        return tokens, log_q, lambda: match_chances(scores, spread).gather(-1, tokens)

    def log_q(self, logits: Float[Tensor, "b r n v"], places: Int[Tensor, "*b #n"]) -> Float[Tensor, "b n v"]:
        """Return log q of tokens of these numbers, from logits of all guidance rows or of the guided one."""
        if logits.shape[1] == 1:
            return self.draft_sampling.filtered(logits[:, 0])
        return self.draft_sampling.log_probs(logits, places.expand(-1, logits.shape[2]))

    def scores(self, log_q: Float[Tensor, "b n v"], places: Int[Tensor, "*b #n"]) -> Float[Tensor, "b n v"]:
        """Return what ranks children: log q plus the noise of these numbers."""
        purpose = PURPOSE_OF_MODE.get(self.mode)
        return log_q if purpose is None else log_q + self.noise.gumbel(places, purpose)


def fused_layers(count: int) -> tuple[int, int, int]:
    """Return the layers of a target whose inputs EAGLE-3 reads: 2, L/2 and L - 3 (arXiv:2503.01840)."""
    return min(2, count - 1), count // 2, max(count - 3, 0)


@dataclass(frozen=True)
class Examples:
    """Tokens of images that the target made, with its features. Entry i of a feature axis predicts token i.

    `rows` are features after the final norm, conditional and unconditional; `scales` is the guidance of each image.
    `words` and `mask` are its caption's features, padded on the left. Only for modules whose `reads` names them:
    `prompt`, features of the caption's slots before the one that predicts token 0; `layers`, the inputs of the layers
    that `fused_layers` names.
    """

    tokens: Int[Tensor, "b n"]
    rows: Float[Tensor, "b 2 n c"]
    scales: Float[Tensor, " b"]
    words: Float[Tensor, "b t e"] | None = None
    mask: Bool[Tensor, "b t"] | None = None
    prompt: Float[Tensor, "b 2 s c"] | None = None
    layers: Float[Tensor, "b 2 3 n c"] | None = None

    @property
    def guided(self) -> Float[Tensor, "b n c"]:
        """Return F* = f_u + s (f_c - f_u), the features whose head logits are the guided logits."""
        return self.guide(self.rows)

    def guide(self, rows: Float[Tensor, "b 2 *rest"]) -> Float[Tensor, " b *rest"]:
        """Combine the two rows of a tensor by each image's guidance."""
        scales = self.scales.view(-1, *[1] * (rows.ndim - 2))
        return rows[:, 1] + scales * (rows[:, 0] - rows[:, 1])

    def to(self, device: torch.device) -> "Examples":
        """Return the same on a device."""
        here = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: x.to(device) for name, x in here.items() if x is not None})


@dataclass(frozen=True)
class Prediction:
    """Predictions at one depth: entry j is for token `places[j]`, drafted `depth` tokens past the known ones.

    Depth 1 is the first draft. Set one of: `features`, estimates of F*, which the target's head maps to logits;
    `rows`, the same for both guidance rows; `logits` of the module's own head, -inf for tokens that it never drafts
    (with `features` as well if they are regressed too).
    """

    depth: int
    places: Int[Tensor, " m"]
    features: Float[Tensor, "b m c"] | None = None
    rows: Float[Tensor, "b 2 m c"] | None = None
    logits: Float[Tensor, "b m v"] | None = None


class Trainee(nn.Module, ABC):
    """A module that `lantern train drafter` trains.

    Its config is a frozen dataclass with the fields `kind` and `target` and a classmethod `for_target(target_config,
    **changes)`.
    """

    config: Any

    @property
    def reads(self) -> frozenset[str]:
        """Which of `prompt` and `layers` it needs in `Examples`."""
        return frozenset()

    @property
    def least_depths(self) -> int:
        """The least number of depths that trains all of the module."""
        return 1

    @abstractmethod
    def init_for(self, target: Any, generator: torch.Generator) -> None:
        """Set the weights from which training starts, for this target."""

    @abstractmethod
    def training_predictions(self, examples: Examples, depths: int) -> list[Prediction]:
        """Return its drafts at depths 1 .. `depths` from true tokens, with gradients; inputs are as in drafting."""
