"""All methods by name, and the `Decoder` that `build_decoder` makes from one and a model's components. Needs no torch.

One line of MODULES names the module that declares a method; it is imported when the method is needed.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lantern.engines.engine import EAGER, Engine, FusedDecoder
from lantern.methods.spec import AddOn, DrafterContext, Method, MethodSpec, Promise, resolved

if TYPE_CHECKING:
    from jaxtyping import Float, Int32
    from torch import Tensor, nn

    from lantern.core.sampling import Sampling
    from lantern.core.types import Condition, Drafter, Generation, Step, Target, Verifier
    from lantern.decoding.joint import RowStepper
    from lantern.decoding.prompt import PromptCache
    from lantern.drafters.eagle.eagle1 import Eagle


# method: the module whose METHODS declares it
MODULES: dict[str, str] = {
    "plain": "lantern.methods.plain",
    "eagle1": "lantern.drafters.eagle.drafter",
    "eagle1-rejection": "lantern.drafters.eagle.drafter",
    "eagle1-paper": "lantern.drafters.eagle.drafter",
    "eagle3": "lantern.drafters.eagle.eagle3",
    "eagle3-paper": "lantern.drafters.eagle.eagle3",
    "poss": "lantern.drafters.eagle.poss",
    "poss-paper": "lantern.drafters.eagle.poss",
    "sjd": "lantern.drafters.windows.jacobi",
    "sjd-paper": "lantern.drafters.windows.jacobi",
    "scd": "lantern.drafters.windows.jacobi",
    "sjd++": "lantern.drafters.windows.jacobi",
    "scd-paper": "lantern.drafters.windows.jacobi",
    "gumbel-jacobi": "lantern.drafters.windows.jacobi",
    "parallelspec": "lantern.drafters.heads.parallelspec",
    "parallelspec-paper": "lantern.drafters.heads.parallelspec",
    "medusa": "lantern.drafters.heads.medusa",
    "medusa-paper": "lantern.drafters.heads.medusa",
    "vispec": "lantern.drafters.eagle.vispec",
    "vispec-paper": "lantern.drafters.eagle.vispec",
    "vertical": "lantern.drafters.heads.vertical",
    "eagle2": "lantern.drafters.policies.eagle2",
    "eagle2-rejection": "lantern.drafters.policies.eagle2",
    "eagle2-paper": "lantern.drafters.policies.eagle2",
    "ddd": "lantern.drafters.policies.ddd",
    "ddd-paper": "lantern.drafters.policies.ddd",
    "svip": "lantern.drafters.policies.svip",
    "svip-paper": "lantern.drafters.policies.svip",
    "c2t": "lantern.drafters.policies.c2t",
    "c2t-paper": "lantern.drafters.policies.c2t",
    "radar": "lantern.drafters.policies.radar",
    "radar-paper": "lantern.drafters.policies.radar",
    "adt-tree": "lantern.drafters.policies.adt_tree",
    "adt-tree-paper": "lantern.drafters.policies.adt_tree",
    "sjd-pac": "lantern.drafters.windows.sjd_pac",
    "zipar": "lantern.methods.row_front",
    "pjd": "lantern.methods.row_front",
    "sam": "lantern.drafters.lookup.sam",
    "sam-paper": "lantern.drafters.lookup.sam",
    "sam-eagle1": "lantern.drafters.combined.sam_eagle",
    "fr-spec": "lantern.drafters.eagle.fr_spec",
    "fr-spec-paper": "lantern.drafters.eagle.fr_spec",
    "self-cascade": "lantern.drafters.combined.self_cascade",
    "specmquant": "lantern.drafters.combined.specmquant",
    "specmquant-paper": "lantern.drafters.combined.specmquant",
    "auto": "lantern.methods.plain",
    "lantern": "lantern.verifiers.relaxations.lantern",
    "lantern-paper": "lantern.verifiers.relaxations.lantern",
    "lantern++": "lantern.verifiers.relaxations.lantern_pp",
    "lantern++-paper": "lantern.verifiers.relaxations.lantern_pp",
    "bounded": "lantern.verifiers.relaxations.bounded",
    "bounded-window": "lantern.drafters.windows.jacobi",
    "cool": "lantern.verifiers.relaxations.cool",
    "cool-paper": "lantern.verifiers.relaxations.cool",
    "grouped": "lantern.verifiers.relaxations.grouped",
    "gsd": "lantern.verifiers.relaxations.grouped",
    "tolerance": "lantern.verifiers.relaxations.tolerance",
    "vvs": "lantern.verifiers.relaxations.vvs",
    "vadusa": "lantern.drafters.heads.medusa",
}
_LOADED: dict[str, MethodSpec] = {}
# name: class and what it is made with
VERIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gumbel": ("lantern.verifiers.gumbel:GumbelVerifier", {}),
    "rejection": ("lantern.verifiers.rejection:RejectionVerifier", {}),
    "coupling": ("lantern.verifiers.coupling:CouplingVerifier", {}),
    "coupling-reuse": ("lantern.verifiers.coupling:CouplingVerifier", {"redraw": "reuse"}),
    "coupling-independent": ("lantern.verifiers.coupling:CouplingVerifier", {"redraw": "independent"}),
}


class Methods(Mapping[str, Method]):
    """The methods with their default settings, by name. Iterating over the names imports nothing."""

    def __getitem__(self, name: str) -> Method:
        """The method of a name; KeyError for an unknown one."""
        return spec_of(name).method()

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)

    def __contains__(self, name: object) -> bool:
        return name in MODULES


METHODS = Methods()


def spec_of(name: str) -> MethodSpec:
    """Return the specification of a method, importing its module; KeyError for an unknown name."""
    if name not in _LOADED:
        register(*import_module(MODULES[name]).METHODS)
    return _LOADED[name]


def register(*specs: MethodSpec) -> None:
    """Add methods; a line of MODULES does the same for those of the package."""
    for spec in specs:
        MODULES.setdefault(spec.name, "")
        _LOADED[spec.name] = spec


def specs() -> list[MethodSpec]:
    """Return the specifications of all methods, which imports their modules."""
    return [spec_of(name) for name in MODULES]


def find(name: str) -> Method:
    """Return the method of a name; ValueError gives the nearest one."""
    check_name(name)
    return METHODS[name]


def check_name(name: str) -> None:
    """Raise ValueError for a name that no method has, without importing the method's module."""
    if name in MODULES:
        return
    near = difflib.get_close_matches(str(name), MODULES, n=1)
    hint = f'did you mean "{near[0]}"?' if near else "`lantern methods` and lantern.list_methods() list all"
    raise ValueError(f'method "{str(name)[:80]}" is unknown: {hint}')


