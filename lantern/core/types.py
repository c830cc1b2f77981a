"""Data types of speculative decoding and the protocols of its parts.

Every tensor has a leading image axis b. With guidance one image has r = 2 rows, first conditional, then unconditional;
only the target and drafters that read guidance rows see this inner axis. p is the target's distribution and q the
draft's, both after guidance and filters. Row i of either is the distribution of what FOLLOWS node i, so siblings share
a row.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from lantern.core.sampling import Noise, Sampling


@dataclass(frozen=True)
class Condition:
    """Condition of a batch of images: caption features, class labels, or the tokens of each guidance row.

    Features come left-padded with their mask (b t). Tokens come left-padded with their mask (b 2 t), the conditional
    row first; the rows of an image may differ in length. `negative` holds caption features that take the place of the
    unconditional caption in the other guidance row. ValueError unless exactly one kind is given, for a batch of no
    images, for a mask whose shape is not that of the features or tokens, and for a negative of another kind or batch.
    """

    embeddings: Float[Tensor, "b t e"] | None = None
    mask: Bool[Tensor, "b t"] | Bool[Tensor, "b r t"] | None = None
    labels: Int[Tensor, " b"] | None = None
    tokens: Int[Tensor, "b r t"] | None = None
    negative: "Condition | None" = None

    def __post_init__(self) -> None:
        if sum(part is not None for part in (self.embeddings, self.labels, self.tokens)) != 1:
            raise ValueError("a condition is caption embeddings with their mask, or class labels: give one of them")
        for name, given, size in (("caption", self.embeddings, 2), ("token", self.tokens, 3)):
            if given is not None and (self.mask is None or self.mask.shape != given.shape[:size]):
                got = None if self.mask is None else list(self.mask.shape)
                raise ValueError(f"the {name} mask is {got}, wanted {list(given.shape[:size])} like the {name}s")
        if self.batch < 1:
            raise ValueError("the condition is of 0 images, wanted at least 1")
        if self.negative is not None and (
            self.embeddings is None or self.negative.embeddings is None or self.negative.batch != self.batch
        ):
            raise ValueError("a negative condition is caption embeddings, one for each image of caption embeddings")

    @property
    def batch(self) -> int:
        """Number of images."""
        return next(len(part) for part in (self.embeddings, self.labels, self.tokens) if part is not None)

    def to(self, device: torch.device | str) -> "Condition":
        """Return the condition on another device."""
        return self._map(lambda part: part.to(device))

    def select(self, images: Sequence[int]) -> "Condition":
        """Return the condition of some of the images, in this order."""
        return self._map(lambda part: part[list(images)])

    @classmethod
    def joined(cls, parts: "Sequence[Condition]") -> "Condition":
        """Return the condition of several batches of one kind with as many slots; all or none have a negative.

        ValueError for others.
        """
        given, negatives = [part._given() for part in parts], [part.negative for part in parts if part.negative]
        kinds = {tuple(None if one is None else one.shape[1:] for one in some) for some in given}
        if len(kinds) > 1 or len(negatives) not in (0, len(parts)):
            raise ValueError("conditions of one kind with as many slots are joined, with negative ones for all or none")
        joined = (None if some[0] is None else torch.cat(some) for some in zip(*given, strict=True))  # type: ignore[arg-type]
        return cls(*joined, negative=cls.joined(negatives) if negatives else None)

    def _given(self) -> tuple[Tensor | None, ...]:
        return self.embeddings, self.mask, self.labels, self.tokens

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Condition":
        changed = (None if part is None else change(part) for part in self._given())
        return Condition(*changed, negative=None if self.negative is None else self.negative._map(change))


@dataclass(frozen=True)
class Prompt:
    """All that tokens and drafters see of the prompts of b images, as `Target.read` returns it.

    `entries` are the keys and values of each layer, in the cache's dtype; `scores` are added to the attention scores of
    their p slots: 0, log n where a slot stands for n words, -inf for padding. `first` plus `config.cls_token_num` is
    the position of token 0, `logits` are its logits. `features` are those of the last slot, or of all slots with their
    `mask`, and `tapped` the inputs of tapped layers there, side by side; None where the drafter taps none. `condition`
    is what was read, for drafters that are models of their own; None for parts of a batch.
    """

    entries: Float[Tensor, "b l 2 r h p d"]
    scores: Float[Tensor, "b r p"]
    first: Int[Tensor, "b r"]
    logits: Float[Tensor, "b r 1 v"]
    features: Float[Tensor, "b r t c"]
    mask: Bool[Tensor, "b t"]
    tapped: Float[Tensor, "b r t k"] | None = None
    condition: Condition | None = None

    def at(self, image: int) -> "Prompt":
        """Return the prompt of one image, as a batch of one, without slots that are padding in all of its rows."""
        one = slice(image, image + 1)
        found = Prompt(*(None if part is None else part[one] for part in self._parts()))  # type: ignore[arg-type]
        hidden = int((found.scores == -torch.inf).all(1).long().cumprod(-1).sum())
        return found.with_slots(max(found.scores.shape[-1] - hidden, 1)) if hidden else found

    @classmethod
    def joined(cls, parts: "Sequence[Prompt]") -> "Prompt":
        """Return the prompts of several batches, padded to the longest."""
        longest = max(part.scores.shape[-1] for part in parts)
        lists = zip(*(part.with_slots(longest)._parts() for part in parts), strict=True)
        return cls(*(None if some[0] is None else torch.cat(some) for some in lists))  # type: ignore[arg-type]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self._parts() if part is not None)

    def with_slots(self, count: int) -> "Prompt":
        """Return the prompts with this number of slots, cut or padded on the left."""
        if (missing := count - self.scores.shape[-1]) == 0:
            return self
        entries, scores = pad(self.entries, (0, 0, missing, 0)), pad(self.scores, (missing, 0), value=-torch.inf)
        return replace(self, entries=entries.contiguous(), scores=scores)

    def _parts(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)[:-1]]


DraftMode = Literal["point", "sampled", "iid", "gumbel", "jacobi"]


@dataclass(frozen=True)
class TreeShape:
    """Parents of the nodes of a tree: node 0 is the root (the last committed token), parents precede children.

    `parents`, `ranks` (place among its siblings, in the order of sampling) and `depths` are `(n)`, or `(b n)` if images
    differ; the root is its own parent. `ancestors[i, j]`: j is i or an ancestor of i. `widths[d]` is the largest
    number of children of a node of depth d, known on the host; both it and its length may be upper bounds.
    """

    parents: Int[Tensor, "*b n"]
    ranks: Int[Tensor, "*b n"]
    depths: Int[Tensor, "*b n"]
    ancestors: Bool[Tensor, "*b n n"]
    widths: tuple[int, ...]

    @staticmethod
    @cache
    def chain(depth: int, device: torch.device) -> "TreeShape":
        """Return the shape of a tree without branches; one of depth 0 is the root alone."""
        nodes = torch.arange(depth + 1, device=device)
        ancestors = nodes[:, None] >= nodes
        return TreeShape((nodes - 1).clamp(min=0), torch.zeros_like(nodes), nodes, ancestors, (1,) * depth)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, the root included."""
        return self.parents.shape[-1]

    @property
    def depth(self) -> int:
        """Depth of the deepest node, or more."""
        return len(self.widths)

    @property
    def has_children(self) -> Bool[Tensor, "*b n"]:
        """Which nodes are not leaves."""
        inner = torch.zeros_like(self.parents, dtype=torch.bool)
        return inner.scatter(-1, self.parents[..., 1:], True)


