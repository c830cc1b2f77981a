"""SAM decoding: drafts are copied from places with a similar context (arXiv:2411.10666).

The paper copies what followed the longest suffix of a text that occurred before. Exact repeats are rare among tokens,
so contexts are also compared by super-tokens (k-means of the codebook) and on the grid (`matchers.py`):

    suffix   the tokens or super-tokens that end here, in the image's own past and, by automaton, in a corpus
    grid     the super-tokens at the left, above, upper left and upper right, and the tokens at the left and above

Nothing is trained by gradients: the add-on (`tables.py`) holds the super-tokens and the corpus.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from lantern.core.sampling import Noise
from lantern.core.types import Buffers, DraftMode, DraftTree, Prompt, Step, Target
from lantern.drafters.base import check_width
from lantern.drafters.lookup.matchers import Found, GridMatcher, Matcher, Past, SuffixMatcher
from lantern.drafters.lookup.tables import SamTables
from lantern.drafters.trees.static import StaticTree, TreeDrafter

FLOOR = 1e-4  # share of q that is spread evenly over all tokens


class SamDrafter(TreeDrafter):
    """Grows a static tree from the tokens of similar contexts, with the target's noise.

    q is proportional to the weights that the matcher of kind `match` finds; a share `smooth` of it goes to all tokens
    of the same super-token. A step may also commit tokens of a tree `beside` its own. ValueError for `least` above
    `reach`, a share outside [0, 1], tables of another model, and a tree wider than the codebook.
    """

    mode: DraftMode = "gumbel"
    records_log_q = False

    def __init__(
        self,
        tables: SamTables,
        target: Target,
        *,
        tree: StaticTree,
        match: str,
        sharp: float,
        least: int,
        reach: int,
        smooth: float,
        beside: StaticTree | None = None,
    ) -> None:
        if least < 1 or reach < least:
            raise ValueError(f"least is {least} and reach {reach}, wanted 1 <= least <= reach")
        config = tables.config
        got, expected = (config.vocab_size, config.block_size), (target.config.vocab_size, target.config.block_size)
        if got != expected:
            raise ValueError(
                f"the tables are of (vocab_size, block_size) {got}, the target of {expected}: make tables for it"
            )
        if not 0 <= smooth <= 1:
            raise ValueError(f"smooth is {smooth}, wanted from 0 to 1")
        check_width(tree, config.vocab_size)
        self.matcher: Matcher = GridMatcher(tables, sharp=sharp, least=least)
        if match != "grid":
            self.matcher = SuffixMatcher(tables, is_super=match == "super", sharp=sharp, least=least, reach=reach)
        self.tables, self.tree, self.held = tables, tree, Buffers()
        self.smooth, self.count, self.vocab_size = smooth, config.block_size, config.vocab_size
        self.room = self.count + max(tree.depth, 0 if beside is None else beside.depth) + 1

    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Reset the past and start from the first token."""
        super().begin(prompt, noise)
        device, images = prompt.mask.device, len(prompt.mask)
        self.held.group_of = self.tables.group_of.long().to(device)
        self.held.sizes = torch.bincount(self.held.group_of, minlength=self.tables.config.groups).float()
        self.held.tokens = torch.zeros(images, self.room, dtype=torch.long, device=device)
        self.held.known = torch.zeros(images, dtype=torch.long, device=device)
        self.matcher.begin(images, device)

    def observe(self, step: Step) -> None:
        """Append the committed tokens to the past."""
        steps = torch.arange(step.tokens.shape[1], device=step.tokens.device)
        self.held.tokens.scatter_(1, self.held.known[:, None] + steps, step.tokens)
        self.held.known.add_(step.counts)
        self.matcher.read(step.tokens, step.counts)

    def propose(self) -> DraftTree:
        """Grow the tree, with one search of the past per depth that has children."""
        context = self.matcher.root(Past(self.held.tokens[:, : self.count], self.held.known))
        ranked = [context.left]
        for depth, level in enumerate(self.levels):
            if depth > 0:
                context = self.matcher.extend(context, level.parents, ranked[-1][:, level.pairs])
            places = (self.held.known[:, None] + depth).clamp(max=self.count - 1)
            scores = self._log_q(*self.matcher.evidence(context)) + self.noise.gumbel(places)
            ranked.append(scores.topk(level.width, dim=-1).indices.flatten(1))
        return self.drafted(ranked, [])

    def _log_q(self, past: Float[Tensor, "b f n"], found: list[Found]) -> Float[Tensor, "b f v"]:
        """Return log q of what was found."""
        images, nodes, _ = past.shape
        q = past.new_zeros(images, nodes, self.vocab_size)
        q = q.scatter_add(-1, self.held.tokens[:, None, : self.count].expand(-1, nodes, -1), past)
        for tokens, weights in found:
            q = q.scatter_add(-1, tokens, weights)
        q = q / q.sum(-1, keepdim=True).clamp(min=1e-30)
        mass = q.new_zeros(images, nodes, len(self.held.sizes)).scatter_add(-1, self.held.group_of.expand_as(q), q)
        similar = (mass / self.held.sizes.clamp(min=1.0))[..., self.held.group_of]
        return ((1 - self.smooth) * q + self.smooth * similar + FLOOR / self.vocab_size).log()