def add_ons() -> dict[str, AddOn]:
    """Return all add-ons by name, the model's own drafter included."""
    return {entry.name: entry for spec in specs() for entry in spec.add_ons if isinstance(entry, AddOn)}


def find_add_on(name: str) -> AddOn | None:
    """Return the add-on of a name, or None. Modules are imported until it is found, its own one first."""
    first = [name] if name in MODULES else []
    for method in dict.fromkeys([*_LOADED, *first, *MODULES]):
        for entry in spec_of(method).add_ons:
            if isinstance(entry, AddOn) and entry.name == name:
                return entry
    return None


def add_ons_of(method: Method) -> tuple[str, ...]:
    """Return the name of the part that a method reads beside the model's own drafter."""
    return (method.spec.add_on,) if method.spec.add_on else ()


@dataclass(frozen=True)
class Decoder:
    """A method built for a target. `generate` decodes one batch at a time and is not for several threads.

    Plain decoding has no drafter and no verifier, nor has a method with a loop of its own. `prompts` caches the prefill
    of earlier prompts.
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
        if self.method.spec.loop is not None:
            return resolved(self.method.spec.loop)(self.target, condition, **self.method.settings, **given)
        if self.drafter is None or self.verifier is None:
            return plain.generate(self.target, condition, **given)
        return loop.generate(self.target, condition, drafter=self.drafter, verifier=self.verifier, **given)

    @property
    def needs_waves(self) -> str | None:
        """Why images cannot join a batch that is under way (`begin`), or None if they can."""
        if self.method.spec.loop is not None:
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
        promise = self.method.spec.promise
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
        if self.method.spec.loop is not None:
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
    if method.is_plain or method.spec.loop is not None:
        return Decoder(method, engine.prepare(target), sampling, None, None, prompts, engine)
    from lantern.decoding.loop import check_modes

    while True:
        prepared = engine.prepare(target)
        verifier = _verifier(method, sampling, neighbours, codebook)
        read = {name: engine.prepare_drafter(add_ons[name]) for name in add_ons_of(method) if name in add_ons}
        module = None if drafter_module is None else engine.prepare_drafter(drafter_module)
        context = DrafterContext(prepared, sampling, module, read, neighbours, codebook)
        drafter = resolved(method.spec.drafter)(method, context)
        check_modes(drafter, verifier)
        refusal = engine.refuses(drafter)
        if refusal is None:
            return Decoder(method, prepared, sampling, drafter, verifier, prompts, engine)
        if not engine.reason or engine.name == "eager":
            raise ValueError(f'method "{method.name}": {refusal}')
        # The engine was chosen automatically and does not suit this drafter.
        engine = engine.layer_by_layer().changed(reason=refusal)


def suited(
    method: Method, engine: Engine, target: "Target", codes_per_pass: Mapping[int, float] | None = None
) -> Method:
    """Return the method with the window that is fastest with the engine, if its window depends on the engine.

    `codes_per_pass` are those of the model by window, if it records them.

    A long window saves passes. With passes dispatched one by one each of them has an overhead, which fused steps lack:
    there a pass takes as long as its codes, unless the processor computes faster than it reads weights. The engine
    measures which is the case (`lantern.engines.pass_times`).
    """
    window = engine.window(target, codes_per_pass) if method.spec.fits_engine else None
    return method if window is None else method.with_options(window=window)


def _verifier(
    method: Method, sampling: "Sampling", neighbours: "Tensor | None", codebook: "Tensor | None"
) -> "Verifier":
    from lantern.verifiers.greedy import GreedyVerifier
    from lantern.verifiers.relaxations.neighbours import Neighbourhood
    from lantern.verifiers.relaxations.rule import Acceptance
    from lantern.verifiers.relaxed import RelaxedVerifier

    spec = method.spec
    if spec.verifier not in VERIFIERS:
        raise ValueError(f'verifier is "{spec.verifier}", wanted one of {", ".join(VERIFIERS)}')
    kind, fixed = VERIFIERS[spec.verifier]
    fields = {entry.name for entry in dataclasses.fields(resolved(kind))}
    fixed = fixed | {name: value for name, value in method.settings.items() if name in fields}
    if spec.relaxation is None:
        return resolved(kind)(**fixed)
    relaxation = _relaxation(method, neighbours, codebook)
    if sampling.is_greedy and isinstance(relaxation, Neighbourhood) and spec.mode != "jacobi":
        return GreedyVerifier(relaxation)
    if isinstance(relaxation, Acceptance):
        if spec.verifier == "gumbel":
            raise ValueError(
                f"relaxation {type(relaxation).__name__} accepts codes one by one, which verifier "
                '"gumbel" cannot: use "rejection" or "coupling-independent"'
            )
        return resolved(kind)(relaxation=relaxation, **fixed)
    # At temperature 0 the distribution is one code and there is nothing to move: r is p.
    inner: Verifier = resolved(kind)(**fixed)
    return inner if sampling.is_greedy else RelaxedVerifier(relaxation, inner)  # type: ignore[arg-type]


def reads_drafter(method: Method) -> bool:
    """Return whether a method reads the model's own drafter, for trees or for the first codes of windows."""
    return method.spec.needs_drafter or method.settings.get("init") == "drafter"


def neighbour_columns(method: Method) -> int:
    """Return how many nearest codes of each code a method reads; 0 if it reads none."""
    released = method.settings.get("residual") == "released"
    return max(method.settings.get("k", 0) + released, method.settings.get("near", 0))


def _relaxation(method: Method, neighbours: "Tensor | None", codebook: "Tensor | None") -> Any:
    kind = resolved(method.spec.relaxation)
    fields = {entry.name: entry.default for entry in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    if "table" in fields:
        if neighbours is None:
            raise ValueError(
                f'method "{method.name}" needs the proximity table of the codebook: build it with `neighbours`'
            )
        given["table"] = neighbours
    if "distances" in fields and codebook is not None and neighbours is not None:
        from lantern.verifiers.relaxations.neighbours import proximity_distances

        given["distances"] = proximity_distances(codebook, neighbours[:, : method.settings["k"]])
    if "codebook" in fields:
        if codebook is None and fields["codebook"] is dataclasses.MISSING:
            raise ValueError(f'method "{method.name}" needs the vectors of the codes: build it with `codebook`')
        given["codebook"] = codebook
    return kind(**given, **{name: value for name, value in method.settings.items() if name in fields})
