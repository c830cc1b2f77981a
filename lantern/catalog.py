"""Method names: which drafter, tree, verifier and relaxation stand behind each, as plain data.

Importing this costs no torch. A method is added here, in one file of its own, and in one row of the contract test.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Float, Int32
    from torch import Tensor

    from lantern.decoding.prefill import PromptCache
    from lantern.decoding.run import Programs
    from lantern.drafters.eagle import Eagle
    from lantern.sampling import Sampling
    from lantern.types import Condition, Drafter, DraftMode, Generation, Target, Verifier


@dataclass(frozen=True)
class Method:
    """A way of decoding. `drafter` None is plain decoding; `relaxation` None is exact.

    `tree` is a name of `lantern.trees.static`; `mode` says how its children are drawn; `settings` are the arguments of
    the relaxation, or of a drafter without a tree, by name, and what a user may change.
    """

    name: str
    summary: str
    drafter: str | None = None
    tree: str | None = "grown_8_2"
    mode: "DraftMode" = "gumbel"
    verifier: str = "gumbel"
    relaxation: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether pictures follow the model's own law."""
        return self.relaxation is None

    @property
    def options(self) -> tuple[str, ...]:
        """What can be set of it by name: its tree, if it drafts, and its settings."""
        return (("tree",) if self.drafter and self.tree else ()) + tuple(self.settings)

    def changed(self) -> dict[str, Any]:
        """What of its `options` differs from the catalog's method of this name."""
        own = METHODS[self.name]
        there, here = ({"tree": method.tree, **method.settings} for method in (own, self))
        return {name: here[name] for name in self.options if here[name] != there[name]}

    def with_options(self, **options: Any) -> "Method":
        """The method with some of its `options` changed; ValueError for one that it does not have."""
        for name in options:
            if name not in self.options:
                known = f"takes {', '.join(self.options)}" if self.options else "takes no settings"
                raise ValueError(f'method "{self.name}" has no setting {name.rstrip("_")}: it {known}')
        own = {name: value for name, value in options.items() if name in self.settings}
        rest = {name: value for name, value in options.items() if name not in own}
        return dataclasses.replace(self, settings={**self.settings, **own}, **rest)


TOGETHER = 16  # codes of a pass of reproducible decoding at most: linears were found to round alike up to there


@dataclass(frozen=True)
class Engine:
    """How passes are run; none of it changes the law of the codes.

    `compile`: by torch.compile, each size at its first use. `graphs`: a step of drafted methods as one CUDA graph.
    `reproducible`: in bf16 too a code does not depend on how many others are scored with it, so that exact drafted
    methods give the codes of plain decoding; for CPUs and up to TOGETHER codes a pass.
    """

    compile: bool = False
    graphs: bool = False
    reproducible: bool = False


