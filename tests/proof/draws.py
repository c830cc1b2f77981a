"""Whole images of a toy world, sampled by the ten thousand along the batch axis with the real classes.

Each run has its own noise for each purpose and token number. The noise is used as in the decoding loop: a token number
that a step leaves open has the same noise in the next step, and positions past the end use the noise of the last token.
"""

import copy
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from lantern.core.sampling import Noise, Purpose
from lantern.core.types import Condition, DraftMode, DraftTree, Step, TreeShape, Verdict, Verifier
from lantern.drafters.trees import StaticTree
from lantern.drafters.windows import JacobiDrafter
from tests.proof.enumeration import Spoil, node_strings
from tests.proof.worlds import GivenRows, World
from tests.tiny import tiny_prompt

RUNS = 50_000  # find each fault that moves 3 % of the probability of 256 strings with a chance of 99 %
LANES = 6  # uniforms of a token number: of the children of a node, or of all nodes of a tree
FEW = 10  # expected counts below this are pooled


class BulkNoise(Noise):
    """Independent noise of many runs. Each table is made at first use, by its own generator."""

    def __init__(self, runs: int, places: int, tokens: int, seed: int) -> None:
        self.runs, self.places, self.tokens, self.seed = runs, places, tokens, seed
        self._rows = torch.arange(runs)[:, None]
        self._tables: dict[tuple[Any, ...], Tensor] = {}

    def gumbel(self, positions: Int[Tensor, "b n"], purpose: int = Purpose.TARGET) -> Float[Tensor, "b n v"]:
        """Return a row for each token number; past the end, the row of the last one."""
        name = ("gumbel", int(purpose))
        if name not in self._tables:
            table = torch.empty(self.runs, self.places, self.tokens)
            self._tables[name] = table.exponential_(generator=self.generator(int(purpose))).log_().neg_()
        places = self._rows * self.places + positions.clamp(0, self.places - 1)
        rows = self._tables[name].view(-1, self.tokens).index_select(0, places.flatten())
        return rows.view(*positions.shape, self.tokens)

    def uniform(self, positions: Tensor, lanes: int, *, purpose: int = 3, iterations: Tensor | None = None) -> Tensor:
        """Return lanes of each token number, past the end those of the last one. They differ between iterations."""
        name = ("uniform", int(purpose), iterations is None)
        if name not in self._tables:
            size = (self.runs, 1 if iterations is None else self.places, self.places, LANES)
            generator = self.generator(10 + 2 * int(purpose) + (iterations is None))
            self._tables[name] = torch.rand(size, dtype=torch.float64, generator=generator)
        iteration = self._rows * 0 if iterations is None else iterations[:, None]
        return self._tables[name][self._rows, iteration, positions.clamp(0, self.places - 1), :lanes]

    def at(self, rows: Int[Tensor, " m"]) -> "BulkNoise":
        """Return the noise of some of the runs; tables are shared."""
        some = copy.copy(self)
        some._rows = rows[:, None]
        return some

    def generator(self, stream: int) -> torch.Generator:
        """Return a generator with the same seed at every call."""
        return torch.Generator().manual_seed(self.seed * 100 + stream)


# The noise depends on neither verifier nor tree, so all pairs share it.
bulk_noise = lru_cache(maxsize=1)(BulkNoise)


@dataclass(frozen=True)
class Sampled:
    """Counts of whole strings, and how many differ from those of plain decoding with the same noise."""

    counts: Int[Tensor, " w"]
    unlike_plain: int

    def p_value(self, distribution: Float64[Tensor, " w"]) -> float:
        return p_value(self.counts.double(), distribution * self.counts.sum())


