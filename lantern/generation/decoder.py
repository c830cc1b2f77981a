"""A method built for a target: `build_decoder` makes it, its `generate` decodes a batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxtyping import Float, Int32
from torch import Tensor, nn

from lantern.core.prepared import on_device
from lantern.core.sampling import Sampling
from lantern.core.types import Callback, Condition, Drafter, Generation, Target, Verifier
from lantern.decoding.loop import State, begin, check_modes, run
from lantern.decoding.plain import NoDrafts, Plain
from lantern.decoding.prompt import PromptCache
from lantern.decoding.row_front import RowFront
from lantern.engines.engine import EAGER, Engine
from lantern.engines.engine import engine as make_engine
from lantern.methods import Method, find
from lantern.methods.method import Promise, build
from lantern.verifiers.gumbel import GumbelVerifier


@dataclass
class Decoder:
    """A method built for a target. It decodes one batch at a time and is not for several threads.

    Plain decoding has no drafter and no verifier, nor has a method with a driver of its own. `prompts` keeps prompts
    between calls.
    """

    method: Method
    target: Target
    sampling: Sampling
    drafter: Drafter | None
    verifier: Verifier | None
    prompts: PromptCache | None = None
    engine: Engine = EAGER
    _kept: State | None = None

    def begin(self, condition: Condition, *, is_joined: bool = False, **how: Any) -> State:
        """Begin a generation, as `decoding.loop.begin` with its arguments.

        With `is_joined` its rounds can be joined with those of others (`Engine.drive`).
        """
        self.target.refresh()
        fuses = self.engine.fuses_plain(self.sampling)
        with on_device(self.target.tok_embeddings.weight.device):
            return begin(
                self._state(is_joined and (how.get("forced") is not None or not fuses)),
                condition,
                is_wide=self.engine.is_wide,
                **{"prompts": self.prompts, **how},
            )

    def generate(
        self,
        condition: Condition,
        *,
        callback: Callback | None = None,
        interval: float = 0.0,
        keep_history: bool = False,
        **how: Any,
    ) -> Generation:
        """Decode a batch; the arguments are those of `decoding.loop.run` and `begin`."""
        state = self.begin(condition, **how)
        with on_device(self.target.tok_embeddings.weight.device):
            rounds = self.engine.drive([state])
            return run(state, rounds, callback=callback, interval=interval, keep_history=keep_history)

    def _state(self, is_joined: bool) -> State:
        """Return the state of a generation; an engine that keeps it has one for all."""
        if self._kept is not None:
            return self._kept
        if (driver := self.method.made.driver) is not None:
            made: State = RowFront(self.target, self.sampling, **driver.named)
        elif self.drafter is not None and self.verifier is not None:
            made = State(self.target, self.sampling, self.drafter, self.verifier)
        elif is_joined:
            made = State(self.target, self.sampling, NoDrafts(), GumbelVerifier())
        else:
            made = Plain(self.target, self.sampling)
        made.may_look = not self.engine.captures and self.target.tok_embeddings.weight.device.type == "cpu"
        if self.engine.captures:
            self._kept = made
        return made

    def promise(self, images: int) -> Promise:
        """Return what the images of a batch have in common with plain decoding's, as this engine keeps it."""
        promise, config = self.method.promise, self.target.config
        if promise == "tokens" and config.family != "llamagen" and config.processes > 1:
            return "distribution"  # sums round in another order
        if promise != "tokens" or self.drafter is None:
            return promise
        keeps = self.engine.keeps_bits(self.target, self.drafter.max_nodes, images * self.sampling.rows)
        return "tokens" if keeps else "distribution"


def build_decoder(
    method: str | Method,
    target: Target,
    *,
    sampling: Sampling,
    drafter_module: nn.Module | None = None,
    add_ons: Mapping[str, nn.Module] = MappingProxyType({}),
    neighbours: Int32[Tensor, "v k"] | None = None,
    codebook: Float[Tensor, "v d"] | None = None,
    prompts: PromptCache | None = None,
    engine: Engine = EAGER,
) -> Decoder:
    """Build the decoder of a method.

    `drafter_module` is the model's own drafter, `add_ons` its other trained networks by name, as
    `lantern.models.folder` reads them. Relaxations need `neighbours`, the proximity table, or `codebook`, the vectors
    of the tokens; with the codebook they also report the latent distance that they moved.

    ValueError for an unknown name, for what the method needs and the model lacks, and for components that do not fit.
    """
    method = find(method) if isinstance(method, str) else method
    engine = engine.resolve(target)
    if method.made.drafter is None:
        return Decoder(method, engine.prepare(target), sampling, None, None, prompts, engine)
    while True:
        prepared = engine.prepare(target)
        give = {
            "target": prepared,
            "sampling": sampling,
            "drafter": None if drafter_module is None else engine.prepare_part(drafter_module),
            "parts": {name: engine.prepare_part(add_ons[name]) for name in method.made.parts if name in add_ons},
            "neighbours": neighbours,
            "codebook": codebook,
        }
        drafter, verifier = build(method, give, greedy=sampling.is_greedy)
        check_modes(drafter, verifier)
        reason = engine.why_not(target, drafter)
        if reason is None:
            return Decoder(method, prepared, sampling, drafter, verifier, prompts, engine)
        if not engine.reason or engine.name == "eager":
            raise ValueError(f'method "{method.name}": {reason}')
        # The engine was chosen automatically and does not suit this drafter.
        engine = make_engine("eager", weights=engine.weights, reason=reason)