EAGER = Engine()
RELAXATIONS = {
    "lantern": "lantern.relaxations.lantern:Lantern",
    "lantern++": "lantern.relaxations.lantern_pp:LanternPP",
    "bounded": "lantern.relaxations.bounded:Bounded",
    "cool": "lantern.relaxations.cool:Cool",
    "grouped": "lantern.relaxations.grouped:Grouped",
    "tolerance": "lantern.relaxations.tolerance:Tolerance",
}
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("plain", "one code a pass; the baseline"),
        Method(
            "eagle1",
            "EAGLE-1 drafts verified by Gumbel match: the picture of plain decoding, code for code",
            drafter="eagle1",
        ),
        Method(
            "eagle1-rejection",
            "EAGLE-1 drafts, sampled, verified by multi-round rejection: exact in law",
            drafter="eagle1",
            mode="sampled",
            verifier="rejection",
        ),
        Method(
            "lantern",
            "relaxed: a draft may claim its k nearest codes' probability up to delta",
            drafter="eagle1",
            mode="sampled",
            verifier="rejection",
            relaxation="lantern",
            settings={"k": 100, "delta": 0.1, "residual": "paper"},
        ),
        Method(
            "lantern++",
            "relaxed: a draft may claim its k nearest codes' probability up to (lambda_ - 1) times its own",
            drafter="eagle1",
            mode="sampled",
            verifier="rejection",
            relaxation="lantern++",
            settings={"k": 10, "lambda_": 2.0, "residual": "paper"},
        ),
        Method(
            "sjd",
            "no drafter: a window of codes is tested and drawn again in every pass (speculative Jacobi); exact in law",
            drafter="jacobi",
            tree=None,
            mode="jacobi",
            verifier="coupling-independent",
            settings={"window": 16, "init": "repeat-left"},
        ),
        Method(
            "scd",
            "no drafter: as sjd, but codes of the window are kept wherever they can be (coupled); exact in law",
            drafter="jacobi",
            tree=None,
            mode="jacobi",
            verifier="coupling",
            settings={"window": 16, "init": "repeat-left"},
        ),
        Method(
            "gumbel-jacobi",
            "no drafter: a window iterates under fixed noise to the picture of plain decoding, code for code",
            drafter="jacobi",
            tree=None,
            settings={"window": 16, "init": "repeat-left"},
        ),
        Method(
            "bounded",
            "relaxed: the law moves toward the draft between alike codes, by at most delta, and is verified exactly",
            drafter="eagle1",
            relaxation="bounded",
            settings={"k": 50, "delta": 0.2, "cap": 4.0, "rounds": 2, "width": 64},
        ),
        Method(
            "bounded-window",
            "relaxed: as gumbel-jacobi, with the law moved toward the last turn's, by at most delta",
            drafter="jacobi",
            tree=None,
            mode="jacobi",
            relaxation="bounded",
            settings={"window": 16, "init": "repeat-left", "k": 50, "delta": 0.2, "cap": 4.0, "rounds": 2, "width": 64},
        ),
        Method(
            "cool",
            "relaxed: COOL-SD, drafts count omega times, early ones more",
            drafter="eagle1",
            mode="sampled",
            verifier="rejection",
            relaxation="cool",
            settings={"omega": 1.1, "nu": 0.7},
        ),
        Method(
            "grouped",
            "relaxed: GSD, a draft is tested as one of a group of codes that are alike and as probable",
            drafter="eagle1",
            mode="sampled",
            verifier="rejection",
            relaxation="grouped",
            settings={"group": 14, "p_radius": 0.15, "d_radius": 0.5},
        ),
        Method(
            "tolerance",
            "relaxed: VADUSA, a draft is taken if it is among several draws of the target",
            drafter="eagle1",
            mode="point",
            verifier="rejection",
            relaxation="tolerance",
            settings={"samples": 2},
        ),
        Method(
            "auto",
            "what `lantern tune` found fastest here; without its profile, exact and drafted where there is a drafter",
            drafter="eagle1",
        ),
    )
}


