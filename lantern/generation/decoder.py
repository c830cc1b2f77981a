"""A method built for a target: `build_decoder` makes it, its `generate` decodes a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lantern.drafters.parts import resolved
from lantern.engines.engine import EAGER, Engine, FusedDecoder
from lantern.methods import Method, find
from lantern.methods.method import Promise, build

if TYPE_CHECKING:
    from jaxtyping import Float, Int32
    from torch import Tensor, nn

    from lantern.core.sampling import Sampling
    from lantern.core.types import Condition, Drafter, Generation, Step, Target, Verifier
    from lantern.decoding.joint import RowStepper
    from lantern.decoding.prompt import PromptCache
    from lantern.drafters.eagle.eagle1 import Eagle


@dataclass(frozen=True)
class Decoder:
    """A method built for a target. `generate` decodes one batch at a time and is not for several threads.

    Plain decoding has no drafter and no verifier, nor has a method with a driver of its own. `prompts` caches the
    prefill of earlier prompts.
    """

    method: Method
    target: "Target"
    sampling: "Sampling"
    drafter: "Drafter | None"
    verifier: "Verifier | None"
    prompts: "PromptCache | None" = None
    engine: Engine = EAGER

    def generate(self, condition: "Condition", *, keys: Sequence[tuple[int, int]], **watching: Any) -> "Generation":
        """Decode a batch; `watching` is callback, keep_steps, is_timed, cache, forced of `decoding.loop.Decoding`.

        Steps that an engine runs itself force no codes: with `forced` its passes are run step by step.
        """
        from lantern.engines.prepared import on_device

        with on_device(self.target.tok_embeddings.weight.device):
            return self._generate(condition, keys, watching)

    def _generate(
        self, condition: "Condition", keys: Sequence[tuple[int, int]], watching: Mapping[str, Any]
    ) -> "Generation":
        from lantern.decoding import loop, plain

        self.target.refresh()
        given: dict[str, Any] = {"keys": keys, "prompts": self.prompts, **watching}
        fused = self._fused_decoder() if watching.get("forced") is None else None
        if fused is not None:
            return fused.generate(condition, **given)
        given = {
            "sampling": self.sampling,
            "reproducible": self.engine.rounds_wide,
            "programs": self.engine.programs(),
        } | given
        driver = self.method.made.driver
        if driver is not None:
            return resolved(driver.path)(self.target, condition, **driver.named, **given)
        if self.drafter is None or self.verifier is None:
            return plain.generate(self.target, condition, **given)
        return loop.generate(self.target, condition, drafter=self.drafter, verifier=self.verifier, **given)

    @property
    def needs_waves(self) -> str | None:
        """Why images cannot join a batch that is under way (`begin`), or None if they can."""
        if self.method.made.driver is not None:
            return f"method {self.method.name} has a loop of its own"
        return self.engine.needs_waves(self.target)

    def begin(
        self, condition: "Condition", *, keys: Sequence[tuple[int, int]], **how: Any
    ) -> "tuple[RowStepper, Step]":
        """Begin a generation whose steps `decoding.joint` takes; return its stepper and the step of code 0.

        `how` is cache, forced of `decoding.loop.Decoding`.
        """
        from lantern.decoding import loop
        from lantern.decoding.joint import DraftedRow, NoDrafts
        from lantern.verifiers.gumbel import GumbelVerifier

        self.target.refresh()
        given: dict[str, Any] = {"keys": keys, "prompts": self.prompts} | how
        fused = self._fused_decoder() if how.get("forced") is None else None
        if fused is not None:
            return fused.begin(condition, **{name: value for name, value in given.items() if name != "forced"})
        decoding = loop.Decoding(
            self.sampling, programs=self.engine.programs(), reproducible=self.engine.rounds_wide, **given
        )
        drafter, verifier = self.drafter or NoDrafts(), self.verifier or GumbelVerifier()
        stepper, first = loop.begin(self.target, condition, drafter=drafter, verifier=verifier, how=decoding)
        return DraftedRow(stepper), first

    def promise(self, images: int) -> Promise:
        """Return what the images of a batch have in common with plain decoding's, as this engine keeps it."""
        promise = self.method.promise
        config = self.target.config
        if promise == "codes" and config.family != "llamagen" and config.processes > 1:
            return "distribution"  # sums are rounded in another order than in one process
        if promise != "codes" or self.drafter is None:
            return promise
        lines = images * self.sampling.rows
        keeps = self.engine.keeps_codes(self.target, nodes=self.drafter.max_nodes, lines=lines)
        return "codes" if keeps else "distribution"

    @property
    def uses_fused_steps(self) -> bool:
        """Whether the engine runs whole steps itself."""
        return self._fused_decoder() is not None

    def _fused_decoder(self) -> FusedDecoder | None:
        if self.method.made.driver is not None:
            return None
        return self.engine.fused_decoder(self.target, self.sampling, self.drafter, self.verifier)


def build_decoder(
    method: str | Method,
    target: "Target",
    *,
    sampling: "Sampling",
    drafter_module: "Eagle | None" = None,
    add_ons: "Mapping[str, nn.Module]" = MappingProxyType({}),
    neighbours: "Int32[Tensor, 'v k'] | None" = None,
    codebook: "Float[Tensor, 'v d'] | None" = None,
    prompts: "PromptCache | None" = None,
    engine: Engine = EAGER,
) -> Decoder:
    """Build the decoder of a method.

    `drafter_module` is the model's own drafter, `add_ons` its other trained networks by name, as
    `lantern.models.folder` reads them. Relaxations need `neighbours`, the proximity table, or `codebook`, the vectors
    of the codes; with the codebook they also report the latent distance that they moved.

    ValueError for an unknown name, for what the method needs and the model lacks, and for components that do not fit.
    """
    method = find(method) if isinstance(method, str) else method
    engine = engine.resolve(target)
    if method.made.drafter is None:
        return Decoder(method, engine.prepare(target), sampling, None, None, prompts, engine)
    from lantern.decoding.loop import check_modes

    while True:
        prepared = engine.prepare(target)
        give = {
            "target": prepared,
            "sampling": sampling,
            "drafter": None if drafter_module is None else engine.prepare_drafter(drafter_module),
            "parts": {name: engine.prepare_drafter(add_ons[name]) for name in method.made.parts if name in add_ons},
            "neighbours": neighbours,
            "codebook": codebook,
        }
        drafter, verifier = build(method, give, greedy=sampling.is_greedy)
        check_modes(drafter, verifier)
        refusal = engine.refuses(drafter)
        if refusal is None:
            return Decoder(method, prepared, sampling, drafter, verifier, prompts, engine)
        if not engine.reason or engine.name == "eager":
            raise ValueError(f'method "{method.name}": {refusal}')
        # The engine was chosen automatically and does not suit this drafter.
        engine = engine.layer_by_layer().changed(reason=refusal)
