"""The target of decoding: its raster of tokens, and the scores that it returns."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lantern.core.types.prompt import Condition, Prompt

if TYPE_CHECKING:
    from lantern.core.sampling import Sampling


# (logits (b r n v), token numbers (b n), width=, purpose=) -> the best tokens (b n width)
Sampler = Callable[..., Tensor]
# the same, purpose None for no noise -> (the best tokens (b n width), log q (b n v))
Ranker = Callable[..., tuple[Tensor, Tensor]]


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

    Row i is of what follows input i. `fused` holds the inputs of the layers that a drafter's `taps` name, side by side;
    None without taps. The scores of a step have a leading image axis.
    """

    logits: Float[Tensor, "*rows n v"]
    features: Float[Tensor, "*rows n c"]
    fused: Float[Tensor, "*rows n k"] | None = None


class Target:
    """The model whose distribution is sampled. It has no notion of trees, temperature or drafters.

    A call scores embedded inputs `(rows n c)` at `positions`: `config.cls_token_num` plus the number of the token in
    raster order; targets add the length of a prompt (`Prompt.first`) and newlines themselves. The mask is over cache
    slots. `Transformer` and `TransformersTarget` are targets, and so is what `Engine.prepare` makes of one, with faster
    ways where an engine has them: `make_uniforms` is a `noise.random_uniforms` with the same numbers. Unless it
    `follows_masks`, all nodes of a pass see the tokens committed before node 0.
    """

    config: Any
    tok_embeddings: Any
    output: Any
    follows_masks: bool = True
    make_uniforms: Callable[..., Tensor] | None = None

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

    def features(
        self,
        inputs: Float[Tensor, "rows n c"],
        positions: Int[Tensor, "rows n"],
        mask: Float[Tensor, "rows n s"] | Bool[Tensor, "rows n s"] | None = None,
        *,
        cache: Any = None,
        slots: Int[Tensor, "rows n"] | None = None,
    ) -> Float[Tensor, "rows n c"]:
        """Return the features of n inputs, without the head, in passes that need not be compiled for their size."""
        raise NotImplementedError

    def parameters(self) -> Iterator[Tensor]:
        """Return the weights."""
        raise NotImplementedError

    def head(self, features: Float[Tensor, "rows n c"]) -> Float[Tensor, "rows n v"]:
        """Map features to fp32 logits; their bits may differ from those of a call."""
        raise NotImplementedError

    def sampler(self, sampling: "Sampling", noise: Any) -> Sampler | None:
        """Return a function that samples the best tokens by log p + g directly from logits, or None.

        It takes logits `(b r n v)`, token numbers `(b n)`, `width` and the noise's `purpose`, and returns `(b n
        width)`, best first. With one row of logits the logits count as guided. The best token is bit for bit
        `(sampling.scores(logits, places) + noise.gumbel(places)).argmax(-1)`.
        """
        return None

    def ranker(self, sampling: "Sampling", noise: Any) -> Ranker | None:
        """Return a function that ranks children directly from logits and also returns log q, or None.

        It takes what the function of `sampler` takes; with `purpose` None tokens are ranked without noise. It returns
        the best tokens by log q + g `(b n width)` and `sampling.log_probs(logits, places)`, up to rounding.
        """
        return None

    def walk(self, verifier: Any, tree: Any, rows: Any) -> Any:
        """Return the `Verdict` of `verifier.verify(tree, rows, rows.noise)`, or None where it must verify itself."""
        return None

    def refresh(self) -> None:
        """Rebuild what was made from the weights if they have changed."""