def ancestors_of(parents: Int[Tensor, "*b n"], depth: int) -> Bool[Tensor, "*b n n"]:
    """Return for each node which nodes are itself or above it, in trees of at most this depth."""
    found = torch.eye(parents.shape[-1], dtype=torch.bool, device=parents.device).expand(*parents.shape, -1)
    above, reach = parents, 1
    while reach <= depth:  # every round doubles the number of known ancestors
        found = found | found.gather(-2, above[..., None].expand_as(found))
        reach *= 2
        above = above.gather(-1, above) if reach <= depth else above
    return found


@dataclass(frozen=True)
class Traits:
    """A drafter's data about the nodes that it drafted, from which tree policies are trained.

    `nodes` holds per node the numbers that `lantern.drafters.policies.TRAITS` names, undefined at the root;
    `beams` for each depth from 1 on the best log-probabilities of the nodes whose children were drafted.
    """

    nodes: Float[Tensor, "b n t"]
    beams: Float[Tensor, "b d w"]


@dataclass(frozen=True)
class DraftTree:
    """A drafter's guess: a token for each node, and for rejection the distributions that they were sampled from.

    `mode` is how children were chosen: "point" (without randomness), "sampled" (without replacement, in the order of
    sampling; traversal needs `Noise.fresh`), "iid" (independently), "gumbel" (top-K of log q + the target's own noise),
    "jacobi" (a chain of which each token was sampled from its recorded distribution, given the tokens before it). Row i
    of `log_q` is the distribution from which the children of node i were sampled; rows of leaves are undefined.
    `inner_nodes` have children, the root included; None where they may differ between images.
    """

    tokens: Int[Tensor, "b n"]
    shape: TreeShape
    mode: DraftMode
    log_q: Float[Tensor, "b n v"] | None = None
    inner_nodes: Int[Tensor, " m"] | None = None
    traits: Traits | None = None


