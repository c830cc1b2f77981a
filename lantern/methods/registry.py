"""All methods by name. One line names the module that declares a method; it is imported when the method is needed."""

import difflib
from collections.abc import Iterator, Mapping
from importlib import import_module

from lantern.methods.spec import AddOn, Method, MethodSpec

# method: the module whose METHODS declares it
MODULES: dict[str, str] = {
    "plain": "lantern.methods.plain",
    "eagle1": "lantern.drafters.eagle.drafter",
    "eagle1-rejection": "lantern.drafters.eagle.drafter",
    "eagle3": "lantern.drafters.eagle.eagle3",
    "poss": "lantern.drafters.eagle.poss",
    "woven": "lantern.drafters.combined.woven",
    "sjd": "lantern.drafters.windows.jacobi",
    "scd": "lantern.drafters.windows.jacobi",
    "gumbel-jacobi": "lantern.drafters.windows.jacobi",
    "jacobi-parallel": "lantern.drafters.heads.parallelspec",
    "parallelspec": "lantern.drafters.heads.parallelspec",
    "medusa": "lantern.drafters.heads.medusa",
    "vispec": "lantern.drafters.eagle.vispec",
    "vertical": "lantern.drafters.heads.vertical",
    "eagle2": "lantern.drafters.policies.eagle2",
    "eagle2-rejection": "lantern.drafters.policies.eagle2",
    "ddd": "lantern.drafters.policies.ddd",
    "svip": "lantern.drafters.policies.svip",
    "c2t": "lantern.drafters.policies.c2t",
    "radar": "lantern.drafters.policies.radar",
    "adt-tree": "lantern.drafters.policies.adt_tree",
    "optimal": "lantern.drafters.policies.optimal",
    "sjd-pac": "lantern.drafters.windows.sjd_pac",
    "row-pool": "lantern.drafters.windows.row_pool",
    "sam": "lantern.drafters.lookup.sam",
    "sam-eagle1": "lantern.drafters.combined.sam_eagle",
    "fr-spec": "lantern.drafters.eagle.fr_spec",
    "self-cascade": "lantern.drafters.combined.self_cascade",
    "specmquant": "lantern.drafters.combined.specmquant",
    "auto": "lantern.drafters.eagle.drafter",
    "lantern": "lantern.verifiers.relaxations.lantern",
    "lantern++": "lantern.verifiers.relaxations.lantern_pp",
    "bounded": "lantern.verifiers.relaxations.bounded",
    "bounded-window": "lantern.drafters.windows.jacobi",
    "bounded-woven": "lantern.drafters.combined.woven",
    "cool": "lantern.verifiers.relaxations.cool",
    "grouped": "lantern.verifiers.relaxations.grouped",
    "tolerance": "lantern.verifiers.relaxations.tolerance",
    "vadusa": "lantern.drafters.heads.medusa",
}
_LOADED: dict[str, MethodSpec] = {}


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
    if name in MODULES:
        return METHODS[name]
    near = difflib.get_close_matches(str(name), MODULES, n=1, cutoff=0.4)
    hint = f'did you mean "{near[0]}"?' if near else f"known are {', '.join(MODULES)}"
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
    """Return the names of the parts that a method reads: its own, and that of the method whose drafter it contains."""
    inner = method.settings.get("drafter")
    names = [method.spec.add_on, spec_of(inner).add_on if inner in MODULES else None]
    return tuple(name for name in names if name)
