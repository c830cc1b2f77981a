"""One table of methods: every other one is derived from it, and a method is added by declaring it."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lantern.core.io import save_component
from lantern.core.sampling import Sampling
from lantern.drafters.windows.jacobi import JacobiDrafter
from lantern.generation.tuning.candidates import swept
from lantern.methods import METHODS, AddOn, DrafterContext, Method, MethodSpec, Setting, find, register, specs
from lantern.methods import registry as module
from lantern.methods.registry import MODULES, VERIFIERS, add_ons, build_decoder, find_add_on
from lantern.methods.spec import ENGINES, resolved
from lantern.models.folder import AddOns
from tests.methods import test_contracts as contracts
from tests.tiny import tiny_condition, tiny_target
from tests.tiny_parts import tiny_part

ROOT = Path(__file__).resolve().parents[2]
KEYS = [(1, 0), (1, 1)]


@pytest.fixture
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MODULES", dict(module.MODULES))
    monkeypatch.setattr(module, "_LOADED", dict(module._LOADED))


@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.name)
def test_a_specification_is_whole(spec: MethodSpec) -> None:
    assert spec.summary and spec.verifier in VERIFIERS and set(spec.engines) <= set(ENGINES)
    assert spec.drafter is None or callable(resolved(spec.drafter))
    assert spec.page == "" or spec.family == "plain" or (ROOT / f"docs/methods/{spec.page or spec.name}.md").is_file()
    for option in spec.options.values():
        assert option.help and option.check(option.default) == option.default
        assert option.parse(str(option.default)) == option.default
    names = [entry if isinstance(entry, str) else entry.name for entry in spec.add_ons]
    assert all(find_add_on(name) is not None for name in names)
    if spec.promise == "relaxed":
        assert swept(spec.method())[0] in spec.options


def test_a_module_declares_what_its_lines_name() -> None:
    found = {spec.name for name in set(MODULES.values()) for spec in __import__(name, fromlist=["METHODS"]).METHODS}
    assert found == set(MODULES)


def test_training_configs_of_add_ons_exist() -> None:
    for add_on in add_ons().values():
        if add_on.training_config:
            assert (ROOT / f"lantern/training/configs/{add_on.training_config}.json").is_file()


def test_a_method_imports_its_own_module_only() -> None:
    code = "import sys, lantern.methods as m; m.find('plain'); a = 'torch' in sys.modules; m.find('sjd');"
    code += "print(a, 'torch' in sys.modules, any('lookup' in name or 'medusa' in name for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False", "True", "False"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 2.5}, "k is 2.5, wanted a whole number from 0 to 1024"),
        ({"k": True}, "k is True"),
        ({"delta": float("nan")}, "delta is nan, wanted a number from 0 to 1"),
        ({"delta": 2}, "delta is 2, wanted a number from 0 to 1"),
        ({"residual": "papre"}, 'residual is "papre", wanted one of paper, released; did you mean "paper"'),
        ({"window": 4}, 'method "lantern" has no setting window: it takes tree, k, delta, residual'),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        METHODS["lantern"].with_options(**options)


def test_changed_settings_are_those_that_differ() -> None:
    assert METHODS["lantern"].with_options(k=5, delta=0.1).changed() == {"k": 5}


# -- what CONTRIBUTING.md promises, performed ------------------------------------------------------------------------


def build_made_up(method: Method, context: DrafterContext) -> JacobiDrafter:
    """Build windows of the made-up method's size."""
    return JacobiDrafter(context.target, window=method.settings["size"], keeps_distributions=False)


MADE_UP = MethodSpec(
    "made-up",
    "a window under another name",
    "windows",
    drafter=build_made_up,
    settings=(Setting("size", 4, "codes scored in one pass", low=2),),
)


@pytest.mark.usefixtures("_restored")
def test_an_untrained_method_is_added_by_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    temporary: Any = ModuleType("made_up_module")
    temporary.METHODS = (MADE_UP,)
    monkeypatch.setitem(sys.modules, "made_up_module", temporary)
    module.MODULES["made-up"] = "made_up_module"  # the line
    method = find("made-up").with_options(size=3)
    assert method.is_identical and [spec.name for spec in specs()][-1] == "made-up"
    decoder = build_decoder(method, tiny_target(), sampling=Sampling(guidance=3))
    plain = build_decoder("plain", tiny_target(), sampling=Sampling(guidance=3))
    codes = [one.generate(tiny_condition((4, 2)), keys=KEYS).codes for one in (decoder, plain)]
    assert torch.equal(codes[0], codes[1])


@pytest.mark.usefixtures("_restored")
def test_an_added_method_passes_the_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    register(MADE_UP)
    monkeypatch.setitem(contracts.SPECS, "made-up", find("made-up"))
    contracts.test_grids_are_whole_and_the_account_adds_up("made-up", contracts.SAMPLINGS[0], "guided")
    contracts.test_a_picture_depends_on_its_key_alone("made-up")
    contracts.test_greedy_codes_of_exact_methods_are_those_of_plain_decoding("made-up")
    contracts.test_gumbel_methods_give_the_codes_of_plain_decoding("made-up", contracts.SAMPLINGS[1])


@dataclass(frozen=True)
class SizeConfig:
    """Config of the made-up add-on."""

    size: int = 4
    kind: str = "made-up"
    target: str | None = None


class Size(nn.Module):
    """An add-on whose only weight is unused."""

    def __init__(self, config: SizeConfig) -> None:
        super().__init__()
        self.config, self.weight = config, nn.Parameter(torch.zeros(1))


def build_trained(method: Method, context: DrafterContext) -> JacobiDrafter:
    """Build windows of the size that the add-on has learned."""
    size: Any = context.add_on(method)
    return JacobiDrafter(context.target, window=size.config.size, keeps_distributions=False)


@pytest.mark.usefixtures("_restored")
def test_a_trained_method_is_added_with_its_add_on(tmp_path: Path) -> None:
    target = tiny_target()
    add_on = AddOn("made-up", Size, SizeConfig, training="python -m made_up", toy={"size": 5})
    register(MethodSpec("made-up", "a window of a learned size", "windows", drafter=build_trained, add_ons=(add_on,)))
    toy = tiny_part("made-up", target)
    save_component(toy.state_dict(), toy.config, tmp_path / "parts" / "made-up")
    trained = AddOns(tmp_path, target, model_name="toy")
    assert list(trained) == ["made-up"] and isinstance(trained["made-up"], Size)
    decoder = build_decoder("made-up", target, sampling=Sampling(), add_ons=trained)
    assert decoder.drafter is not None and decoder.drafter.max_nodes == 5
    with pytest.raises(ValueError, match='needs the trained part "made-up"'):
        build_decoder("made-up", target, sampling=Sampling())


def test_a_preset_changes_defaults_only() -> None:
    spec = MADE_UP.preset("made-up-paper", "another size", defaults={"size": 9})
    assert spec.method().settings == {"size": 9} and spec.page == "made-up" and spec.drafter is MADE_UP.drafter
    with pytest.raises(ValueError, match='"made-up" has no setting sise'):
        MADE_UP.preset("made-up-paper", "another size", defaults={"sise": 9})
