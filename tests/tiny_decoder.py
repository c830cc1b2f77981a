"""Decoders of tiny targets, with every part that a method may read."""

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from lantern.core.sampling import Sampling
from lantern.core.types import Callback, Condition, Drafter, DraftTree, Generation, Step, Target, Verifier
from lantern.decoding.loop import State, begin, run
from lantern.decoding.plain import NoDrafts
from lantern.drafters.eagle.networks import Eagle
from lantern.engines.engine import EAGER, EagerEngine, Engine
from lantern.generation.generator import Decoder, build_decoder
from lantern.methods import METHODS, Made, Method
from lantern.methods.method import Deferred
from lantern.models.llamagen.transformer import Transformer
from lantern.verifiers.gumbel import GumbelVerifier
from lantern.verifiers.relaxations.neighbours import proximity_table
from tests.tiny import tiny_condition, tiny_eagle, tiny_target
from tests.tiny_parts import tiny_part

TARGET = tiny_target()
CONDITION = tiny_condition((4, 1, 6))
KEYS = [(9, 0), (9, 1), (4, 7)]
SAMPLING = Sampling(guidance=3)
SIZES = {"nodes": 8, "width": 3, "depth": 2}  # of dynamic trees


class Blind(EagerEngine):
    """Passes whose rounds do not look at values, as on a GPU."""

    captures: ClassVar[bool] = True


BLIND = Blind()


class GivenTrees(NoDrafts):
    tree: DraftTree

    def __init__(self, nodes: int, depth: int = 0) -> None:
        super().__init__()
        self.max_nodes, self.depth = nodes, depth

    def propose(self) -> DraftTree:
        """Return the tree."""
        return self.tree


def generate(
    drafter: Drafter,
    verifier: Verifier | None = None,
    *,
    target: Target = TARGET,
    condition: Condition = CONDITION,
    sampling: Sampling = SAMPLING,
    keys: list[tuple[int, int]] = KEYS,
    callback: Callback | None = None,
    **how: Any,
) -> Generation:
    """Decode with a drafter and a verifier, by default Gumbel match; `how` are other arguments of `begin`."""
    state = State(target, sampling, drafter, verifier or GumbelVerifier())
    return run(begin(state, condition, keys=keys, **how), callback=callback)


def chosen_from(step: Step, image: int) -> list[Tensor]:
    """Return the logits `(guidance rows, v)` from which the tokens of a step were chosen."""
    path = [] if step.verdict is None else step.verdict.path[image].tolist()
    return [step.scores.logits[image, :, node].clone() for node in [0, *path][: int(step.counts[image])]]


@cache
def tiny_codebook(tokens: int = 24) -> Tensor:
    """Return a vector of four numbers for each token."""
    return torch.randn(tokens, 4, generator=torch.Generator().manual_seed(2))


@cache
def tiny_neighbours(tokens: int = 24) -> Tensor:
    return proximity_table(tiny_codebook(tokens), tokens - 1)


def tiny_decoder(
    method: str | Method,
    target: Transformer = TARGET,
    sampling: Sampling = SAMPLING,
    *,
    form: str = "guided",
    module: Eagle | None = None,
    add_ons: dict[str, Any] | None = None,
    has_codebook: bool = True,
    engine: Engine = EAGER,
    **settings: Any,
) -> Decoder:
    """Return the decoder of a method with these settings; the number of neighbours is made to fit tiny codebooks.

    A drafter and the add-ons that the method reads are made for the target unless they are given.
    """
    chosen = METHODS[method] if isinstance(method, str) else method
    tokens, weight = target.config.vocab_size, target.tok_embeddings.weight
    if "k" in chosen.settings:
        settings = {"k": min(chosen.settings["k"], 10, tokens - 1)} | settings
    chosen = chosen.with_options(**settings)
    drafter = tiny_eagle(target, form=form).to(weight.device, weight.dtype) if module is None else module
    if add_ons is None:
        names = set(chosen.made.needs) - {"eagle1"}
        add_ons = {name: tiny_part(name, target).to(weight.device) for name in names}
    return build_decoder(
        chosen,
        target,
        sampling=sampling,
        add_ons={"eagle1": drafter} | add_ons,
        neighbours=tiny_neighbours(tokens).to(weight.device),
        codebook=tiny_codebook(tokens).to(weight.device) if has_codebook else None,
        engine=engine,
    )


def made_of(name: str, drafter: Deferred | None, verifier: Deferred | None) -> Method:
    return Method(name, lambda parts: Made(drafter, verifier), {}, "")


def small_method(name: str) -> Method:
    """Return a method with small trees and windows of constant size, whose steps may be captured."""
    return shrunk(METHODS[name], window=4, adaptive=False)


def shrunk(method: Method, **small: Any) -> Method:
    """Return a method with trees of a few nodes, and with those of the `small` options that it has."""
    small |= {name: most for name, most in SIZES.items() if method.settings.get(name, 0) > most}
    small["tree"] = "chain_2" if method.tree else "eagle2_8_3_2"
    return method.with_options(**{name: value for name, value in small.items() if name in method.options})


def plain_tokens(target: Transformer = TARGET, sampling: Sampling = SAMPLING) -> Tensor:
    """Return the tokens of plain decoding for `CONDITION` and `KEYS`."""
    return build_decoder("plain", target, sampling=sampling).generate(CONDITION, keys=KEYS).tokens