@dataclass(frozen=True)
class Parts:
    """A method put together for a target: `generate` decodes with it. Plain decoding has no drafter and verifier.

    `prompts` keeps what the target made of earlier prompts.
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

        watching = {"prompts": self.prompts, "reproducible": self.engine.reproducible} | watching
        if self.drafter is None or self.verifier is None:
            return plain.generate(self.target, condition, sampling=self.sampling, keys=keys, **watching)
        return loop.generate(
            self.target,
            condition,
            sampling=self.sampling,
            keys=keys,
            drafter=self.drafter,
            verifier=self.verifier,
            **{"programs": self._programs(), "graphs": self.engine.graphs} | watching,
        )

    def _programs(self) -> "Programs | None":
        if not self.engine.compile:
            return None
        from lantern.decoding.compiled import compiled_programs

        return compiled_programs()


def find(name: str) -> Method:
    """The method of a name; ValueError gives the nearest one."""
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(str(name), METHODS, n=1, cutoff=0.4)
    hint = f'did you mean "{near[0]}"?' if near else f"known are {', '.join(METHODS)}"
    raise ValueError(f'method "{str(name)[:80]}" is unknown: {hint}')


def build(
    method: str | Method,
    target: "Target",
    *,
    sampling: "Sampling",
    drafter_module: "Eagle | None" = None,
    neighbours: "Int32[Tensor, 'v k'] | None" = None,
    codebook: "Float[Tensor, 'v d'] | None" = None,
    prompts: "PromptCache | None" = None,
    engine: Engine = EAGER,
) -> Parts:
    """Puts a method together. Relaxations need `neighbours`, the proximity table, or `codebook`, the codes' vectors.

    With the codebook they also tell the latent distance that they moved.

    ValueError for an unknown name, for what the method needs and the model lacks, and for parts that do not fit.
    """
    method = find(method) if isinstance(method, str) else method
    if method.name == "auto" and drafter_module is None:
        method = METHODS["plain"]
    _prepare(engine, target)
    if method.drafter is None:
        return Parts(method, target, sampling, None, None, prompts, engine)
    from lantern.decoding.loop import check_modes

    verifier = _verifier(method, sampling, neighbours, codebook)
    if method.drafter not in DRAFTERS:
        raise ValueError(f'drafter is "{method.drafter}", wanted one of {", ".join(DRAFTERS)}')
    drafter = DRAFTERS[method.drafter](method, target, sampling, drafter_module)
    check_modes(drafter, verifier)
    if engine.reproducible and drafter.max_nodes > TOGETHER:
        raise ValueError(
            f'method "{method.name}" scores {drafter.max_nodes} codes in a pass, reproducible decoding at most '
            f"{TOGETHER}: choose a smaller tree or window, or leave reproducible out"
        )
    return Parts(method, target, sampling, drafter, verifier, prompts, engine)


def _prepare(engine: Engine, target: "Target") -> None:
    """Compiles the target if that is asked for; ValueError for what its device cannot do."""
    is_on_gpu = target.tok_embeddings.weight.device.type == "cuda"
    if engine.graphs and not is_on_gpu:
        raise ValueError("CUDA graphs were asked for and the model is not on a GPU: leave them out, or move the model")
    if engine.reproducible and is_on_gpu:
        raise ValueError("reproducible decoding in bf16 is kept on CPUs only: leave it out, or use fp32")
    if engine.compile:
        from lantern.decoding.compiled import compile_target

        compile_target(target)  # type: ignore[arg-type]


def _eagle1(method: Method, target: "Target", sampling: "Sampling", module: "Eagle | None") -> "Drafter":
    """Trees drafted by an EAGLE-1 module."""
    from lantern.drafters.eagle_drafter import EagleDrafter
    from lantern.trees.static import named

    if module is None:
        raise ValueError(f'method "{method.name}" needs a drafter and this model has none: use "plain" or "auto"')
    assert method.tree is not None
    # At temperature 0 there is nothing to draw: a drafter proposes its most likely codes.
    mode = "point" if sampling.is_greedy and method.mode == "sampled" else method.mode
    # Recording log q costs a copy, so a drafter does it only for those that read it.
    records = method.relaxation is not None and not sampling.is_greedy
    return EagleDrafter(
        module,
        target,
        tree=named(method.tree),
        mode=mode,
        sampling=sampling,
        records_log_q=records and mode == "gumbel",
    )


def _jacobi(method: Method, target: "Target", sampling: "Sampling", module: "Eagle | None") -> "Drafter":
    """Windows of the target's own draws, which an EAGLE-1 module may continue."""
    from lantern.drafters.jacobi import JacobiDrafter

    keeps_laws, continuation = method.mode == "jacobi", None
    if method.settings["init"] == "drafter":
        from lantern.drafters.eagle_drafter_chain import EagleChain

        if module is None:
            raise ValueError('init is "drafter" and this model has none: use "random" or "repeat-left"')
        window = method.settings["window"]
        continuation = EagleChain(
            module, target, window=window, length=CONTINUED, is_gumbel=not keeps_laws, sampling=sampling
        )
    window, init = method.settings["window"], method.settings["init"]
    return JacobiDrafter(target, window=window, init=init, keeps_laws=keeps_laws, continuation=continuation)


CONTINUED = 3  # codes that a drafter guesses behind a window; as many places and one more seldom come free in a step
DRAFTERS: dict[str, "Callable[[Method, Target, Sampling, Eagle | None], Drafter]"] = {
    "eagle1": _eagle1,
    "jacobi": _jacobi,
}


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
