"""A cascade: a drafter guesses for a small model, and that one for the target (SpecMQuant, arXiv:2505.22179).

EAGLE-1 drafts a chain. The small model scores it in one pass and resamples every token of it with the target's
noise. After t such rounds at least the first t tokens, and all tokens before the first that the last round changed,
equal the small model's own samples. The target verifies the chain, with the next best tokens as siblings at each place.
"""

from typing import Any

import torch

from lantern.core.sampling import Noise, Sampling
from lantern.core.types import Buffers, DraftMode, DraftTree, Prompt, Step
from lantern.drafters.combined.small_model import SmallModel
from lantern.drafters.eagle.drafter import EagleDrafter
from lantern.drafters.trees.static import StaticTree, TreeDrafter, chain


def brush(length: int, width: int) -> StaticTree:
    """Return a chain of `length` tokens with `width` - 1 siblings at each."""
    return StaticTree(tuple((0,) * depth + (rank,) for depth in range(length) for rank in range(width)))


class CascadeDrafter(TreeDrafter):
    """Drafter -> small model -> target, in chains of `length` tokens with `width` candidates each.

    The inner drafter grows a chain of length - 1, and the small model resamples it in `rounds` passes. With 0 rounds it
    does so until a round changes no token, at most `length` times: all tokens are then its own samples. Trees carry in
    `log_q` the small model's distributions, given the tokens of the round before.
    ValueError for a width beyond the codebook and for a chain of another length.
    """

    mode: DraftMode = "gumbel"

    def __init__(self, inner: EagleDrafter, small: SmallModel, *, length: int, width: int, rounds: int) -> None:
        if rounds < 0 or length < 2 or width < 1:
            raise ValueError(f"rounds {rounds}, length {length}, width {width}: wanted at least 0, 2 and 1")
        if inner.depth != length - 1:
            raise ValueError(f"the inner drafter's chain is {inner.depth} long, wanted {length - 1}: one less")
        if width > small.model.config.vocab_size:
            raise ValueError(f"width is {width}, wanted at most {small.model.config.vocab_size}, the number of tokens")
        self.drafter, self.small = inner, small
        self.tree, self.width, self.rounds, self.held = brush(length, width), width, rounds, Buffers()
        self.needs_whole_prefix = inner.needs_whole_prefix
        inner.most_committed = length + 1

    @property
    def needs_host(self) -> bool:
        """Whether the host counts the rounds, which CUDA graphs do not allow."""
        return not self.rounds

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Let the inner drafter and the small model read the prompt."""
        super().begin(prompt, noise)
        self.drafter.begin(prompt, noise)
        self.small.begin(prompt, noise)
        device = prompt.mask.device
        self.held.depths = torch.arange(self.depth, device=device)
        self.held.sees = torch.ones(self.depth - 1, self.depth - 1, dtype=torch.bool, device=device).tril()

    def propose(self) -> DraftTree:
        """Draft a chain, resample it with the small model, and return its tokens with their log q."""
        root, first = self.small.last, self.small.read()
        log_q = first
        ranked = self.drafter.propose().tokens[:, 1:, None]
        for _ in range(self.rounds or self.depth):
            known = ranked[:, : self.depth - 1, 0]
            rest = self.small.score(known, self.held.sees, 0, self.held.depths[1:])
            log_q = torch.cat([first, rest], 1)
            ranked = self.small.ranked(log_q, self.held.depths, self.width)
            if not self.rounds and torch.equal(ranked[:, : self.depth - 1, 0], known):
                break
        return self.drafted([root, ranked.flatten(1)], [log_q])

    def observe(self, step: Step) -> None:
        """Pass the step to the inner drafter and the committed tokens to the small model."""
        self.drafter.observe(step)
        self.small.take(step)


def cascade(
    module: Any, target: Any, model: Any, *, length: int, width: int, rounds: int, bits: int, sampling: Sampling
) -> CascadeDrafter:
    """Return a cascade of the model's own drafter, its small model, with 4-bit layers if `bits` is 4, and the target.

    ValueError for 4-bit layers of a model that is not LlamaGen's.
    """
    if bits == 4:
        if model.config.family != "llamagen":
            raise ValueError("small_bits=4 quantizes LlamaGen's layers only: leave it at 0 for this model")
        from lantern.core.weights import quantized

        model = quantized(model)
    inner = EagleDrafter(module, target, tree=chain(length - 1), mode="gumbel", sampling=sampling)
    small = SmallModel(model, target, sampling=sampling, stage=length + 1)
    return CascadeDrafter(inner, small, length=length, width=width, rounds=rounds)
