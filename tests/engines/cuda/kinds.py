"""Small targets whose passes run by kernels of each kind: on a GPU if there is one, else in Triton's interpreter."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lantern.core.config import KvCache
from lantern.core.sampling import Sampling
from lantern.core.types import Condition, Generation, Step
from lantern.decoding.loop import State
from lantern.decoding.rounds import Joint
from lantern.drafters.eagle.networks import Eagle
from lantern.engines.cuda.engine import GraphEngine
from lantern.engines.cuda.llama import LlamaTarget
from lantern.engines.cuda.target import FusedTarget, KernelTarget
from lantern.engines.engine import Engine
from lantern.generation.generator import Decoder, build_decoder
from lantern.methods import METHODS
from lantern.models.llamagen.transformer import Transformer
from lantern.models.transformers.target import TransformersTarget
from tests import tiny_transformers as tiny
from tests.tiny import tiny_condition, tiny_eagle, tiny_target
from tests.tiny_decoder import chosen_from

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 9
KEYS = [(9, 0), (9, 1)]
# prompts of 6 and 3 tokens, and of 4 and 3
PROMPTS = torch.tensor([[[1, 12, 9, 10, 7, 4], [0, 0, 0, 1, 2, 4]], [[0, 0, 1, 13, 9, 4], [0, 0, 0, 1, 2, 4]]])
# small trees and windows, which the interpreter runs in a second
SMALL: dict[str, dict[str, Any]] = {
    "gumbel-jacobi": {"window": 3},
    "eagle1": {"tree": "chain_2"},
    "sjd-pac": {"window": 3, "width": 2, "levels": 1},
}


class Kind(NamedTuple):
    """What runs passes, the products of its engine, and the prompts of two images."""

    prepared: type[KernelTarget]
    products: str
    condition: Condition


LLAMAGEN = tiny_condition((4, 2))
KINDS = {
    "cublas": Kind(KernelTarget, "cublas", LLAMAGEN),
    "fused": Kind(FusedTarget, "fused", LLAMAGEN),
    "llama": Kind(LlamaTarget, "fused", Condition(tokens=PROMPTS, mask=PROMPTS > 0)),
}


def target_in(dtype: torch.dtype, **changes: int) -> Transformer:
    return tiny_target(**({"block_size": TOKENS, "dim": 16, "n_head": 1, "n_layer": 1} | changes)).to(DEVICE, dtype)


def llama_in(dtype: torch.dtype, **changes: Any) -> TransformersTarget:
    return tiny.llama(**changes).to(DEVICE, dtype)


def target_of(kind: str, dtype: torch.dtype, **changes: Any) -> Any:
    return (llama_in if kind == "llama" else target_in)(dtype, **changes)


def decoder_of(
    kind: str,
    name: str,
    target: Any,
    sampling: Sampling,
    engine: Engine | None = None,
    module: Eagle | None = None,
    **settings: Any,
) -> Decoder:
    if module is None and kind != "llama":
        module = tiny_eagle(target).to(DEVICE, target.output.weight.dtype)
    add_ons = {} if module is None else {"eagle1": module}
    method = METHODS[name].with_options(**(SMALL.get(name, {}) | settings))
    chosen = engine or GraphEngine(products=KINDS[kind].products)
    decoder = build_decoder(method, target, sampling=sampling, add_ons=add_ons, engine=chosen)
    assert engine or type(decoder.target) is KINDS[kind].prepared
    return decoder


def generated(kind: str, decoder: Decoder, images: int = 1, **how: Any) -> Generation:
    condition = KINDS[kind].condition.select(range(images))
    return decoder.generate(condition, keys=KEYS[:images], **how)


def joined(decoders: Sequence[Decoder], condition: Condition, keys: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the tokens of each image by a decoder of its own, each begun a step after the one before."""
    joint, states = Joint(decoders[0].engine.group, decoders[0].engine.drive), list[State]()
    while len(states) < len(keys) or not all(state.is_done() for state in states):
        for i in range(len(states), min(len(states) + 1, len(keys))):
            states.append(decoders[i].begin(condition.select([i]), keys=[keys[i]], is_joined=True))
        joint.take([state for state in states if not state.is_done()] or states)
    return [state.result().tokens for state in states]


def scored(kind: str, name: str, dtype: torch.dtype, guidance: float, kv_cache: KvCache) -> tuple[Tensor, list[Tensor]]:
    """Return the tokens of an image, and the logits from which each but the first was sampled."""
    logits = list[Tensor]()

    def collect(step: Step) -> None:
        assert int(step.start[0]) == (len(logits) + 1 if step.index else 0)
        logits.extend(chosen_from(step, 0) if step.index else ())

    engine = GraphEngine(products=KINDS[kind].products, kv_cache=kv_cache)
    decoder = decoder_of(kind, name, target_of(kind, dtype), Sampling(guidance=guidance), engine)
    assert decoder.promise(1) == "tokens" and type(decoder.target) is KINDS[kind].prepared
    return generated(kind, decoder, callback=collect).tokens, logits
