"""Decoding of several rows of tokens at once: a row begins before the row above it is finished (ZipAR, PJD).

A token is sampled from the target's distribution given the tokens that exist by then: those of the rows above as far as
they were decoded, and those of its own row. Its distribution is therefore not that of plain decoding, and the total
variation between both is measured at the end, in passes over the finished image.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Generation, Prompt, Scores, Step, Target
from lantern.core.weights import original
from lantern.decoding.cache import by_row, read_tokens
from lantern.decoding.loop import State
from lantern.decoding.plain import NoDrafts
from lantern.decoding.statistics import Readback, StepSums, totals
from lantern.verifiers.gumbel import GumbelVerifier


@dataclass(frozen=True)
class Front:
    """The lines of a pass: their rows, and the number of each line's first node, its head.

    A head is the last token of its row. A row without tokens has none yet: its head is a copy of the last token of the
    row above, at the end of that row (`is_copy`), and its keys are not kept. `free` is how many tokens a line may
    commit: 0 for rows that wait or are finished. A finished row stays until the keys of its last token are in the
    cache.
    """

    rows: Int[Tensor, "b l"]
    counts: Int[Tensor, "b l"]
    heads: Int[Tensor, "b l"]
    free: Int[Tensor, "b l"]
    is_shown: Bool[Tensor, "b l"]
    is_copy: Bool[Tensor, "b l"]


class RowFront(State):
    """A generation whose rows are decoded in parallel, each once the row above it has `lead` tokens.

    Tokens have the noise of plain decoding. Each row commits at least one token per step, and with `drafts` the tokens
    behind it that its own samples of the last pass predicted. With `lead` at least the number of columns the tokens are
    plain decoding's. Steps report tokens in raster order, as soon as all tokens before them exist. The total variation
    is NaN unless it is `measured`. A pass scores `nodes`: lines of `width`. `counts` are the tokens of each row; `grid`
    holds them, then guesses of those behind.

    ValueError for a lead below 1, and for a target with newline tokens, which the rows below would lack.
    """

    def __init__(
        self, target: Target, sampling: Sampling, *, lead: int, drafts: int = 0, measured: bool = True
    ) -> None:
        if lead < 1 or drafts < 0:
            raise ValueError(f"lead {lead}, drafts {drafts}: wanted at least 1 and 0")
        self.raster = raster = target.config.raster
        if raster.newlines:
            raise ValueError(
                "this model ends its rows with newline tokens, which parallel rows lack: use another method"
            )
        target = target if target.follows_masks else original(target)  # lines see other tokens than those before a node
        super().__init__(target, sampling, NoDrafts(), GumbelVerifier())
        self.lead, self.width = min(lead, raster.columns), 1 + min(drafts, raster.columns - 1)
        # as many lines as rows are unfinished when each adds one token a pass
        self.nodes = min(math.ceil((raster.columns + 1) / self.lead), raster.rows) * self.width
        self.is_measured = measured

    @property
    def group(self) -> tuple[object, ...]:
        """Itself: rows of one image are decoded together, those of others are not joined."""
        return (id(self),)

    @property
    def stage(self) -> int:
        """Nodes of a pass."""
        return self.nodes

    def start(self, prompt: Prompt) -> Step:
        """Take over the prompt, which fills `cache`; return the step that gives token 0 and the given tokens after."""
        self.first_logits, raster, self.end = prompt.logits, self.raster, self.count  # all rows are decoded
        images, device, width = len(prompt.mask), prompt.mask.device, self.width
        self.images = torch.arange(images, device=device)[:, None]
        self.steps = torch.arange(width, device=device)
        self.lines = torch.arange(self.nodes // width, device=device)
        self.places = torch.arange(self.count, device=device)
        # Behind each row lies room for guesses past its end; one row more takes what is not kept.
        self.grid = torch.zeros(images, raster.rows + 1, raster.columns + 2 * width, dtype=torch.long, device=device)
        self.counts = torch.zeros(images, raster.rows, dtype=torch.long, device=device)
        self.is_cached = torch.zeros(images, self.count, dtype=torch.bool, device=device)
        self.statistics = StepSums(images, width - 1, self.count, device)
        self.readback = Readback(device)
        size = (images, self.count + 1, self.target.config.vocab_size)
        self.log_p = torch.zeros(size, dtype=torch.float32, device=device) if self.is_measured else None
        place = torch.zeros_like(self.images)
        self.held.total = totals(prompt.logits).float()
        log_p = self.sampling.log_probs(prompt.logits, place)
        self.grid[:, 0] = (log_p + self.noise.gumbel(place)).argmax(-1)
        self.counts[:, 0] = 1
        self._record(place, log_p)
        self._read_kept()
        return self._reported(torch.zeros_like(place[:, 0]), Scores(prompt.logits, prompt.features))

    def round(self) -> Step:
        """Score the lines and commit what they sample."""
        known, sums = self.known, self.statistics
        sums.steps += self.counts.sum(1) < self.count
        front = self._front()
        tokens = self._tokens(front)
        places = (front.heads[..., None] + self.steps).clamp(max=self.count - 1)
        scores = self._score(front, tokens, places.flatten(1))
        ahead = (places + 1).clamp(max=self.count - 1).flatten(1)
        logits, log_p = self._distributions(scores.logits.unflatten(0, (len(known), -1)), ahead)
        sampled = (log_p + self.noise.gumbel(ahead)).argmax(-1).view(tokens.shape)
        # A sample counts if the tokens before it in its row were drafted as they were sampled.
        is_match = (tokens[..., 1:] == sampled[..., :-1]).cumprod(-1)
        length = torch.minimum(1 + is_match.sum(-1), front.free)
        is_new = self.steps < length[..., None]
        self.held.total.add_(totals(logits, is_new.flatten(1)))
        self._record(torch.where(is_new, front.heads[..., None] + 1 + self.steps, self.count).flatten(1), log_p)
        self._keep(front, length)
        self._write(front, sampled)
        can_draft = (front.free[..., None] > 1 + self.steps[:-1]) & is_new[..., :-1]
        sums.reached += can_draft.sum(1)
        sums.accepted += (can_draft & is_new[..., 1:]).sum(1)
        self.counts = self.counts.scatter_add(1, front.rows, length)
        self.watch.lap("score")
        return self._reported(known, Scores(logits, scores.features.unflatten(0, (len(known), -1))))

    def is_done(self) -> bool:
        """Return whether all tokens exist."""
        return self.readback.read(self.counts.sum(1)) == self.count

    @property
    def known(self) -> Int[Tensor, " b"]:
        """How many tokens exist before the first that does not, in raster order."""
        columns = self.raster.columns
        return (self.places % columns < self.counts.repeat_interleave(columns, 1)).cumprod(1).sum(1)

    def _reported(self, known: Int[Tensor, " b"], scores: Scores) -> Step:
        """Return the step that found `known` tokens in raster order, with those that follow them now."""
        tokens = self.tokens.gather(1, (known[:, None] + self.places).clamp(max=self.count - 1))
        return Step(0, known, self.known - known, tokens, scores)

    @property
    def tokens(self) -> Int[Tensor, "b n"]:
        """The tokens in raster order; undefined where they do not exist yet."""
        return self.grid[:, :-1, : self.raster.columns].flatten(1)

    def result(self) -> Generation:
        """Return the finished grids. The passes that measure the total variation are not counted."""
        if self.log_p is None or not self.is_done():  # ended by a callback
            spent = torch.full_like(self.counts[:, :1], torch.nan, dtype=torch.float)
        else:
            spent = self._total_variation(self.log_p)
        self.watch.lap("variation")
        self.statistics.variation, self.statistics.largest = spent.sum(1), spent.amax(1)
        return super().result()

    def _read_kept(self) -> None:
        """Fill the cache with the tokens that all images keep from the start but the last."""
        forced = self.forced
        if forced is None or (kept := forced.common_prefix) == 1:
            return
        tokens, columns = forced.tokens[:, :kept], self.raster.columns
        self.statistics.steps += read_tokens(self.target, self.cache, tokens[:, :-1])[1]
        self.is_cached[:, : kept - 1] = True
        places = self.places[None, :kept].expand(len(tokens), -1)
        self.grid[self.images, places // columns, places % columns] = tokens
        self.counts[:] = (kept - columns * torch.arange(self.raster.rows, device=tokens.device)).clamp(0, columns)
        zeros = self.first_logits.new_zeros(*self.first_logits.shape[:2], kept, self.first_logits.shape[-1])
        self._record(places, self.sampling.log_probs(forced.logits(zeros, places), places))

    def _front(self) -> Front:
        """Return the lines of the next pass: the first rows whose tokens are not all in the cache."""
        raster = self.raster
        is_cached = self.is_cached.view(-1, raster.rows, raster.columns)[..., -1]
        first = is_cached.cumprod(1).sum(1)
        rows = (first[:, None] + self.lines).clamp(max=raster.rows - 1)
        counts = self.counts.gather(1, rows)
        above = self.counts.gather(1, (rows - 1).clamp(min=0)).masked_fill(rows == 0, raster.columns)
        # Past the last row lines repeat it, and do nothing.
        is_shown = (first[:, None] + self.lines < raster.rows) & ((above >= self.lead) | (counts > 0))
        # A row never overtakes the row above it.
        free = ((above - counts).clamp(max=self.width) * is_shown).clamp(min=0)
        heads = rows * raster.columns + counts - 1
        return Front(rows, counts, heads, free, is_shown, is_shown & (counts == 0))

    def _tokens(self, front: Front) -> Int[Tensor, "b l w"]:
        """Return the token of each node: heads, then the guesses behind them."""
        row, columns = front.rows, (front.counts[..., None] - 1 + self.steps).clamp(min=0)
        tokens = self.grid[self.images[..., None], row[..., None], columns]
        above = (row - 1).clamp(min=0)
        last = self.grid[self.images, above, (self.counts.gather(1, above) - 1).clamp(min=0)]
        return torch.where(front.is_copy[..., None], last[..., None], tokens)

    def _score(self, front: Front, tokens: Int[Tensor, "b l w"], places: Int[Tensor, "b n"]) -> Scores:
        """Run the target over all nodes. A line sees tokens before its head, the heads of other lines, and itself."""
        cache, width = self.cache, self.width
        is_cached = self.is_cached[:, None] & (self.places < front.heads[..., None])
        heads = torch.where(front.is_shown & ~front.is_copy, front.heads, self.count)
        is_other = heads[:, None] < front.heads[..., None]
        lines, nodes = len(self.lines), self.nodes
        staged = torch.zeros(len(tokens), lines, width, lines, width, dtype=torch.bool, device=tokens.device)
        staged[..., 0] = is_other[:, :, None]
        own = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril()
        staged[:, self.lines, :, self.lines] = own
        seen = torch.cat([is_cached.repeat_interleave(width, 1), staged.view(len(tokens), nodes, nodes)], -1)
        mask = cache.prefix_scores.new_zeros(len(tokens), cache.rows, nodes, cache.slots)
        mask[..., : cache.prefix] = by_row(cache.prefix_scores)
        mask[..., cache.prefix :] = torch.where(seen, 0.0, -torch.inf)[:, None]
        inputs = self.target.tok_embeddings(tokens.flatten(1)).repeat_interleave(cache.rows, 0)
        positions = (places + self.target.config.cls_token_num).repeat_interleave(cache.rows, 0)
        slots = (torch.arange(nodes, device=tokens.device) + cache.first_stage_slot).expand(len(inputs), -1)
        return self.target(inputs, positions, mask.flatten(0, 1), cache=cache, slots=slots)

    def _distributions(
        self, logits: Float[Tensor, "b r n v"], places: Int[Tensor, "b n"]
    ) -> tuple[Float[Tensor, "b r n v"], Float[Tensor, "b n v"]]:
        """Return logits and log-probabilities of these token numbers; those of tokens that are given have all mass."""
        if self.forced is not None:
            logits = self.forced.logits(logits, places)
        return logits, self.sampling.log_probs(logits, places)

    def _keep(self, front: Front, length: Int[Tensor, "b l"]) -> None:
        """Copy keys and values of heads and accepted drafts into the cache; those of others to its last slot."""
        is_head = (self.steps == 0) & (front.is_shown & ~front.is_copy)[..., None]
        is_kept = is_head | ((self.steps > 0) & (self.steps < length[..., None]))
        places = torch.where(is_kept, front.heads[..., None] + self.steps, self.count - 1).flatten(1)
        nodes = torch.arange(self.nodes, device=places.device).expand_as(places)
        self.cache.move(nodes, places)
        # in bytes: a GPU has no maximum of bools
        self.is_cached = self.is_cached.byte().scatter_reduce(1, places, is_kept.flatten(1).byte(), "amax").bool()

    def _write(self, front: Front, sampled: Int[Tensor, "b l w"]) -> None:
        """Write the samples of each line behind its head, and the last of them as guesses of what follows."""
        both = torch.cat([sampled, sampled[..., -1:].expand_as(sampled)], -1)
        columns = front.counts[..., None] + torch.arange(both.shape[-1], device=both.device)
        rows = torch.where(front.free > 0, front.rows, self.raster.rows)[..., None]
        self.grid[self.images[..., None], rows, columns] = both

    def _record(self, places: Int[Tensor, "b n"], log_p: Float[Tensor, "b n v"]) -> None:
        """Keep the distributions of committed tokens; those of others go to the row past the end."""
        if self.log_p is not None:
            self.log_p[self.images, places] = log_p

    @torch.no_grad()
    def _total_variation(self, log_p: Float[Tensor, "b n+ v"]) -> Float[Tensor, "b n"]:
        """Return TV between the distributions that tokens were sampled from, `log_p`, and those of plain decoding.

        Both follow the same tokens. The finished image is read again, each token with all tokens before it; the cache
        is overwritten. Logits are those of a row at a time.
        """
        images, columns = len(log_p), self.raster.columns

        def apart(exact: Float[Tensor, "b m v"], first: int) -> Float[Tensor, "b m"]:
            return (log_p[:, first : first + exact.shape[1]].exp() - exact.exp()).abs().sum(-1) / 2

        found = [apart(self.sampling.log_probs(self.first_logits, self.places[:1].expand(images, -1)), 0)]
        features = read_tokens(self.target, self.cache, self.tokens[:, :-1], size=columns)[0].features
        for first in range(1, self.count, columns):
            block = features[:, :, first - 1 : first - 1 + columns]
            places = self.places[first : first + columns].expand(images, -1)
            found.append(apart(self._distributions(self.target.head(block), places)[1], first))
        return torch.cat(found, 1)