def p_value(counts: Float64[Tensor, " w"], expected: Float64[Tensor, " w"]) -> float:
    """Return the p-value of Pearson's chi-square test. Cells with few expected counts are pooled."""
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    is_few = expected < FEW
    counts = torch.cat([counts[~is_few], counts[is_few].sum()[None]])
    expected = torch.cat([expected[~is_few], expected[is_few].sum()[None]])
    if expected[-1] < FEW:
        counts, expected = counts[:-1], expected[:-1]
    assert len(counts) > 1, "a distribution on one string tests nothing"
    statistic = ((counts - expected).square() / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


def draw(
    world: World,
    verifier: Verifier,
    mode: DraftMode,
    tree: StaticTree,
    *,
    spoil: Spoil | None = None,
    is_fresh: bool = False,
    runs: int = RUNS,
) -> Sampled:
    """Decode many images with a tree, whose samples are `is_fresh` in every node and step or share their noise."""
    noise = bulk_noise(runs, world.count, world.tokens, 0)
    return tally(world, noise, decode(world, verifier, mode, tree, noise, spoil, is_fresh))


def draw_windows(world: World, verifier: Verifier, window: int, init: str, runs: int = RUNS) -> Sampled:
    """Decode many images with the real Jacobi drafter."""
    noise = bulk_noise(runs, world.count, world.tokens, 0)
    return tally(world, noise, decode_windows(world, verifier, window, init, noise))


def tally(world: World, noise: BulkNoise, strings: Int[Tensor, " b"]) -> Sampled:
    counts = torch.bincount(strings - world.first_whole, minlength=world.tokens**world.count)
    return Sampled(counts, int((strings != plain(world, noise)).sum()))


@lru_cache(maxsize=1)
def plain(world: World, noise: BulkNoise) -> Int[Tensor, " b"]:
    strings = torch.zeros(noise.runs, dtype=torch.long)
    for place in range(world.count):
        log_p = world.look_up(world.single.logs.p, strings)
        token = (log_p + noise.gumbel(torch.full((len(strings), 1), place))[:, 0]).argmax(-1)
        strings = strings * world.tokens + 1 + token
    return strings


class Progress:
    """Incomplete strings, and the number of known tokens of each."""

    def __init__(self, world: World, runs: int) -> None:
        self.world = world
        self.strings = torch.zeros(runs, dtype=torch.long)
        self.known = torch.zeros_like(self.strings)

    @property
    def is_done(self) -> bool:
        return bool((self.known >= self.world.count).all())

    def verify(self, verifier: Verifier, draft: DraftTree, noise: BulkNoise) -> Verdict:
        """Verify trees whose roots are the ends of the strings."""
        places = (self.known[:, None] + draft.shape.depths).clamp(max=self.world.count - 1)
        strings = node_strings(self.world, draft.tokens, draft.shape, self.strings)
        rows = GivenRows(self.world.single.log_p(strings), places, noise)
        return verifier.verify(draft, rows, noise)

    def take(self, tokens: Int[Tensor, "b m"], counts: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
        """Append the first `counts` tokens that fit; return how many did."""
        before = self.known
        for step in range(tokens.shape[1]):
            is_new = (step < counts) & (self.known < self.world.count)
            self.strings = torch.where(is_new, self.strings * self.world.tokens + 1 + tokens[:, step], self.strings)
            self.known = self.known + is_new
        return self.known - before


def committed(draft: DraftTree, verdict: Verdict) -> Int[Tensor, "b m"]:
    tokens = torch.nn.functional.pad(draft.tokens.gather(1, verdict.path), (0, 1))
    return tokens.scatter(1, verdict.length[:, None], verdict.next_token[:, None])


def decode(
    world: World,
    verifier: Verifier,
    mode: DraftMode,
    tree: StaticTree,
    noise: BulkNoise,
    spoil: Spoil | None = None,
    is_fresh: bool = False,
) -> Int[Tensor, " b"]:
    made, rows = torch.zeros(noise.runs, dtype=torch.long), torch.arange(noise.runs)
    progress, private = Progress(world, noise.runs), noise.generator(50)
    while len(rows):
        noise = noise.at(rows)
        draft = drafted(world, mode, tree, noise, progress, private, is_fresh)
        draft = spoil(draft) if spoil else draft
        verdict = progress.verify(verifier, draft, noise)
        progress.take(committed(draft, verdict), verdict.length + 1)
        made[rows] = progress.strings
        is_open = progress.known < world.count
        rows, progress.strings, progress.known = rows[is_open], progress.strings[is_open], progress.known[is_open]
    return made


def decode_windows(world: World, verifier: Verifier, window: int, init: str, noise: BulkNoise) -> Int[Tensor, " b"]:
    """Decode with a Jacobi window: the first token without a draft, then step by step."""
    progress = Progress(world, noise.runs)
    config: Any = SimpleNamespace(config=SimpleNamespace(block_size=world.count, vocab_size=world.tokens))
    drafter = JacobiDrafter(config, window=window, init=init, keeps_distributions="jacobi" in verifier.modes)
    root = DraftTree(torch.zeros(noise.runs, 1, dtype=torch.long), TreeShape.chain(0, torch.device("cpu")), "jacobi")
    first = progress.verify(verifier, root, noise).next_token
    progress.take(first[:, None], torch.ones_like(first))
    none: Any = None
    drafter.begin(tiny_prompt(torch.zeros(noise.runs, 1, 1, 1), Condition(labels=first)), noise)
    drafter.observe(Step(0, first * 0, torch.ones_like(first), first[:, None], none))
    while not progress.is_done:
        draft, known = drafter.propose(), progress.known
        verdict = progress.verify(verifier, draft, noise)
        tokens = committed(draft, verdict)
        counts = progress.take(tokens, verdict.length + 1)
        drafter.observe(Step(0, known, counts, tokens, none, draft, verdict))
    return progress.strings


def drafted(
    world: World,
    mode: DraftMode,
    tree: StaticTree,
    noise: BulkNoise,
    progress: Progress,
    private: torch.Generator,
    is_fresh: bool,
) -> DraftTree:
    """Return trees below the strings. Nodes of one depth share the noise of their token number, as in drafters."""
    shape, runs = tree.shape(), len(progress.strings)
    tokens = torch.zeros(runs, shape.num_nodes, dtype=torch.long)
    distributions = torch.zeros(runs, shape.num_nodes, world.tokens)
    for node in range(shape.num_nodes):
        children = [i for i in range(1, shape.num_nodes) if int(shape.parents[i]) == node]
        if not children:
            continue
        below = node_strings(world, tokens, shape, progress.strings)[:, node]
        distributions[:, node] = world.single.log_q(below)
        place = (progress.known + int(shape.depths[node]))[:, None]
        tokens[:, children] = siblings(distributions[:, node], mode, noise, place, len(children), private, is_fresh)
    return DraftTree(tokens, shape, mode, distributions)


def siblings(
    log_q: Float[Tensor, "b v"],
    mode: DraftMode,
    noise: BulkNoise,
    place: Int[Tensor, "b 1"],
    count: int,
    private: torch.Generator,
    is_fresh: bool = False,
) -> Int[Tensor, "b k"]:
    """Return children in sampling order. "point" takes the best tokens of q; its third sibling repeats the first."""
    if mode == "iid":
        fresh = torch.empty(len(log_q), count, log_q.shape[1]).exponential_(generator=private).log_()
        return (log_q[:, None] - fresh).argmax(-1)
    if mode == "point":
        best = log_q.topk(count).indices
        best[:, 2:] = best[:, :1]
        return best
    if is_fresh:
        return (log_q - torch.empty_like(log_q).exponential_(generator=private).log_()).topk(count).indices
    purpose = Purpose.TARGET if mode == "gumbel" else Purpose.DRAFT
    return (log_q + noise.gumbel(place, purpose)[:, 0]).topk(count).indices
