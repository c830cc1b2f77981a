"""Puts methods together: of a name of `lantern.methods` and a model's components `build` makes a way to decode.

Importing this costs no torch.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lantern.methods import METHODS, Kit, Method, find

if TYPE_CHECKING:
    from jaxtyping import Float, Int32
    from torch import Tensor, nn

    from lantern.decoding.prefill import PromptCache
    from lantern.decoding.run import Programs
    from lantern.drafters.eagle import Eagle
    from lantern.policies.policy import StepCosts
    from lantern.sampling import Sampling
    from lantern.types import Condition, Drafter, Generation, Target, Verifier

__all__ = [
    "EAGER",
    "FUSED_WINDOWS",
    "METHODS",
    "TOGETHER",
    "Engine",
    "Kit",
    "Method",
    "Parts",
    "build",
    "find",
    "layer_by_layer",
    "neighbour_columns",
    "suited",
]

TOGETHER = 16  # codes of a pass of reproducible decoding at most: linears were found to round alike up to there


@dataclass(frozen=True)
class Engine:
    """How passes are run; none of it but `int4` and `int8` changes the law of the codes.

    `compile`: by torch.compile, each size at its first use. `fused`: the target's passes as one C++ program each, built
    at first use, for CPUs, and whole turns of plain decoding and of windows by Gumbel match; a code does not depend on
    what is scored with it, as `reproducible` promises. `graphs`: a step, plain or drafted, as one CUDA graph.
    `reproducible`: a code does not depend on how many others are scored with it, bit for bit in fp32 and bf16, so that
    exact drafted methods give the codes of plain decoding; for CPUs, eager passes and up to TOGETHER codes a pass.
    `int4`: the target's layers hold 4-bit weights, so that it is another target: what is exact is exact with respect to
    it. `int8`: its layers and head hold 8-bit weights, and so do fused drafters; fused passes read them as they are.
    ValueError for both.
    """

    compile: bool = False
    graphs: bool = False
    reproducible: bool = False
    int4: bool = False
    int8: bool = False
    fused: bool = False

    def __post_init__(self) -> None:
        if self.int4 and self.int8:
            raise ValueError("weights are to have 4 bits and 8: choose one of int4 and int8")


def layer_by_layer(engine: Engine) -> Engine:
    """The engine without what runs several layers at once, in which nobody can look at one."""
    # of what is fused nobody need say that it is to be reproducible, nor be held to what that allows elsewhere
    is_slow = engine.reproducible and not engine.fused
    return dataclasses.replace(engine, compile=False, graphs=False, fused=False, reproducible=is_slow)


EAGER = Engine()
# the best for one picture without and with matrix units (eval/results/speed_windows.json,
# eval/results/speed_matrix_units_windows.json); `lantern tune` measures others
FUSED_WINDOWS = (2, 4)
RELAXATIONS = {
    "lantern": "lantern.relaxations.lantern:Lantern",
    "lantern++": "lantern.relaxations.lantern_pp:LanternPP",
    "bounded": "lantern.relaxations.bounded:Bounded",
    "cool": "lantern.relaxations.cool:Cool",
    "grouped": "lantern.relaxations.grouped:Grouped",
    "tolerance": "lantern.relaxations.tolerance:Tolerance",
}


@dataclass(frozen=True)
class Parts:
    """A method put together for a target: `generate` decodes with it, one batch at a time, not from several threads.

    Plain decoding has no drafter and verifier. `prompts` keeps what the target made of earlier prompts.
    """

    method: Method
    target: "Target"
    sampling: "Sampling"
    drafter: "Drafter | None"
    verifier: "Verifier | None"
    prompts: "PromptCache | None" = None
    engine: Engine = EAGER

    def generate(self, condition: "Condition", *, keys: Sequence[tuple[int, int]], **watching: Any) -> "Generation":
        """Decodes a batch; `watching` is callback, keep_steps, is_timed, cache of `decoding.loop.generate`."""
        from lantern.decoding import loop, plain

        if self.engine.fused:
            from lantern.kernels.fused import fuse_target

            fuse_target(self.target)  # type: ignore[arg-type]  # anew, if weights were changed or moved
        # fused passes keep the promise as they are
        is_slow = self.engine.reproducible and not self.engine.fused
        engine = {"reproducible": is_slow, "graphs": self.engine.graphs}
        how: dict[str, Any] = {"prompts": self.prompts} | engine | watching
        if self.takes_whole_turns:
            from lantern.kernels import turns

            moved = {"relaxation": getattr(self.verifier, "relaxation", None)}
            how = {"prompts": self.prompts, "drafter": self.drafter} | moved | watching
            return turns.generate(self.target, condition, sampling=self.sampling, keys=keys, **how)
        if self.drafter is None or self.verifier is None:
            return plain.generate(self.target, condition, sampling=self.sampling, keys=keys, **how)
        how = {"programs": self._programs()} | how
        return loop.generate(
            self.target,
            condition,
            sampling=self.sampling,
            keys=keys,
            drafter=self.drafter,
            verifier=self.verifier,
            **how,
        )

    @property
    def takes_whole_turns(self) -> bool:
        """Whether each turn is one C++ program."""
        if not self.engine.fused or self.engine.graphs:
            return False
        from lantern.kernels import turns

        return turns.fits(self.target, self.sampling, self.drafter, self.verifier)

    def _programs(self) -> "Programs | None":
        if not self.engine.compile:
            return None
        from lantern.decoding.compiled import compiled_programs

        return compiled_programs()


def build(
    method: str | Method,
    target: "Target",
    *,
    sampling: "Sampling",
    drafter_module: "Eagle | None" = None,
    trained: "Mapping[str, nn.Module]" = MappingProxyType({}),
    neighbours: "Int32[Tensor, 'v k'] | None" = None,
    codebook: "Float[Tensor, 'v d'] | None" = None,
    prompts: "PromptCache | None" = None,
    engine: Engine = EAGER,
    costs: "StepCosts | None" = None,
) -> Parts:
    """Puts a method together. Relaxations need `neighbours`, the proximity table, or `codebook`, the codes' vectors.

    With the codebook they also tell the latent distance that they moved. `trained` are drafters and policies by name,
    as `lantern.trained` reads them, for the methods that want one. `costs` is what a step takes, for policies.

    ValueError for an unknown name, for what the method needs and the model lacks, and for parts that do not fit.
    """
    method = find(method) if isinstance(method, str) else method
    if method.name == "auto" and drafter_module is None:
        method = METHODS["plain"]
    if engine.int4 or engine.int8:
        from lantern.decoding.quantized import quantized

        target = quantized(target, 4 if engine.int4 else 8)  # type: ignore[assignment,arg-type]
    _prepare(engine, target)
    if method.drafter is None:
        return Parts(method, target, sampling, None, None, prompts, engine)
    from lantern.decoding.loop import check_graphs, check_modes

    verifier = _verifier(method, sampling, neighbours, codebook)
    if engine.fused:
        from lantern.kernels.drafter import fused_drafter

        how = {"int8": engine.int8}
        drafter_module = None if drafter_module is None else fused_drafter(drafter_module, **how)
        trained = {name: fused_drafter(trained[name], **how) for name in method.parts if name in trained}
    drafter = Kit(target, sampling, drafter_module, trained, neighbours, codebook, costs).drafter(method)
    check_modes(drafter, verifier)
    if engine.graphs:
        check_graphs(drafter)
    if engine.reproducible and not engine.fused and drafter.max_nodes > TOGETHER:
        raise ValueError(
            f'method "{method.name}" scores {drafter.max_nodes} codes in a pass, reproducible decoding at most '
            f"{TOGETHER}: choose a smaller tree or window, or leave reproducible out"
        )
    return Parts(method, target, sampling, drafter, verifier, prompts, engine)


def suited(method: Method, engine: Engine) -> Method:
    """A method whose window nobody chose, with one that suits the engine.

    Between passes that are dispatched one by one a long window saves work; fused turns have none to save, and a pass
    takes as long as its codes, unless a processor computes faster than it reads weights.
    """
    if not engine.fused or method.drafter != "jacobi" or method.verifier != "gumbel":
        return method
    from lantern.kernels.build import has_matrix_units

    return method.with_options(window=FUSED_WINDOWS[has_matrix_units()])


def _prepare(engine: Engine, target: "Target") -> None:
    """Fuses or compiles the target, or makes it eager again; ValueError for what its device cannot do."""
    is_on_gpu = target.tok_embeddings.weight.device.type == "cuda"
    if engine.graphs and not is_on_gpu:
        raise ValueError("CUDA graphs were asked for and the model is not on a GPU: leave them out, or move the model")
    if engine.reproducible and is_on_gpu:
        raise ValueError("reproducible decoding in bf16 is kept on CPUs only: leave it out, or use fp32")
    if engine.fused:
        from lantern.kernels.fused import fuse_target

        fuse_target(target)  # type: ignore[arg-type]
    elif engine.compile:
        from lantern.decoding.compiled import compile_target

        compile_target(target)  # type: ignore[arg-type]
    else:
        from lantern.decoding.runners import make_eager

        make_eager(target)


def _verifier(
    method: Method, sampling: "Sampling", neighbours: "Tensor | None", codebook: "Tensor | None"
) -> "Verifier":
    from lantern.verifiers.coupling import CouplingVerifier
    from lantern.verifiers.greedy import GreedyVerifier
    from lantern.verifiers.gumbel import GumbelVerifier
    from lantern.verifiers.rejection import RejectionVerifier
    from lantern.verifiers.relaxed import RelaxedVerifier

    kinds: dict[str, Any] = {
        "gumbel": GumbelVerifier,
        "rejection": RejectionVerifier,
        "coupling": CouplingVerifier,
        "coupling-independent": lambda: CouplingVerifier(redraw="independent"),
    }
    if method.verifier not in kinds:
        raise ValueError(f'verifier is "{method.verifier}", wanted one of {", ".join(kinds)}')
    if method.relaxation is None:
        return kinds[method.verifier]()
    relaxation = _relaxation(method, neighbours, codebook)
    if sampling.is_greedy and hasattr(relaxation, "claim") and method.mode != "jacobi":
        return GreedyVerifier(relaxation)
    if hasattr(relaxation, "judge"):
        if method.verifier != "rejection":
            raise ValueError(
                f'relaxation "{method.relaxation}" accepts codes one by one, which verifier "{method.verifier}" '
                'cannot: use "rejection"'
            )
        return RejectionVerifier(relaxation)
    inner = kinds[method.verifier]()
    # At temperature 0 the law is one code and there is nothing to move: r is p.
    return inner if sampling.is_greedy else RelaxedVerifier(relaxation, inner)


def neighbour_columns(method: Method) -> int:
    """How many nearest codes of each code a method's relaxation reads; 0 if it reads none."""
    return method.settings.get("k", 0) + (method.settings.get("residual") == "released")


def _relaxation(method: Method, neighbours: "Tensor | None", codebook: "Tensor | None") -> Any:
    if method.relaxation not in RELAXATIONS:
        raise ValueError(f'relaxation is "{method.relaxation}", wanted one of {", ".join(RELAXATIONS)}')
    module, name = RELAXATIONS[method.relaxation].split(":")
    kind = getattr(import_module(module), name)
    fields = {entry.name: entry.default for entry in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    if "table" in fields:
        if neighbours is None:
            raise ValueError(
                f'method "{method.name}" needs the proximity table of the codebook: build it with `neighbours`'
            )
        given["table"] = neighbours
    if "distances" in fields and codebook is not None and neighbours is not None:
        from lantern.relaxations.neighbours import proximity_distances

        given["distances"] = proximity_distances(codebook, neighbours[:, : method.settings["k"]])
    if "codebook" in fields:
        if codebook is None and fields["codebook"] is dataclasses.MISSING:
            raise ValueError(f'method "{method.name}" needs the vectors of the codes: build it with `codebook`')
        given["codebook"] = codebook
    return kind(**given, **{name: value for name, value in method.settings.items() if name in fields})