# (logits (b r n v), token numbers (b n), width=, purpose=, grid=, total=) -> the best tokens (b n width)
Sampler = Callable[..., Tensor]
# the same, purpose None for no noise, and spread= -> (the best tokens (b n width), log q (b n v), the tokens' chances)
Ranker = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Raster:
    """A grid of tokens in reading order, as decoding sees it, and what surrounds it in the target's token sequence.

    `newline` is the token that follows each row of tokens but the last, or None. The decoding loop counts tokens only;
    the target passes newlines itself, and the cache has slots for them. What follows the grid is not generated.
    """

    rows: int
    columns: int
    newline: int | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of an image."""
        return self.rows * self.columns

    @property
    def newlines(self) -> int:
        """Number of newlines that the target reads."""
        return 0 if self.newline is None else self.rows - 1


@dataclass(frozen=True)
class Scores:
    """What a pass gives for n inputs: fp32 logits, before guidance and filters, and features after the final norm.

    Row i is of what follows input i. `tapped` are the inputs of the layers that a drafter's `taps` name, side by side;
    None without taps. The scores of a step have a leading image axis.
    """

    logits: Float[Tensor, "*rows n v"]
    features: Float[Tensor, "*rows n c"]
    tapped: Float[Tensor, "*rows n k"] | None = None


class Target:
    """The model whose distribution is sampled. It has no notion of trees, temperature or drafters.

    A call scores embedded inputs `(rows n c)` at `positions`: `config.cls_token_num` plus the number of the token in
    raster order; targets add the length of a prompt (`cache.first`, from `Prompt.first`) and newlines themselves. The
    mask is over cache slots; `cache.write(layer, slots, entries)` stores the keys and values `(rows n 2 h d)` of a
    layer and returns those of all slots. `config` has the fields of `TargetSizes`.
    `Transformer` and `TransformersTarget` are targets, and so is what `Engine.prepare` makes of one, with faster ways
    where an engine has them: `make_gumbel` is a `sampling.random_gumbel` with the same noise. Unless it
    `follows_masks`, all nodes of a pass see the tokens committed before node 0, whatever the mask is there.
    """

    config: Any
    tok_embeddings: Any
    output: Any
    training: Any  # whether dropout is on
    follows_masks: bool = True
    make_gumbel: Callable[..., None] | None = None

    def read(self, condition: Condition, rows: int, *, whole: bool = False, taps: tuple[int, ...] = ()) -> Prompt:
        """Read the first `rows` guidance rows of prompts.

        With `whole` features are those of all conditioning slots, padding included. `taps` are layers whose inputs are
        returned too. ValueError for a condition of another kind or with too many slots, and where a target has no
        slots that guidance rows share.
        """
        raise NotImplementedError

    def __call__(
        self,
        inputs: Float[Tensor, "rows n c"],
        positions: Int[Tensor, "rows n"],
        mask: Float[Tensor, "rows n s"] | Bool[Tensor, "rows n s"] | None = None,
        *,
        cache: Any = None,
        slots: Int[Tensor, "rows n"] | None = None,
        taps: tuple[int, ...] = (),
    ) -> Scores:
        """Score n inputs; `taps` are layers whose inputs are returned too."""
        raise NotImplementedError

    def features(self, *where: Any, **how: Any) -> Float[Tensor, "rows n c"]:
        """Return the features of n inputs, given as to a call, in passes that need not be compiled for their size."""
        raise NotImplementedError

    def parameters(self) -> Iterator[Tensor]:
        """Return the weights."""
        raise NotImplementedError

    def head(self, features: Float[Tensor, "rows n c"]) -> Float[Tensor, "rows n v"]:
        """Map features to fp32 logits; their bits may differ from those of a call."""
        raise NotImplementedError

    def sampler(self, sampling: Sampling, noise: Any) -> Sampler | None:
        """Return a function that samples the best tokens by log p + g directly from logits, or None.

        It takes logits `(b r n v)`, token numbers `(b n)`, `width` and the noise's `purpose`, and returns `(b n
        width)`, best first. With one row of logits the logits count as guided. The best token is that of
        `(sampling.scores(logits, places) + noise.gumbel(places)).argmax(-1)`: in C++ bit for bit, on a GPU but for the
        rounding of the division by the temperature. Given `grid` (b t) and `total` (b), the best tokens are written to
        their places of the grids, and `total` becomes NaN or infinite where logits are that the tokens depend on.
        """
        return None

    def ranker(self, sampling: Sampling, noise: Any) -> Ranker | None:
        """Return a function that ranks children directly from logits and also returns log q, or None.

        It takes what the function of `sampler` takes; with `purpose` None tokens are ranked without noise. It returns
        the best tokens by log q + g `(b n width)`, `sampling.log_probs(logits, places)`, up to rounding, and of the
        best tokens log softmax((log q + g) / `spread`), whose default is 1.
        """
        return None

    def walk(self, verifier: Any, tree: Any, rows: Any) -> Any:
        """Return the `Verdict` of `verifier.verify(tree, rows, rows.noise)`, or None where it must verify itself."""
        return None

    def refresh(self) -> None:
        """Rebuild what was made from the weights if they have changed."""


class Rows(ABC):
    """The target's distribution p: row i is of what follows node i of a tree, which is token number `places[:, i]`.

    With `may_stop` the host may look at values: a row is computed when it is read, so that a verifier reads only the
    nodes that it visits, and stops as soon as it is done. Otherwise all rows are computed once, and a verifier runs the
    same operations whatever the values, without waiting for the device. Both give the same bits.
    """

    places: Int[Tensor, "b n"]
    may_stop: bool

    @abstractmethod
    def log_p(self, nodes: Int[Tensor, "b m"] | None = None) -> Float[Tensor, "b m v"]:
        """Return the log-probabilities of what follows these nodes of each image (None: all)."""

    def rounded_log_p(self, nodes: Int[Tensor, "b m"] | None = None) -> Float[Tensor, "b m v"]:
        """Return `log_p` with bits that depend on the logits only, by `rounded_log_softmax`, where there are logits."""
        return self.log_p(nodes)

    @abstractmethod
    def sample(self, nodes: Int[Tensor, "b m"] | None = None) -> Int[Tensor, "b m"]:
        """Return what plain decoding samples after these nodes, argmax(log p + g) (None: all)."""

    def untruncated(self) -> "Rows":
        """Return the rows at temperature 1 without filters, whatever the sampling."""
        return self


def rows_at(values: Float[Tensor, "b n v"], nodes: Int[Tensor, "b m"], may_look: bool = False) -> Tensor:
    """Return the rows `(b m v)` of these nodes of each image; with `may_look` that of a single one without a copy."""
    if may_look and nodes.numel() == 1:
        return values.narrow(1, int(nodes), 1)
    return values[torch.arange(len(nodes), device=nodes.device)[:, None], nodes]


@dataclass(frozen=True)
class Cost:
    """What a relaxation cost on the accepted path, or in tests of one token each (without the axis d).

    `relaxed[:, j]` is the probability that path node j was accepted only because of the relaxation (0 or 1 where the
    test decides it). `total_variation[:, j]` is the total variation at the node before it (j = length: at the node that
    gave the next token), and `latent_distance[:, j]` the sum of the mass moved there times its L2 distance, None where
    the tokens' vectors are not known. `bound` is what the rule is set to keep of the total variation, None without one.
    """

    relaxed: Float[Tensor, "b d"]
    total_variation: Float[Tensor, "b d1"]
    latent_distance: Float[Tensor, "b d1"] | None = None
    bound: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What a verifier keeps of a tree: the first `length` nodes of `path` (without the root), then `next_token`.

    Entries of `path` past `length` are 0. `cost` is None for exact verifiers. `samples` continue a Jacobi window: the
    token sampled after each node, committed ones first, and `log_q` the distributions that they were sampled from.
    `samples` is None if not all nodes were read, `log_q` where tokens were sampled with the
    target's own noise, which needs no recorded distribution.
    """

    path: Int[Tensor, "b d"]
    length: Int[Tensor, " b"]
    next_token: Int[Tensor, " b"]
    samples: Int[Tensor, "b n"] | None = None
    log_q: Float[Tensor, "b n v"] | None = None
    cost: Cost | None = None

    @cached_property
    def walked(self) -> Int[Tensor, "b d1"]:
        """The root, and the path."""
        return pad(self.path, (1, 0))


@runtime_checkable
class Verifier(Protocol):
    """Decides how much of a tree is kept."""

    @property
    def modes(self) -> frozenset[str]:
        """The draft modes that it can verify."""
        ...

    @property
    def is_exact(self) -> bool:
        """Whether tokens follow the target's own distribution."""
        ...

    def verify(self, tree: DraftTree, rows: Rows, noise: Noise) -> Verdict:
        """Keep a path of the tree, and sample the token behind it; a tree of one node gives that token only.

        A tree without log q is tested as point drafts, or, where q is read for more, a ValueError.
        """
        ...


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
        return values.gather(2, self.verdict.walked[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[-1]))


Callback = Callable[[Step], bool | None]  # of each step; True ends the generation


@dataclass(frozen=True)
class Generation:
    """Finished token grids and their statistics.

    `steps` counts target passes of each image, the one over the prompt included. `reached[:, d]` counts steps that
    reached a node of depth d with children to test, `accepted[:, d]` those that accepted one. `relaxed` counts tokens
    accepted only because of a relaxation. `total_variation` is the sum of its total variation over tokens,
    `total_variation_max` the maximum over tokens, at most 1 where it is a bound, and `latent_distance` the sum of moved
    mass times L2 distance (None without codebook vectors). `excess` is the sum over tokens of what their total
    variation exceeds the rule's bound by, None for rules without one. `seconds` by phase are filled only if timed.
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
    seconds: dict[str, float] = field(default_factory=dict)


def copy_all(values: list[Tensor], into: list[Tensor]) -> None:
    """Copy tensors, on a GPU in one launch for each dtype."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for value, memory in zip(values, into, strict=True):
        old, new = groups.setdefault(value.dtype, ([], []))
        old.append(value)
        new.append(memory)
    for old, new in groups.values():
        torch._foreach_copy_(new, old)  # pyright: ignore[reportPrivateImportUsage]


def flat(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a tensor, or several, as a tuple."""
    return value if isinstance(value, tuple) else (value,)


class ImageMemory(Protocol):
    """Memory of the images of a batch."""

    def copy_image(self, place: int, other: Any, of: int) -> None:
        """Copy image `of` of another's memory of this kind, of another number of images, to a place of this batch."""
        ...


class Buffers:
    """Attributes in fixed memory: a tensor that is assigned is copied to the buffer of its name, shape and dtype.

    A step therefore finds its state where the last one left it, so that a CUDA graph can replay steps; a later
    generation of the same sizes uses the same memory. A tuple of tensors has one buffer per entry. `assign` copies
    several tensors in one launch for each dtype.
    """

    def __init__(self) -> None:
        self.__dict__["_memory"] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, tuple):
            self.__dict__[name] = tuple(self._hold(f"{name}.{i}", entry) for i, entry in enumerate(value))
        else:
            self.__dict__[name] = self._hold(name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"nothing was assigned to {name} yet")

    def assign(self, **values: Tensor) -> None:
        """Assign tensors to attributes."""
        memory = [self._of(name, value) for name, value in values.items()]
        copy_all(list(values.values()), memory)
        self.__dict__.update(zip(values, memory, strict=True))

    def copy_image(self, place: int, other: "Buffers", of: int) -> None:
        """Copy an image of those of a batch of another size to a place; tensors of one shape are not of images."""
        for name, value in self.__dict__.items():
            pairs = () if name == "_memory" else zip(flat(value), flat(other.__dict__[name]), strict=True)
            for mine, its in pairs:
                if mine.shape != its.shape:
                    assert mine.shape[1:] == its.shape[1:], f"{name} has no image axis or did not settle"
                    mine[place].copy_(its[of])

    def _hold(self, name: str, value: Tensor) -> Tensor:
        memory = self._of(name, value)
        return memory if memory is value else memory.copy_(value)

    def _of(self, name: str, value: Tensor) -> Tensor:
        """Return the buffer for a tensor."""
        key = (name, value.shape, value.dtype, value.device)
        if key not in self._memory:
            self._memory[key] = torch.empty_like(value, memory_format=torch.contiguous_format)
        return self._memory[key]


@dataclass
class DraftPlan:
    """What an engine needs to draft a drafter's static trees itself, without calling `observe` and `propose`.

    `levels` are the plans of the depths whose nodes have children (`DepthPlan`), and `order` is the place of each node
    among the root and the best tokens of all depths. With `masks` the module guesses all depths in one pass over the
    committed pairs and these masks, and the only level is of its outputs. `log_q_rows` number the distributions that
    the nodes' children are drawn from. `tokens` is the next tree once an engine has begun, and `q` its distributions
    for rejection, in fixed memory.
    """

    module: Any
    cache: Any
    shape: TreeShape
    levels: Sequence[Any]
    order: Int[Tensor, " n"]
    log_q_rows: Int[Tensor, " n"]
    masks: Float[Tensor, "m c"] | None = None
    tokens: Int[Tensor, "b n"] | None = None
    q: Float[Tensor, "b m v"] | None = None


class Drafter(ABC):
    """Guesses the next tokens of each image. One drafter serves one generation at a time.

    `mode` is how children are chosen. `max_nodes` counts the nodes of the largest tree, the root included, `depth` is
    that of the deepest tree. `taps` are layers of the target whose inputs it reads beside the features.
    `needs_whole_prefix`: it reads all of the target's conditioning slots, padding included. `records_log_q`: its trees
    carry log q. `needs_host`: the host chooses the size of a tree from the step before, which no CUDA graph replays.
    `reads_samples`: it reads a verdict's samples after every node, also after those that no path visits. `plan` is set
    by `begin` where an engine may draft the trees of a generation itself. `window` is the drafter itself if it is a
    `JacobiDrafter` whose window an engine may shift itself, without calling `observe`.

    Tensors that `begin`, `observe` and `propose` replace are kept in `Buffers` (`held`): a graph that is replayed for a
    later generation reads the same memory.
    """

    mode: DraftMode
    max_nodes: int
    depth: int
    taps: tuple[int, ...] = ()
    needs_whole_prefix: bool = False
    records_log_q: bool = True
    needs_host: bool = False
    reads_samples: bool = False
    plan: DraftPlan | None = None
    window: Any = None
    held: Any = None

    @abstractmethod
    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Drop the state of the last generation and read the prompt of the next. Token 0 follows as the first step."""

    @property
    def memory(self) -> Sequence[ImageMemory]:
        """What a round leaves to the next one: `held`, and a subclass's cache. Empty: images stay in their batch."""
        return () if self.held is None else (self.held,)

    @abstractmethod
    def observe(self, step: Step) -> None:
        """Read which tokens were committed, and the target's features at them: at most `depth` + 1 tokens."""

    @abstractmethod
    def propose(self) -> DraftTree:
        """Return a tree below the last committed token of each image, in tensors that later steps leave as they are."""
