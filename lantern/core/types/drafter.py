"""The drafter."""

from abc import ABC, abstractmethod

from jaxtyping import Float, Int
from torch import Tensor

from lantern.core.noise import Noise
from lantern.core.types.prompt import Prompt
from lantern.core.types.step import Step
from lantern.core.types.tree import DraftMode, DraftTree


class Drafter(ABC):
    """Guesses the next tokens of each image. One drafter serves one generation at a time.

    `mode` is how children are chosen. `max_nodes` counts the nodes of the largest tree, the root included, `depth` is
    that of the deepest tree. `taps` are layers of the target whose inputs it reads beside the features.
    `needs_whole_prefix`: it reads all of the target's conditioning slots, padding included. `records_log_q`: its trees
    carry log q. `needs_host`: the host chooses the size of a tree from the step before, which no CUDA graph replays.
    `reads_samples`: it reads a verdict's samples after every node, also after those that no path visits.

    Tensors that `begin`, `observe` and `propose` replace are kept in `lantern.core.buffers.Buffers`: a graph that is
    replayed for a later generation reads the same memory.
    """

    mode: DraftMode
    max_nodes: int
    depth: int
    taps: tuple[int, ...] = ()
    needs_whole_prefix: bool = False
    records_log_q: bool = True
    needs_host: bool = False
    reads_samples: bool = False

    @abstractmethod
    def begin(self, prompt: Prompt, noise: Noise) -> None:
        """Drop the state of the last generation and read the prompt of the next. Token 0 follows as the first step."""

    @abstractmethod
    def observe(self, step: Step) -> None:
        """Read which tokens were committed, and the target's features at them: at most `depth` + 1 tokens."""

    @abstractmethod
    def propose(self) -> DraftTree:
        """Return a tree below the last committed token of each image, in tensors that later steps leave as they are."""


class SampleWindow(Drafter):
    """A drafter whose tree is a chain of the target's own samples of the step before, and `nodes` long now.

    If it `is_alone`, with no state beside `tokens`, an engine may shift the window itself, without calling `observe`;
    else, with Gumbel match, its `log_q` too.
    New places are filled with `random` tokens of these numbers if `fills_randomly`, else with the last sample.
    While it `is_on_trial`, each step must be followed by `count_step`.
    """

    nodes: int
    is_alone: bool
    fills_randomly: bool
    is_on_trial: bool

    @property
    @abstractmethod
    def tokens(self) -> Int[Tensor, "b n"]:
        """The window in fixed memory: the last committed token, and the drafts behind it."""

    @property
    def log_q(self) -> Float[Tensor, "b n v"] | None:
        """The distributions of the drafts in fixed memory, the last row for none; None where they are not kept."""
        return None

    @property
    @abstractmethod
    def random(self) -> Int[Tensor, "b c"]:
        """The random token of each token number."""

    @abstractmethod
    def count_step(self, known: Int[Tensor, " b"]) -> None:
        """Count a step after which so many tokens of each image are decided; it may end the window."""
